"""podtune dry-run: the rendered chart's job as local processes."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from podtune.run.errors import DataError, NotFound, UsageError

if TYPE_CHECKING:
    from podtune.cluster.dry_run.dry_run import Result

COLOURS = (36, 33, 35, 32, 34, 31)  # of ANSI, one a pod in turn


def dry_run(
    values: Annotated[
        list[Path] | None, typer.Option("-f", "--values", help="Values for the chart; may be repeated.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As helm's --set.")
    ] = None,
    name: Annotated[str, typer.Option(help="The release, and so the run.")] = "dry-run",
    manifest: Annotated[
        Path | None,
        typer.Option(help="A manifest in place of the chart; its commands run here, so read it first."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help="tiny or micro: a small model and question-answer set in place of the real ones."),
    ] = "",
    steps: Annotated[int, typer.Option(help="Stop after so many steps (0: as configured).")] = 0,
    print_env: Annotated[
        bool, typer.Option("--print-env", help="Print each pod's environment and start nothing.")
    ] = False,
    kill: Annotated[
        list[str] | None, typer.Option(metavar="POD@STEP", help="SIGKILL a pod's processes at that step.")
    ] = None,
    stall: Annotated[list[str] | None, typer.Option(metavar="POD@STEP", help="SIGSTOP them.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Keep the volumes here; the next dry run goes on from them.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.")] = 1800.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="The verdict as JSON on stdout, the pods' output on stderr.")
    ] = False,
) -> None:
    """Run the job that would be deployed, as local processes, under the environment and rules of the training
    operator.

    Every pod is its own group of processes with its own folders; claims are shared folders; init containers
    run first. Ends with what Kubernetes would have concluded. Exit code 0 if the job succeeded.

    --manifest FILE runs the commands of FILE on this machine, as you: like a script of somebody's. Only the
    pods of podtune's own chart get your HF_TOKEN.

    \b
    Examples:
      podtune dry-run -f deploy/values/two-node.yaml --model tiny --steps 20
      podtune dry-run -f deploy/values/two-node.yaml --print-env
      podtune dry-run -f deploy/values/two-node.yaml --model tiny --steps 20 --kill worker-0@10
    """
    from podtune.cluster.dry_run import dry_run as engine
    from podtune.cluster.dry_run.shrink import devices
    from podtune.pod.launch import terminable

    text, config = _rendered(values or [], sets or [], name, manifest, model, steps)
    documents = _checked(text, quiet=print_env)
    jobs = engine.jobs_of(documents)
    if len(jobs) != 1:
        raise DataError(
            f"{len(jobs)} jobs in the manifests", where="dry-run", fix="give one PyTorchJob or TrainJob"
        )
    pods = engine.pods_of(jobs[0], documents)
    if print_env:
        if as_json:
            print(
                json.dumps(
                    {
                        pod.name: {
                            container["name"]: engine.environment_of(pod, container)
                            for container in pod.spec["containers"]
                        }
                        for pod in pods
                    },
                    indent=2,
                )
            )
        else:
            print("\n".join(engine.lines_of_environment(pods)))
        return
    faults = [engine.parse_fault("kill", words, pods) for words in kill or []] + [
        engine.parse_fault("stall", words, pods) for words in stall or []
    ]
    on_device, variables, notes = devices(pods)
    if manifest is None and (token := os.environ.get("HF_TOKEN")):
        variables = {pod.name: {"HF_TOKEN": token, **variables.get(pod.name, {})} for pod in pods}
    if faults:
        config = {**config, "logging_steps": 1}
    with terminable():
        result = engine.run(
            documents,
            folder=output,
            emit=_printer([pod.name for pod in pods], sys.stderr if as_json else sys.stdout),
            faults=faults,
            timeout_s=timeout,
            config_overrides={**config, **on_device},
            environment_overrides=variables,
        )
    result.notes[:0] = notes
    print(json.dumps(_as_json(result), indent=2) if as_json else _as_text(result, output))
    raise typer.Exit(result.exit_code)


def _rendered(
    values: list[Path], sets: list[str], name: str, manifest: Path | None, model: str, steps: int
) -> tuple[str, dict[str, Any]]:
    """The manifests, and what --model and --steps change in the training YAML."""
    from podtune.cluster.dry_run.shrink import SIZES, small_model

    config: dict[str, Any] = {"max_steps": steps} if steps else {}
    if model and model not in SIZES:
        raise UsageError(
            f"--model is {model!r}", fix=f"use {' or '.join(SIZES)}, or leave it out for the real one"
        )
    if manifest is not None:
        if values or sets or model:
            raise UsageError("--manifest and values exclude each other", fix="give one of them")
        try:
            return manifest.read_text(encoding="utf-8"), config
        except OSError as error:
            raise NotFound(f"cannot read it: {error.strerror}", where=str(manifest)) from error
    from podtune.cluster.chart.render import effective_values, merged_values, render

    if model:
        more, small = small_model(model, effective_values(merged_values(values, sets)))
        sets, config = [*sets, *more], {**small, **config}
    return render(values, sets, name), config


def _checked(text: str, *, quiet: bool) -> list[dict[str, Any]]:
    """The documents, after lint: what the cluster would refuse is not run, other findings are shown."""
    from podtune.cluster.lint.check import lint
    from podtune.cluster.lint.documents import read
    from podtune.cluster.lint.output import as_text

    verdict = lint([("manifest", text)])
    refused = [finding for finding in verdict.findings if finding.refused]
    if refused:
        print(as_text(verdict), file=sys.stderr)
        raise DataError(
            f"the cluster would refuse the job: {refused[0].message}",
            where=refused[0].path,
            fix=refused[0].fix,
        )
    if not quiet:
        for finding in verdict.findings:
            if finding.severity != "note":
                print(
                    f"podtune lint: {finding.severity} {finding.code}: {finding.message} "
                    f"(podtune lint --explain {finding.code})",
                    file=sys.stderr,
                )
    return [document.content for document in read(text, "manifest")[0]]


def _printer(names: list[str], stream: Any) -> Any:
    """Writes whole lines from several threads, each after its pod's name, in colour on a terminal."""
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


def _as_json(result: Result) -> dict[str, Any]:
    from podtune.cluster.dry_run.dry_run import SCHEMA

    return {
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
                "recreated": run.recreated,
                "exits": [
                    {"container": end.container, "code": end.code, "last_line": end.last_line}
                    for end in run.exits
                ],
            }
            for run in result.pods
        ],
        "notes": result.notes,
    }


def _as_text(result: Result, output: Path | None) -> str:
    width = max(len(run.name) for run in result.pods)
    lines = ["", f"{'pod':<{width}}  {'phase':<9}  restarts  exit codes"]
    for run in result.pods:
        restarts = f"{run.restarts}" + (f" (+{run.recreated} new pods)" if run.recreated else "")
        codes = ", ".join(f"{end.container} {end.code}" for end in run.exits)
        lines.append(f"{run.name:<{width}}  {run.phase:<9}  {restarts:<8}  {codes}")
    lines += [f"note: {note}" for note in result.notes]
    lines.append(f"{result.job}: {result.condition} after {result.seconds:.0f} s: {result.reason}")
    if output:
        lines.append(f"volumes: {output / 'volumes'}")
    return "\n".join(lines)
