"""What a pod finds out about itself before training, and what pods must agree on. Needs torch only where GPUs
are expected.

:func:`look` gathers one pod's facts, :func:`judge` turns the facts of all pods into problems that name the
pod. How the facts travel between pods, and the all-reduce, are in training/podtune/pod/meeting.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from podtune.machine import facts as machine
from podtune.machine.building import c_compiler
from podtune.machine.provenance import versions
from podtune.sft.data.source import local_path

Json = dict[str, Any]

DEFAULT_CHECKPOINTS = 2
VOLUMES = ("OUTPUT_DIR", "HF_HOME")
#: facts that all pods must share, with what a difference means
SAME = {
    "config_sha256": "the training configuration differs",
    "image": "the image differs",
    "versions": "installed versions differ",
    "data": "the data set differs",
    "nnodes": "the number of pods differs",
    "gpus": "the number of GPUs differs",
}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, the pod it is wrong on, and what to do."""

    pod: str
    check: str
    text: str
    fix: str
    severity: Literal["error", "warning"] = "error"


def look(config_file: Path | None, *, node_rank: int, nnodes: int, master: str = "") -> Json:
    """This pod's facts. What cannot be known is absent. ``master`` is the name that the pods meet at."""
    config = _config(config_file)
    facts: Json = {
        "pod": os.environ.get("PODTUNE_POD_NAME") or socket.gethostname(),
        "node_rank": node_rank,
        "nnodes": nnodes,
        "image": os.environ.get("PODTUNE_IMAGE"),
        "versions": versions(),
        "cpus": machine.usable_cpus(),
        "shm_bytes": machine.shared_memory(),
        "volumes": [_volume(Path(os.environ[name])) for name in VOLUMES if os.environ.get(name)],
        "config_sha256": hashlib.sha256(config_file.read_bytes()).hexdigest()
        if config_file and config_file.is_file()
        else None,
        "data": _data_fingerprint(config.get("dataset_name")),
        "checkpoint_bytes": _checkpoint_bytes(config),
        "publish": config.get("publish"),
        "gpus_asked": int(os.environ.get("PODTUNE_GPUS_PER_POD") or 0),
        **_gpus(),
        "cuda": build.cuda if (build := machine.torch_build()) and build.cuda else None,
        "interface": _interface(master),
        "named_interfaces": {
            name: os.environ[name]
            for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
            if os.environ.get(name)
        },
        "interfaces": [name for _, name in socket.if_nameindex()],
    }
    if facts["gpus_asked"] or facts["gpus"]:
        from podtune.pod.compute import try_gpus

        facts |= try_gpus() | {"c_compiler": c_compiler() or ""}
    return {key: value for key, value in facts.items() if value is not None}


def judge(pods: Iterable[Json]) -> list[Problem]:
    """What is wrong on each pod, and between them. The pod that differs from most others is the one named."""
    listed = list(pods)
    return [problem for facts in listed for problem in _alone(facts)] + _together(listed)


def _alone(facts: Json) -> Iterable[Problem]:
    pod = facts["pod"]
    for volume in facts.get("volumes", []):
        if volume.get("error"):
            yield Problem(
                pod,
                "volume",
                f"{volume['path']} cannot be written: {volume['error']}",
                "check the claim, and fsGroup of the pod",
            )
    needed = facts.get("checkpoint_bytes")
    output: Json = next(iter(facts.get("volumes", [])), {})
    if needed and output.get("free_bytes") is not None and output["free_bytes"] < needed:
        text = (
            f"{output['path']} has {_gib(output['free_bytes'])} free, checkpoints need about {_gib(needed)}"
        )
        yield Problem(pod, "space", text, "enlarge persistence.output.size, or lower save_total_limit")
    if facts.get("shm_bytes", machine.LEAST_SHM) < machine.LEAST_SHM:
        text = f"/dev/shm has {_gib(facts['shm_bytes'])}"
        yield Problem(
            pod,
            "shm",
            text,
            "mount an emptyDir with medium: Memory there (shm.sizeLimit)",
            "warning" if not facts.get("gpus") else "error",
        )
    yield from _driver(facts)
    for variable, wanted in facts.get("named_interfaces", {}).items():
        if not _names_one(wanted, facts["interfaces"]):
            text = f"{variable}={wanted} names none of its interfaces ({', '.join(facts['interfaces'])})"
            yield Problem(
                pod, "interface", text, "set it to one that every pod has, under nccl.env, or leave it out"
            )


def _driver(facts: Json) -> Iterable[Problem]:
    pod, driver, cuda = facts["pod"], facts.get("driver", ""), facts.get("cuda", "")
    if least := machine.too_old(driver, cuda):
        text = f"the driver {driver} is too old for torch's CUDA {cuda}, which needs {least}"
        yield Problem(pod, "driver", text, "update the node's driver, or use an image with an older CUDA")
    yield from _gpus_that_work(facts)
    if facts.get("c_compiler") == "":
        text = "no C compiler, with which Triton builds a piece of the loss on every GPU"
        yield Problem(pod, "compiler", text, "use an image with gcc (podtune's has it), or set CC")


