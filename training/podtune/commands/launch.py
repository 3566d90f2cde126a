"""podtune launch and podtune prepare: what the containers of a job run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.preflight import step_zero
from podtune.pod.launch import failed_before, leave_verdict, prepare_first, terminable
from podtune.pod.launch import launch as run_torchrun
from podtune.pod.prepare import prepare as prepare_pod
from podtune.pod.retries import retries
from podtune.run.errors import report
from podtune.run.start_phases import begin, hand_on, phase_ended


def launch(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- TORCHRUN-ARGUMENT...", help="As for torchrun.")
    ],
    shutdown_timeout: Annotated[
        int, typer.Option(help="Seconds for the processes to save and end after SIGTERM.")
    ] = 240,
    max_retries: Annotated[
        int | None,
        typer.Option(help="Failures without a newer checkpoint before the exit code says final."),
    ] = None,
    prepare: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG", help="Prepare by this configuration first, once for all pods."),
    ] = None,
    verdict: Annotated[
        Path | None, typer.Option(help="Where podtune prepare --verdict left its failure: end with it.")
    ] = None,
    preflight: Annotated[
        Path | None, typer.Option(metavar="CONFIG", help="Podtune preflight by this configuration next.")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds that the preflight waits for the other pods to arrive.")
    ] = 900.0,
) -> None:
    """Run torchrun and end with the exit code of the process that failed, so that Kubernetes can tell what to
    retry.

    0 done; 2 and 64-78 an error of yours, final; 143 preempted after saving and 170 a peer lost, to be
    started again; 128 + n killed by signal n; 75 retried too often. Reads PET_* as torchrun does.

    \b
    Examples:
      podtune launch -- -m podtune.training --config config.yaml
      podtune launch -- --nproc-per-node 2 -m podtune.training --config config.yaml
    """
    begin()
    counted = retries(max_retries)
    if counted and (code := counted.begin()):
        sys.exit(code)
    try:
        with terminable():
            code = failed_before(verdict) if verdict else 0
            if not code and prepare:
                code = prepare_first(prepare, arguments)
                phase_ended("prepare")
            if not code and preflight:
                code = step_zero(preflight, wait_s=wait)
                phase_ended("preflight")
            if not code:
                hand_on()
                code = run_torchrun(arguments, shutdown_timeout_s=shutdown_timeout)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    sys.exit(counted.end(code) if counted else code)


def prepare(
    config: Annotated[Path, typer.Option(help="The training YAML.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENT...]", help="What else training will be given.")
    ] = None,
    verdict: Annotated[
        Path | None, typer.Option(help="Leave a failure there and end with 0, for an init container.")
    ] = None,
) -> None:
    """Get model and data onto the volumes and tokenise, once for all pods; the others wait for the one that
    does.

    Downloads into HF_HOME what CONFIG names by hub id, or with PREPARE_BUILD=tiny makes a small model and a
    question-answer set at the paths that CONFIG names. With HF_HUB_OFFLINE=1 nothing is downloaded and what
    is missing is named. The operator looks at the exit code of the training container alone and makes a pod
    whose init container failed again without end, hence --verdict: podtune launch --verdict ends with the
    failure found there.

    \b
    Examples:
      podtune prepare --config config.yaml
      podtune prepare --config config.yaml -- --dataset_name /data/rows.parquet
      PREPARE_BUILD=tiny podtune prepare --config config.yaml
    """
    try:
        with terminable():
            timeout_s = float(os.environ.get("PREPARE_TIMEOUT_S", "3600"))
            prepare_pod(
                config, arguments or (), build=os.environ.get("PREPARE_BUILD", ""), timeout_s=timeout_s
            )
    except Exception as error:
        if verdict is None:
            raise
        leave_verdict(verdict, report(error), str(error))
