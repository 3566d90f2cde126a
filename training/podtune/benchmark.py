"""Measure one model under one strategy: one cell, one record.

    python -m podtune.benchmark --model tinygpt-test --strategy single
    torchrun --nproc-per-node 2 -m podtune.benchmark --model tinygpt-test --strategy ddp --output /tmp/cell

Rank 0 writes OUTPUT/run.json and prints the record between markers. A failed cell is a record too: out of
memory, a collective that times out, a dead peer. Exit codes: 0 measured; 2, 64-78 the command line or the
machine does not fit (71 out of memory); 70 parity failed; 170 a peer or a collective was lost.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

from podtune.bench.case.command_line import read_options
from podtune.bench.case.record import CaseRecord, Ended, prepare_output
from podtune.bench.models import Size
from podtune.bench.options import Options
from podtune.run import errors
from podtune.run.distributed import cleanup_distributed, setup_distributed
from podtune.run.errors import UserError
from podtune.run.launcher import follow_launcher
from podtune.run.world import World, read_world


def main(arguments: list[str] | None = None) -> int:
    """Run one cell; the exit code."""
    follow_launcher()
    world = World()
    try:
        world = read_world()
        options, size, _ = read_options(arguments, world)
        output = prepare_output(options, world)
    except UserError as error:
        return errors.report(error) if world.is_main else error.code
    _configure(options, world)
    return _run_case(options, size, output)


def _run_case(options: Options, size: Size, output: Path) -> int:
    record = CaseRecord(options, output)
    run = None
    try:
        world = setup_distributed(options.timeout_s, use_cpu=options.cpu)
        record.identify(world)
        from podtune.bench.case.device import refuse_what_the_device_lacks
        from podtune.bench.case.run import CaseRun
        from podtune.bench.case.train import measure_and_train

        refuse_what_the_device_lacks(options, world)
        run = CaseRun(options, size, world)
        measurements = measure_and_train(run)
        run = None  # its model goes before the process group does
        cleanup_distributed()
        return record.conclude(measurements)
    except BaseException as error:
        return record.fail(error, run.memory_gib() if run else {})


def _configure(options: Options, world: World) -> None:
    """Set what torch reads when it is loaded, and take SIGTERM, by which torchrun ends us after a peer."""
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    # of DeepSpeed's calls, not of ours
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not world.master and options.strategy != "single":
        # One process without torchrun: a group of one, so that every strategy runs as it would among many.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

    def end(signum: int, frame: object) -> None:
        raise Ended(128 + signum)

    signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    code = main()
    if code:
        # Peers may sit in a collective that never ends: leave without waiting for the threads of the process
        # group.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
