"""podtune doctor: checks of this machine, and of the cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from podtune.cluster.live.doctor import DEADLINE_S, check_cluster
from podtune.commands.options import Context, Namespace
from podtune.machine.checks import Check, exit_code, run_checks
from podtune.machine.doctor import machine_checks


def doctor(
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="The cluster of the kubeconfig too: kinds of job, permissions, volumes, GPUs."
        ),
    ] = False,
    output_dir: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path(),
    as_json: Annotated[
        bool, typer.Option("--json", help="For scripts: state, and checks with name, state, found, fix.")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Look at this machine, and with --cluster at the cluster: one line each, ok, warn or fail, with the fix.

    Takes seconds; where there are GPUs as long as torch needs to open them, a minute at most. Exit code 0
    without a fail, 69 with one. `pip check` and `nvidia-smi` answer for the packages and the GPUs themselves,
    `podtune preflight` computes on each.

    \b
    Examples:
      podtune doctor
      podtune doctor --output-dir /outputs
      podtune doctor --cluster --namespace training --json
    """
    if cluster and find_spec("kubernetes") is None:
        raise ModuleNotFoundError(name="kubernetes")  # podtune.cli names the extra
    checks = machine_checks(output_dir)
    if cluster:
        fix = "start it, or set KUBECONFIG or --context to one that answers"
        checks.append(Check("cluster", lambda: check_cluster(namespace, context), fix, DEADLINE_S))
    results = run_checks(checks)
    if as_json:
        states = {result.state for result in results}
        worst = next((state for state in ("fail", "warn") if state in states), "ok")
        print(json.dumps({"state": worst, "checks": [asdict(result) for result in results]}, indent=2))
    else:
        width = max(len(result.name) for result in results)
        for result in results:
            fix = f"; fix: {result.fix}" if result.fix else ""
            print(f"{result.state:<4}  {result.name:<{width}}  {result.found}{fix}")
    sys.exit(exit_code(results))
