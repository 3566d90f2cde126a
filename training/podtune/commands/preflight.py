"""podtune preflight: is this pod, and are all pods of the job, fit to train?"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from podtune.run.errors import DATA, OK, PEER_LOST, SOFTWARE, UNAVAILABLE, terminate_log

CONFIG = Path("/etc/podtune/config.yaml")
MACHINE = ("gpu", "driver", "compiler")  # what the node or the image lacks
# checks that may end otherwise once the pods are started again
TOGETHER = ("names", "port", "rank", "all-reduce")
LATE_S = 20.0  # beyond its time for a call that does not come back


def preflight(
    config: Annotated[
        Path | None, typer.Option(help="The training YAML; the chart's if it is mounted.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it, once the pods are there.")] = 60.0,
    wait: Annotated[
        float, typer.Option(help="Seconds for the other pods to arrive (0: within --timeout).")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="The whole verdict, on one line.")] = False,
) -> None:
    """Look at what training needs before it starts; in a job of several pods, together with the others.

    Volumes that can be written and are really shared, space for checkpoints, /dev/shm, GPUs (as many as
    PODTUNE_GPUS_PER_POD says, each with a small product and a copy to the next), driver against CUDA, C
    compiler, network interfaces, names and ports, ranks, the same
    configuration, image, versions and data everywhere, and an all-reduce checked for its result and speed.
    Ends within --timeout with a verdict that names the bad pod. Exit code 0 fit, 65 not, 69 a pod, a port or
    a GPU is missing. podtune launch --preflight does this as step 0 of a job.

    \b
    Examples:
      podtune preflight
      podtune preflight --config config.yaml --json
    """
    # a store that is not there yet is no news, and its warnings fill screens
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    bound = threading.Timer(wait + timeout + LATE_S, _give_up, [wait + timeout + LATE_S])
    bound.daemon = True
    bound.start()
    verdict = run(config or (CONFIG if CONFIG.is_file() else None), timeout, wait)
    bound.cancel()
    print(json.dumps(verdict) if as_json else text_of(verdict), flush=True)
    if not verdict["ok"]:
        gone = any(
            problem["check"] in (*MACHINE, *TOGETHER)
            for problem in verdict["problems"]
            if problem["severity"] == "error"
        )
        raise typer.Exit(UNAVAILABLE if gone else DATA)


def run(config: Path | None, timeout_s: float, wait_s: float = 0.0) -> dict[str, Any]:
    """The verdict, the same on every pod.

    A pod that is not fit by itself says so to those that are there already, and waits for no other.
    """
    from podtune.pod.preflight import Problem, errors, judge, look, verdict
    from podtune.run.world import PodPlace, read_pod

    # an elastic job has no fixed number of pods
    alone = not os.environ.get("PET_NNODES") or ":" in os.environ["PET_NNODES"]
    pod = PodPlace(0, 1, 1, "", 0) if alone else read_pod()
    facts = look(
        config, node_rank=pod.node_rank, nnodes=pod.nnodes, master=pod.master_addr if pod.nnodes > 1 else ""
    )
    mine = judge([facts])
    if pod.nnodes == 1:
        return verdict(mine, [facts], {})
    from podtune.pod.meeting import Meeting, Missing, Underway, master_needed

    measured: dict[str, Any] = {}
    problems, listed = mine, [facts]
    try:
        with master_needed(facts["pod"]):
            meeting = Meeting(
                pod, facts, wait_s=LATE_S if errors(mine) else wait_s or timeout_s, timeout_s=timeout_s
            )
            listed = meeting.facts()
            problems = judge(listed)
            if not errors(problems):
                shared = Path(os.environ.get("OUTPUT_DIR") or ".")
                # a run that is published goes on without a shared volume
                for reader, writer in [] if facts.get("publish") else meeting.unshared(shared):
                    text = f"it does not see what {listed[writer]['pod']} wrote to {shared}"
                    fix = "the claim is not one volume for all pods: ReadWriteMany, and one claim"
                    problems.append(Problem(listed[reader]["pod"], "shared", text, fix))
                measured["all_reduce"] = meeting.all_reduce()
            return meeting.agree(verdict(problems, listed, measured) if pod.node_rank == 0 else None)
    except Underway:
        text = "the other pods are past their preflight: this pod was started again, and joins them"
        return verdict(
            [*problems, Problem(facts["pod"], "names", text, "nothing to do", "warning")], listed, measured
        )
    except Missing as error:
        fix = "kubectl get pods; check names, port and NetworkPolicy, and nccl.env for the interface"
        return verdict(
            [*problems, *(Problem(who, check, text, fix) for who, check, text in error.faults)],
            listed,
            measured,
        )


def step_zero(config: Path | None, *, wait_s: float) -> int:
    """``podtune preflight`` before a job's processes are started; the exit code with which the pod ends, 0 to
    go on.

    In a process of its own, because it may hold a GPU. Pods that are missing are worth a retry (170); what is
    wrong with a pod is not.
    """
    import subprocess

    command = [sys.executable, "-m", "podtune.cli", "preflight", "--json", "--wait", str(wait_s)]
    command += ["--config", str(config)] if config else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = process.communicate()[0].strip()
        finally:
            process.terminate()
    try:
        verdict = json.loads(told)
    except ValueError:
        print(
            f"podtune: the preflight ended with code {process.returncode} and no verdict",
            file=sys.stderr,
            flush=True,
        )
        return process.returncode or SOFTWARE
    if not verdict["ok"] or os.environ.get("PET_NODE_RANK", "0") == "0":
        print(f"{told}\n{text_of(verdict)}", flush=True)
    if verdict["ok"]:
        return OK
    worst = next(problem for problem in verdict["problems"] if problem["severity"] == "error")
    code = PEER_LOST if worst["check"] in TOGETHER else process.returncode
    terminate_log(f"preflight: {verdict['sentence']}", code)
    return code


def _give_up(seconds: float) -> None:
    print(
        f"podtune preflight: no verdict after {seconds:.0f} s: a volume, the driver or the network does not "
        "answer",
        file=sys.stderr,
        flush=True,
    )
    os._exit(UNAVAILABLE)


def text_of(verdict: dict[str, Any]) -> str:
    """The verdict for people: the sentence last."""
    lines = []
    for facts in verdict["pods"]:
        gpus = (
            f"{facts['gpus']} x {facts.get('gpu', 'GPU')}" if facts.get("gpus") else f"{facts['cpus']} CPUs"
        )
        free = ", ".join(
            (f"{volume['path']} {volume['free_bytes'] / 2**30:.0f} GiB free")
            for volume in facts.get("volumes", [])
            if "free_bytes" in volume
        )
        lines.append(
            f"{facts['pod']}: {gpus}, interface "
            f"{facts.get('interface', 'unknown')}{f', {free}' if free else ''}"
        )
    if measured := verdict["measured"].get("all_reduce"):
        lines.append(
            f"all-reduce of {measured['bytes'] >> 20} MiB by {measured['backend']}: "
            f"{measured['bus_gb_per_s']} GB/s"
        )
    for problem in verdict["problems"]:
        lines.append(f"{problem['severity']}: {problem['pod']}: {problem['text']}\n  fix: {problem['fix']}")
    lines.append(f"preflight: {'ok' if verdict['ok'] else 'not fit'}: {verdict['sentence']}")
    return "\n".join(lines)
