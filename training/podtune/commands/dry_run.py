"""podtune dry-run: the rendered chart's job as local processes."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from podtune.commands.options import Release, Sets, Values
from podtune.run.errors import UsageError

if TYPE_CHECKING:
    from podtune.cluster.dry_run.dry_run import Adaptation, Result
    from podtune.cluster.job.manifest import Pod

Manifest = Annotated[
    Path | None,
    typer.Option(help="A manifest in place of the chart; its commands run here, so read it first."),
]
Model = Annotated[
    str, typer.Option(help="tiny or micro: a small model and question-answer set in place of the real ones.")
]
Kill = Annotated[
    str, typer.Option(metavar="POD@STEP", help="SIGKILL a pod at that step; it is started again once.")
]

COLOURS = (36, 33, 35, 32, 34, 31)  # of ANSI, one a pod in turn


def dry_run(
    values: Values = None,
    sets: Sets = None,
    name: Release = "dry-run",
    manifest: Manifest = None,
    model: Model = "",
    steps: Annotated[int, typer.Option(help="Stop after so many steps (0: as configured).")] = 0,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print each pod's environment and start nothing.")
    ] = False,
    kill: Kill = "",
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

    --manifest FILE runs the commands of FILE on this machine, as you: like a script of somebody's. Only the
    pods of podtune's own chart get your HF_TOKEN.

    \b
    Examples:
      podtune dry-run -f deploy/values/two-node.yaml --model tiny --steps 20
      podtune dry-run -f deploy/values/two-node.yaml --print-env
      podtune dry-run -f deploy/values/two-node.yaml --model tiny --steps 20 --kill worker-0@10
    """
    from podtune.cluster.dry_run import dry_run as engine
    from podtune.cluster.job.pods import one_job, pods_of
    from podtune.commands.manifests import linted
    from podtune.pod.launch import terminable

    text, config = _rendered(values or [], sets or [], name, manifest, model, steps)
    documents = linted(text, tell=not print_env)
    pods = pods_of(one_job(documents), documents)
    if print_env:
        print(_environments(pods) if as_json else "\n".join(engine.lines_of_environment(pods)))
        return
    every_step = {"logging_steps": 1} if kill else {}
    adaptation = _adaptation(pods, config | every_step, own_chart=manifest is None)
    with terminable():
        result = engine.run(
            documents,
            folder=output,
            emit=_printer([pod.name for pod in pods], sys.stderr if as_json else sys.stdout),
            kill=engine.parse_kill(kill, pods) if kill else None,
            timeout_s=timeout,
            adaptation=adaptation,
        )
    print(_as_json(result) if as_json else _as_text(result, output))
    raise typer.Exit(result.exit_code)


def _adaptation(pods: list[Pod], config: dict[str, Any], *, own_chart: bool) -> Adaptation:
    """The changes for this machine and of the options; only the chart's own pods get the HF_TOKEN."""
    from podtune.cluster.dry_run.shrink import devices

    adaptation = devices(pods)
    adaptation.config.update(config)
    if own_chart and (token := os.environ.get("HF_TOKEN")):
        for pod in pods:
            adaptation.variables.setdefault(pod.name, {})["HF_TOKEN"] = token
    return adaptation


def _rendered(
    values: list[Path], sets: list[str], name: str, manifest: Path | None, model: str, steps: int
) -> tuple[str, dict[str, Any]]:
    """The manifests, and what --model and --steps change in the training YAML."""
    from podtune.cluster.chart.render import effective_values, merged_values
    from podtune.cluster.dry_run.shrink import SIZES, small_model
    from podtune.commands.manifests import chart_manifests, read_manifest

    config: dict[str, Any] = {"max_steps": steps} if steps else {}
    if model and model not in SIZES:
        raise UsageError(
            f"--model is {model!r}", fix=f"use {' or '.join(SIZES)}, or leave it out for the real one"
        )
    if manifest is not None:
        if values or sets or model:
            raise UsageError("--manifest and values exclude each other", fix="give one of them")
        return read_manifest(manifest), config
    if model:
        more, small = small_model(model, effective_values(merged_values(values, sets)))
        sets, config = [*sets, *more], {**small, **config}
    return chart_manifests(values, sets, name), config


def _printer(names: list[str], stream: TextIO) -> Callable[[str, str], None]:
    """A writer of whole lines from several threads, each after its pod's name, in colour on a terminal."""
    from podtune.run.errors import MARKER

    lock, width = threading.Lock(), max(len(name) for name in names)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}

    def emit(pod: str, line: str) -> None:
        prefix = f"{pod:<{width}} |"
        if stream.isatty():
            if line.startswith(MARKER):
                return  # the record for machines; the same is in run.json on the output volume
            prefix = f"\033[{colours[pod]}m{prefix}\033[0m"
        with lock:
            print(f"{prefix} {line}", file=stream, flush=True)

    return emit


def _environments(pods: list[Pod]) -> str:
    from podtune.cluster.dry_run.dry_run import environment_of

    environments = {
        pod.name: {container["name"]: environment_of(pod, container) for container in pod.spec["containers"]}
        for pod in pods
    }
    return json.dumps(environments, indent=2)


def _as_json(result: Result) -> str:
    from dataclasses import asdict

    from podtune.cluster.dry_run.dry_run import SCHEMA

    content = {
        "schema": SCHEMA,
        "job": result.job,
        "condition": result.condition,
        "reason": result.reason,
        "seconds": round(result.seconds, 1),
        "pods": [
            {
                "name": run.name,
                "phase": run.phase,
                "restarts": run.restarts,
                "exits": [asdict(end) for end in run.exits],
            }
            for run in result.pods
        ],
        "notes": result.notes,
    }
    return json.dumps(content, indent=2)


def _as_text(result: Result, output: Path | None) -> str:
    width = max(len(run.name) for run in result.pods)
    lines = ["", f"{'pod':<{width}}  {'phase':<9}  restarts  exit codes"]
    for run in result.pods:
        codes = ", ".join(f"{end.container} {end.code}" for end in run.exits)
        lines.append(f"{run.name:<{width}}  {run.phase:<9}  {run.restarts:<8}  {codes}")
    lines += [f"note: {note}" for note in result.notes]
    lines.append(f"{result.job}: {result.condition} after {result.seconds:.0f} s: {result.reason}")
    if output:
        lines.append(f"volumes: {output / 'volumes'}")
    return "\n".join(lines)
