"""podtune preflight: is this pod, and are all pods of the job, fit to train?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.machine.facts import CORES, machine_cores
from podtune.pod.pod_info import gather
from podtune.pod.preflight import TOGETHER, Verdict, assess, errors
from podtune.pod.rendezvous import judge_together
from podtune.run.errors import OK, PEER_LOST, SOFTWARE, UNAVAILABLE, terminate_log
from podtune.run.exit import bounded
from podtune.run.world import PodPlace, read_pod

CONFIG = Path("/etc/podtune/config.yaml")
LATE_S = 20.0  # beyond its time for a call that does not come back


def preflight(
    config: Annotated[
        Path | None, typer.Option(help="Training YAML; default: the chart's, where it is mounted.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it, once the pods are there.")] = 60.0,
    wait: Annotated[
        float, typer.Option(help="Seconds for the other pods to arrive (0: within --timeout).")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="The whole verdict, on one line.")] = False,
) -> None:
    """Look at what training needs before it starts; in a job of several pods, together with the others.

    Volumes that can be written and are really shared, /dev/shm, GPUs (as many as PODTUNE_GPUS_PER_POD says,
    each with a small product and a copy to the next; else CUDA's reason), C compiler, names and ports,
    ranks, the same configuration, image, versions and data everywhere, and an all-reduce checked for its
    result and speed.
    Ends within --timeout with a verdict that names the bad pod. Exit code 0 fit, 65 not, 69 a pod, a port or
    a GPU is missing. podtune launch --preflight does this as step 0 of a job.

    \b
    Examples:
      podtune preflight
      podtune preflight --config config.yaml --json
    """
    # a store that is not there yet is no news, and its warnings fill screens
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    limit_s = wait + timeout + LATE_S
    silent = f"no verdict after {limit_s:.0f} s: a volume, the driver or the network does not answer"
    with bounded(limit_s, silent, UNAVAILABLE):
        verdict = run(config or (CONFIG if CONFIG.is_file() else None), timeout, wait)
    print(json.dumps(verdict.to_json()) if as_json else verdict.text(), flush=True)
    if not verdict.ok:
        raise typer.Exit(verdict.exit_code)


def run(config: Path | None, timeout_s: float, wait_s: float = 0.0) -> Verdict:
    """Look at this pod, and with the others at all of them; the verdict is the same on every pod.

    A pod that is not fit by itself says so to those that are there already, and waits for no other.
    """
    # an elastic job has no fixed number of pods
    alone = not os.environ.get("PET_NNODES") or ":" in os.environ["PET_NNODES"]
    place = PodPlace(0, 1, 1, "", 0) if alone else read_pod()
    info = gather(config, place)
    problems = assess([info])
    if place.nnodes == 1:
        return Verdict(tuple(problems), (info,))
    wait_s = LATE_S if errors(problems) else wait_s or timeout_s
    return judge_together(place, info, wait_s=wait_s, timeout_s=timeout_s)


def step_zero(config: Path | None, *, wait_s: float) -> int:
    """Run ``podtune preflight`` before a job's processes; the pod's exit code, 0 to start them.

    In a process of its own, because it may hold a GPU. Pods that are missing are worth a retry (170); what is
    wrong with a pod is not.
    """
    command = [sys.executable, "-m", "podtune.cli", "preflight", "--json", "--wait", str(wait_s)]
    command += ["--config", str(config)] if config else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output = process.communicate()[0].strip()
        finally:
            process.terminate()
    try:
        verdict = Verdict.from_json(json.loads(output))
    except ValueError:  # it was killed, or gave up
        text = f"podtune: the preflight ended with code {process.returncode} and no verdict"
        print(text, file=sys.stderr, flush=True)
        return process.returncode or SOFTWARE
    if not verdict.ok or os.environ.get("PET_NODE_RANK", "0") == "0":
        print(f"{output}\n{verdict.text()}", flush=True)
    if verdict.ok or verdict.worst is None:
        _share_cores(verdict)
        return OK
    code = PEER_LOST if verdict.worst.check in TOGETHER else process.returncode
    terminate_log(f"preflight: {verdict.sentence}", code)
    return code


def _share_cores(verdict: Verdict) -> None:
    """Leave this pod's share of its node's cores to training, where pods of the job share the node.

    A limit is what one pod may take, not what all can have at once: threads that wait for a core hold up the
    others of their team, and two pods on one node took five times as long as one.
    """
    rank = int(os.environ.get("PET_NODE_RANK") or 0)
    mine = next((pod.boot_id for pod in verdict.pods if pod.node_rank == rank), None)
    neighbours = sum(pod.boot_id == mine for pod in verdict.pods) if mine else 1
    if neighbours > 1:
        share = max(1, machine_cores() // neighbours)
        os.environ[CORES] = str(share)
        if rank == 0:
            text = f"{neighbours} pods of the job share this node's {machine_cores()} cores: {share} for each"
            print(f"podtune launch: {text}", flush=True)
