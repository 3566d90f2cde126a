"""podtune train: a fine-tune on this machine, on one process or several."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from podtune.commands.options import PASS_ON
from podtune.run.errors import UsageError

CONTEXT = PASS_ON


def train(
    context: typer.Context,
    processes: Annotated[
        str, typer.Option("-n", "--processes", help="How many; 'gpu' for one on each GPU.")
    ] = "1",
) -> None:
    """Fine-tune on this machine: podtune.training under torchrun, which gets every other option.

    Those options are in `python -m podtune.training --help`. Ends with the code of the process that failed.

    \b
    Examples:
      podtune train --config sft.yaml
      podtune train -n 2 --config deploy/demo.yaml --model_name_or_path work/model --dataset_name work/data
      podtune train -n gpu --config sft.yaml --learning_rate 1e-4
    """
    if processes != "gpu" and not (processes.isdigit() and int(processes)):
        raise UsageError(
            f"-n is {processes!r}", fix="give a number of processes, or 'gpu' for one on each GPU"
        )
    if processes == "1":
        from podtune.training import main

        sys.exit(main(context.args))
    if processes != "gpu":
        from podtune.machine.facts import usable_cpus

        # torchrun would say at length that it chooses 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // int(processes))))
    # torchrun and each process import torch before they have something to say
    print(f"podtune: starting torchrun, --nproc-per-node {processes} ...", file=sys.stderr, flush=True)
    from podtune.pod.launch import launch

    program = ["--standalone", "--nproc-per-node", processes, "-m", "podtune.training"]
    sys.exit(launch([*program, *context.args]))
