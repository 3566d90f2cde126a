"""podtune dry-run: the rendered chart's job as local processes."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from podtune.cluster.chart.render import effective_values, merged_values
from podtune.cluster.dry_run import dry_run as engine
from podtune.cluster.dry_run.dry_run import Result
from podtune.cluster.dry_run.shrink import SIZES, devices, small_model
from podtune.cluster.job.pods import one_job, pods_of
from podtune.commands.manifests import chart_manifests, linted
from podtune.commands.options import ReleaseName, Sets, Values
from podtune.pod.launch import terminable
from podtune.run.errors import UsageError


def dry_run(
    values: Values = None,
    sets: Sets = None,
    name: ReleaseName = "dry-run",
    model: Annotated[
        str,
        typer.Option(help="tiny or micro: a small model and question-answer set in place of the real ones."),
    ] = "",
    steps: Annotated[int, typer.Option(help="Stop after so many steps (0: as configured).")] = 0,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print each pod's environment and start nothing.")
    ] = False,
    kill: Annotated[
        str,
        typer.Option(metavar="POD@STEP", help="SIGKILL a pod at that step; it is started again once."),
    ] = "",
    output: Annotated[
        Path | None, typer.Option(help="Keep the volumes here; the next dry run resumes from them.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.")] = 1800.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="The verdict as JSON on stdout, the pods' output on stderr.")
    ] = False,
) -> None:
    """Run the job that would be deployed, as local processes, in the environment of the training operator.

    Every pod is its own group of processes with its own folders; claims are shared folders; init containers
    run first. A pod that fails is started again once where its restartPolicy says so. Exit code 0 if the job
    succeeded.

    \b
    Examples:
      podtune dry-run -f deploy/values/two-node.yaml --model tiny --steps 20
      podtune dry-run -f deploy/values/two-node.yaml --print-env
      podtune dry-run -f deploy/values/two-node.yaml --model tiny --steps 20 --kill worker-0@10
    """
    files, sets = values or [], sets or []
    config: dict[str, Any] = {}
    if model and model not in SIZES:
        fix = f"use {' or '.join(SIZES)}, or leave it out for the real one"
        raise UsageError(f"--model is {model!r}", fix=fix)
    if model:
        more, config = small_model(model, effective_values(merged_values(files, sets)))
        sets = [*sets, *more]
    documents = linted(chart_manifests(files, sets, name), tell=not print_env)
    pods = pods_of(one_job(documents), documents)
    if print_env:
        found = engine.environments(pods)
        print(json.dumps(found, indent=2) if as_json else _environment_text(found))
        return
    adaptation = devices(pods)
    adaptation.config.update(config)
    adaptation.config.update({"max_steps": steps} if steps else {})
    adaptation.config.update({"logging_steps": 1} if kill else {})
    # each pod's lines come from a thread of its own
    lock, width = threading.Lock(), max(len(pod.name) for pod in pods)

    def emit(pod: str, line: str) -> None:
        with lock:
            print(f"{pod:<{width}} | {line}", file=sys.stderr if as_json else sys.stdout, flush=True)

    with terminable():
        result = engine.run(
            documents,
            folder=output,
            emit=emit,
            kill=engine.parse_kill(kill, pods) if kill else None,
            timeout_s=timeout,
            adaptation=adaptation,
        )
    print(_as_json(result) if as_json else _as_text(result, output))
    raise typer.Exit(result.exit_code)


def _environment_text(found: dict[str, dict[str, dict[str, str]]]) -> str:
    lines = []
    for pod, containers in found.items():
        for container, variables in containers.items():
            lines += [f"# {pod}, container {container}"]
            lines += [*(f"{name}={value}" for name, value in variables.items()), ""]
    return "\n".join(lines)


def _as_json(result: Result) -> str:
    pods = [
        {
            "name": pod.name,
            "phase": pod.phase,
            "restarts": pod.restarts,
            "exits": [asdict(end) for end in pod.exits],
        }
        for pod in result.pods
    ]
    content = {"schema": "podtune.dry-run/1", **vars(result), "pods": pods}
    return json.dumps(content | {"seconds": round(result.seconds, 1)}, indent=2)


def _as_text(result: Result, output: Path | None) -> str:
    width = max(len(pod.name) for pod in result.pods)
    lines = ["", f"{'pod':<{width}}  {'phase':<9}  restarts  exit codes"]
    for pod in result.pods:
        codes = ", ".join(f"{end.container} {end.code}" for end in pod.exits)
        lines.append(f"{pod.name:<{width}}  {pod.phase:<9}  {pod.restarts:<8}  {codes}")
    lines += [f"note: {note}" for note in result.notes]
    lines.append(f"{result.job}: {result.condition} after {result.seconds:.0f} s: {result.reason}")
    if output:
        lines.append(f"volumes: {output / 'volumes'}")
    return "\n".join(lines)
