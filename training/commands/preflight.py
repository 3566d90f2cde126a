"""podtune preflight: is this pod, and are all pods of the job, fit to train?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from training.run.errors import DATA, UNAVAILABLE

CONFIG = Path("/etc/podtune/config.yaml")


def preflight(
    config: Annotated[Path | None, typer.Option(help="the training YAML; the chart's if it is mounted")] = None,
    timeout: Annotated[float, typer.Option(help="seconds for all of it")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="the whole verdict, on one line")] = False,
) -> None:
    """Look at what training needs before it starts; in a job of several pods, together with the others.

    Volumes that can be written and are really shared, space for checkpoints, /dev/shm, driver against CUDA, network interfaces, names and
    ports, ranks, the same configuration, image, versions and data everywhere, and an all-reduce checked for its result and speed. Ends
    within --timeout with a verdict that names the bad pod. Exit code 0 fit, 65 not, 69 a pod is missing.

    \b
    Examples:
      podtune preflight
      podtune preflight --config config.yaml --json
    """
    verdict = run(config or (CONFIG if CONFIG.is_file() else None), timeout)
    print(json.dumps(verdict) if as_json else text_of(verdict), flush=True)
    if not verdict["ok"]:
        together = ("names", "port", "rank", "all-reduce")
        raise typer.Exit(UNAVAILABLE if any(one["check"] in together for one in verdict["problems"]) else DATA)


def run(config: Path | None, timeout_s: float) -> dict[str, Any]:
    """The verdict, the same on every pod."""
    from training.cluster.preflight import Problem, judge, look, verdict
    from training.run.distributed import Pod, read_pod

    alone = not os.environ.get("PET_NNODES") or ":" in os.environ["PET_NNODES"]  # an elastic job has no fixed number of pods
    pod = Pod(0, 1, 1, "", 0) if alone else read_pod()
    facts = look(config, node_rank=pod.node_rank, nnodes=pod.nnodes, master=pod.master_addr if pod.nnodes > 1 else "")
    if pod.nnodes == 1:
        return verdict(judge([facts]), [facts], {})
    from training.run.preflight_collective import Meeting, Missing

    measured: dict[str, Any] = {}
    found, listed = [], [facts]
    try:
        meeting = Meeting(pod, facts, timeout_s)
        listed = meeting.facts()
        found = judge(listed)
        names = {f"rank {one['node_rank']}": one["pod"] for one in listed}
        shared = Path(os.environ.get("OUTPUT_DIR") or ".")
        for text in meeting.unshared(shared):
            fix = "the claim is not one volume for all pods: ReadWriteMany, and one claim"
            found.append(Problem(names[" ".join(text.split()[:2])], "shared", text, fix))
        measured["all_reduce"] = meeting.all_reduce()
    except Missing as error:
        fix = "kubectl get pods; check names, port and NetworkPolicy, and nccl.env for the interface"
        found += [Problem(who, check, text, fix) for who, check, text in error.faults]
        return verdict(found, listed, measured)
    return meeting.agree(verdict(found, listed, measured) if pod.node_rank == 0 else None)


def text_of(verdict: dict[str, Any]) -> str:
    """The verdict for people: the sentence last."""
    lines = []
    for facts in verdict["pods"]:
        gpus = f"{facts['gpus']} x {facts.get('gpu', 'GPU')}" if facts.get("gpus") else f"{facts['cpus']} CPUs"
        free = ", ".join(
            f"{one['path']} {one['free_bytes'] / 2**30:.0f} GiB free" for one in facts.get("volumes", []) if "free_bytes" in one
        )
        lines.append(f"{facts['pod']}: {gpus}, interface {facts.get('interface', 'unknown')}{f', {free}' if free else ''}")
    if measured := verdict["measured"].get("all_reduce"):
        lines.append(f"all-reduce of {measured['bytes'] >> 20} MiB by {measured['backend']}: {measured['bus_gb_per_s']} GB/s")
    for one in verdict["problems"]:
        lines.append(f"{one['severity']}: {one['pod']}: {one['text']}\n  fix: {one['fix']}")
    lines.append(f"preflight: {'ok' if verdict['ok'] else 'not fit'}: {verdict['sentence']}")
    return "\n".join(lines)
