"""One pod's facts before training: GPUs, volumes, versions, digests of configuration and data."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from podtune.machine import facts as machine
from podtune.machine.building import c_compiler
from podtune.machine.provenance import versions
from podtune.run.errors import PeerLost, UserError
from podtune.run.output_volume import check_writable
from podtune.run.world import PodPlace, promised_gpus
from podtune.run.yaml_text import read_mapping
from podtune.sft.data.source import local_path

VOLUMES = ("OUTPUT_DIR", "HF_HOME")
SAMPLE_BYTES = 65536  # of the beginning of a data file, for its digest


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
    volume_error: str | None = None  # of the first folder that cannot be written
    config_sha256: str | None = None
    data: str | None = None  # digest of the data set's files
    publish: str | None = None
    gpus_asked: int = 0
    gpus: int = 0
    gpu: str | None = None
    gpus_usable: int | None = None
    cuda_error: str | None = None
    c_compiler: str | None = None  # empty: there is none, and a GPU needs one

    def to_json(self) -> dict[str, object]:
        """Facts that are known."""
        return asdict(
            self, dict_factory=lambda items: {key: value for key, value in items if value is not None}
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PodInfo:
        """Read the facts of another pod; keys of another podtune's are left out, its image is the problem."""
        names = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in content.items() if key in names})


def gather(config_file: Path | None, place: PodPlace) -> PodInfo:
    """Gather this pod's facts; torch is imported only where GPUs are expected."""
    config = read_mapping(config_file, fix="name the training YAML") if config_file else {}
    info = PodInfo(
        pod=os.environ.get("PODTUNE_POD_NAME") or socket.gethostname(),
        node_rank=place.node_rank,
        nnodes=place.nnodes,
        image=os.environ.get("PODTUNE_IMAGE"),
        versions=versions(),
        cpus=machine.usable_cpus(),
        boot_id=_boot_id(),
        shm_bytes=machine.shared_memory(),
        volume_error=_volume_error(),
        config_sha256=hashlib.sha256(config_file.read_bytes()).hexdigest()
        if config_file and config
        else None,
        data=_data_digest(config.get("dataset_name")),
        publish=config.get("publish"),
        gpus_asked=promised_gpus(),
        gpus=machine.gpu_devices(),
    )
    if not (info.gpus_asked or info.gpus):
        return info
    from podtune.pod.compute import try_gpus

    usable, name, error = try_gpus()
    return replace(
        info,
        gpus=max(info.gpus, usable),  # AMD's have other devices
        gpu=name or None,
        gpus_usable=usable,
        cuda_error=error or None,
        c_compiler=c_compiler() or "",
    )


def _boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _volume_error() -> str | None:
    for name in VOLUMES:
        try:
            if folder := os.environ.get(name):
                check_writable(Path(folder))
        except (UserError, PeerLost) as error:
            return str(error).splitlines()[0]
    return None


def _data_digest(name: object) -> str | None:
    """Digest of names, sizes and beginnings of the data set's files; None for a hub name."""
    root = local_path(str(name)) if name else None
    if root is None or not root.exists():
        return None
    digest = hashlib.sha256()
    for file in sorted([root] if root.is_file() else root.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            digest.update(f"{file.relative_to(root.parent)} {file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