def _gpus_that_work(facts: Json) -> Iterable[Problem]:
    pod, asked, there = facts["pod"], facts.get("gpus_asked", 0), facts["gpus"]
    reason = f": {facts['cuda_error']}" if facts.get("cuda_error") else ""
    plural = "s" if asked > 1 else ""
    if facts.get("gpu_error"):
        yield Problem(pod, "gpu", facts["gpu_error"] + reason, "check the node's driver: nvidia-smi")
    elif there < asked:
        text = f"{asked} GPU{plural} asked for and {there or 'none'} there{reason}"
        fix = "check the node's driver and device plugin, and the runtimeClass that its GPUs need"
        yield Problem(pod, "gpu", text, fix)
    elif reason or facts.get("gpus_usable", there) < asked:
        usable = facts.get("gpus_usable", there)
        text = f"{usable or 'none'} of {there} GPU{'s' if there > 1 else ''} can be used by CUDA{reason}"
        fix = "check the driver; on boards with NVSwitch that the fabric manager runs; or take the node out"
        yield Problem(pod, "gpu", text, fix)


def _together(pods: list[Json]) -> list[Problem]:
    problems = []
    for key, text in SAME.items():
        values: dict[str, list[str]] = {}
        for facts in pods:
            values.setdefault(json.dumps(facts.get(key), sort_keys=True), []).append(facts["pod"])
        if len(values) > 1:
            # The value of most pods is taken for right; between two pods, the master's (it comes first).
            right = max(values.values(), key=len)
            odd = next(names for names in values.values() if names is not right)
            detail = _difference(key, pods, odd[0], right[0])
            fix = "start all pods from one template: delete the job and create it again"
            problems.append(Problem(odd[0], key, f"{text} from {right[0]}'s{detail}", fix))
    return problems


def _difference(key: str, pods: list[Json], odd: str, right: str) -> str:
    value = next(facts.get(key) for facts in pods if facts["pod"] == odd)
    other = next(facts.get(key) for facts in pods if facts["pod"] == right)
    if isinstance(value, dict) and isinstance(other, dict):
        names = [name for name in sorted({*value, *other}) if value.get(name) != other.get(name)]
        return ": " + ", ".join(f"{name} {value.get(name)} instead of {other.get(name)}" for name in names)
    return f": {str(value)[:60]} instead of {str(other)[:60]}"


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Those with which training should not start."""
    return [problem for problem in problems if problem.severity == "error"]


def verdict(problems: list[Problem], pods: list[Json], measured: Json) -> Json:
    """The JSON verdict, with one sentence that names the bad pod."""
    worst = (errors(problems) or problems)[:1]
    sentence = f"{len(pods)} pods agree and reach each other" if len(pods) > 1 else "this pod is ready"
    if worst:
        sentence = f"{worst[0].pod}: {worst[0].text}"
    return {
        "schema": "podtune.preflight/1",
        "ok": not errors(problems),
        "sentence": sentence,
        "problems": [asdict(problem) for problem in problems],
        "measured": measured,
        "pods": sorted(pods, key=lambda facts: facts["node_rank"]),
    }


def _config(file: Path | None) -> Json:
    if file is None or not file.is_file():
        return {}
    import yaml

    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _volume(folder: Path) -> Json:
    """Whether a file can be written, read back and removed there, and what is free."""
    volume: Json = {"path": str(folder)}
    probe = folder / f".preflight-{os.getpid()}-{socket.gethostname()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"podtune")
        if probe.read_bytes() != b"podtune":
            raise OSError("what was written was not read back")
        probe.unlink()
        volume["free_bytes"] = shutil.disk_usage(folder).free
    except OSError as error:
        volume["error"] = error.strerror or str(error)
    return volume


def _data_fingerprint(name: object) -> str | None:
    """Names, sizes and both ends of the data set's files; None for one that is not a local path."""
    root = local_path(str(name)) if name else None
    if root is None or not root.exists():
        return None
    digest = hashlib.sha256()
    for file in sorted(
        path
        for path in ([root] if root.is_file() else root.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    ):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(root.parent)} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(65536))
            stream.seek(max(0, size - 65536))
            digest.update(stream.read(65536))
    return digest.hexdigest()


def _checkpoint_bytes(config: Json) -> int | None:
    """What the checkpoints that are kept, and one being written, still need at least; None for LoRA, or a
    model that is no local path.
    """
    from podtune.run.checkpoint import checkpoint_bytes, missing_bytes

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


def _gpus() -> Json:
    seen = machine.gpus()
    if seen.error:
        return {"gpus": 0, "gpu_error": seen.error[:200]}
    more = {"gpu": seen.names[0], "driver": seen.driver} if seen.names else {}
    return {"gpus": seen.count, **more}


def _interface(master: str) -> str | None:
    """The interface by which packets to ``master`` leave; the collectives choose the same unless told
    otherwise.
    """
    import psutil

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((socket.gethostbyname(master) if master else "192.0.2.1", 9))  # sends nothing
            local = probe.getsockname()[0]
    except OSError:
        return None
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(address.address == local for address in addresses)
        ),
        None,
    )


def _names_one(wanted: str, interfaces: list[str]) -> bool:
    """NCCL's grammar: a list of prefixes, ``=`` for exact names, ``^`` for all but."""
    exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    names = [name for name in wanted.lstrip("^=").split(",") if name]
    matched = [
        interface
        for interface in interfaces
        if any(interface == name if exact else interface.startswith(name) for name in names)
    ]
    return len(matched) < len(interfaces) if exclude else bool(matched)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
