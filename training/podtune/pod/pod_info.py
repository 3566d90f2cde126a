"""One pod's facts before training: GPUs, volumes, interfaces, versions, digests of configuration and data."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from podtune.machine import facts as machine
from podtune.machine.building import c_compiler
from podtune.machine.provenance import versions
from podtune.run.world import PodPlace
from podtune.run.yaml_text import load
from podtune.sft.data.source import local_path

VOLUMES = ("OUTPUT_DIR", "HF_HOME")
DEFAULT_CHECKPOINTS = 2  # kept where save_total_limit is not set
SAMPLE_BYTES = 65536  # of each end of a data file, for its digest


@dataclass(frozen=True)
class VolumeInfo:
    """A folder that the pod writes to: free bytes, or the error of a write."""

    path: str
    free_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class PodInfo:
    """Facts of one pod, as the pods exchange them; None is unknown, or does not apply.

    The names are keys of ``podtune preflight --json``.
    """

    pod: str
    node_rank: int
    nnodes: int = 1
    image: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    cpus: int = 1
    boot_id: str | None = None  # of the kernel: pods with the same one share a node's cores
    shm_bytes: int | None = None
    volumes: tuple[VolumeInfo, ...] = ()
    config_sha256: str | None = None
    data: str | None = None  # digest of the data set's files
    checkpoint_bytes: int | None = None
    publish: str | None = None
    gpus_asked: int = 0
    gpus: int = 0
    gpu_error: str | None = None
    gpu: str | None = None
    driver: str | None = None
    cuda: str | None = None
    interface: str | None = None
    named_interfaces: Mapping[str, str] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    gpus_usable: int | None = None
    cuda_error: str | None = None
    c_compiler: str | None = None  # empty: there is none, and a GPU needs one

    def to_json(self) -> dict[str, Any]:
        """Facts that are known."""
        return asdict(
            self, dict_factory=lambda items: {key: value for key, value in items if value is not None}
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PodInfo:
        """Read the facts of another pod; keys of another podtune's are left out, its image is the problem."""
        names = {each.name for each in fields(cls)}
        info = cls(**{key: value for key, value in content.items() if key in names})
        volumes = tuple(VolumeInfo(**volume) for volume in content.get("volumes", ()))
        return replace(info, volumes=volumes, interfaces=tuple(info.interfaces))


def gather(config_file: Path | None, place: PodPlace) -> PodInfo:
    """Gather this pod's facts; torch is imported only where GPUs are expected."""
    config = _config(config_file)
    seen = machine.gpus()
    build = machine.torch_build()
    promised = int(os.environ.get("PODTUNE_GPUS_PER_POD") or 0)
    info = PodInfo(
        pod=os.environ.get("PODTUNE_POD_NAME") or socket.gethostname(),
        node_rank=place.node_rank,
        nnodes=place.nnodes,
        image=os.environ.get("PODTUNE_IMAGE"),
        versions=versions(),
        cpus=machine.usable_cpus(),
        boot_id=_boot_id(),
        shm_bytes=machine.shared_memory(),
        volumes=tuple(_volume(Path(os.environ[name])) for name in VOLUMES if os.environ.get(name)),
        config_sha256=_sha256(config_file),
        data=_data_digest(config.get("dataset_name")),
        checkpoint_bytes=_checkpoint_bytes(config),
        publish=config.get("publish"),
        gpus_asked=promised,
        gpus=0 if seen.error else seen.count,
        gpu_error=seen.error[:200] or None,
        gpu=seen.names[0] if seen.names else None,
        driver=seen.driver if seen.names else None,
        cuda=(build.cuda or None) if build else None,
        interface=_interface(place.master_addr if place.nnodes > 1 else ""),
        named_interfaces={
            name: os.environ[name]
            for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
            if os.environ.get(name)
        },
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )
    if not (info.gpus_asked or info.gpus):
        return info
    from podtune.pod.compute import try_gpus

    tried = try_gpus()
    return replace(
        info, gpus_usable=tried.usable, cuda_error=tried.error or None, c_compiler=c_compiler() or ""
    )


def _config(file: Path | None) -> dict[str, Any]:
    content = load(file.read_text(encoding="utf-8"), str(file)) if file and file.is_file() else None
    return content if isinstance(content, dict) else {}


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _sha256(file: Path | None) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file and file.is_file() else None


def _volume(folder: Path) -> VolumeInfo:
    """Write a file there, read it back, remove it; and see what is free."""
    probe = folder / f".preflight-{os.getpid()}-{socket.gethostname()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"podtune")
        if probe.read_bytes() != b"podtune":
            raise OSError("what was written was not read back")
        probe.unlink()
        return VolumeInfo(str(folder), free_bytes=shutil.disk_usage(folder).free)
    except OSError as error:
        return VolumeInfo(str(folder), error=error.strerror or str(error))


def _data_digest(name: object) -> str | None:
    """Digest of names, sizes and both ends of the data set's files; None for a hub name or a missing path."""
    root = local_path(str(name)) if name else None
    if root is None or not root.exists():
        return None
    digest = hashlib.sha256()
    for file in sorted([root] if root.is_file() else root.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(root.parent)} {size}\n".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(SAMPLE_BYTES))
                stream.seek(max(0, size - SAMPLE_BYTES))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _checkpoint_bytes(config: Mapping[str, Any]) -> int | None:
    """Bytes that the checkpoints kept, and one being written, still need; None for LoRA or a hub's model."""
    from podtune.run.output_volume import checkpoint_bytes, missing_bytes

    model = local_path(str(config.get("model_name_or_path") or "")) or Path()
    if (
        config.get("use_peft")
        or not config.get("model_name_or_path")
        or not model.is_dir()
        or config.get("save_strategy") == "no"
    ):
        return None
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    whole = not config.get("save_only_model")
    each = checkpoint_bytes(weights, str(config.get("optim", "adamw")), model_only=not whole)
    if whole and config.get("strategy") in ("fsdp", "fsdp-grad-op", "hsdp"):
        each += weights  # accelerate keeps FSDP's own copy beside the model's
    output = Path(os.environ.get("OUTPUT_DIR") or str(config.get("output_dir") or "."))
    return missing_bytes(output, each, config.get("save_total_limit") or DEFAULT_CHECKPOINTS) or None


def _interface(master: str) -> str | None:
    """Find the interface by which packets to ``master`` leave: the collectives' own default, too."""
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(master) if master else "192.0.2.1", 9))  # sends nothing
            local = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == local for address in addresses):
            return str(name)
    return None
