"""podtune doctor: checks of this machine, and of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.options import Context, Namespace


def doctor(
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="The cluster of the kubeconfig too: operator, permissions, volumes, GPUs."
        ),
    ] = False,
    output_dir: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path(),
    torch: Annotated[
        bool,
        typer.Option("--torch", help="Import torch and compute on every GPU too; takes some seconds more."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For scripts: state, and checks with name, state, found, fix.")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Look at this machine, and with --cluster at the cluster: one line each, ok, warn or fail, with the fix.

    Takes at most five seconds without --torch. Exit code 0 without a fail, 69 with one. `pip check` and
    `nvidia-smi` answer for the packages and the GPUs themselves.

    \b
    Examples:
      podtune doctor
      podtune doctor --output-dir /outputs --torch
      podtune doctor --cluster --namespace training --json
    """
    import json
    import sys
    from dataclasses import asdict

    from podtune.machine import doctor as machine

    questions = machine.questions(output_dir)
    if cluster:
        from podtune.cluster.live.doctor import DEADLINE_S, run_checks

        silent = "start it, or set KUBECONFIG or --context to one that answers"
        questions.append(
            machine.Question("cluster", lambda: run_checks(namespace, context), silent, DEADLINE_S)
        )
    checks = machine.answers(questions)
    if torch:
        checks.append(machine.torch_works())
    if as_json:
        states = {check.state for check in checks}
        worst = next((state for state in ("fail", "warn") if state in states), "ok")
        print(json.dumps({"state": worst, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            fix = f"; fix: {check.fix}" if check.fix else ""
            print(f"{check.state:<4}  {check.name:<{width}}  {check.found}{fix}")
    sys.exit(machine.exit_code(checks))
