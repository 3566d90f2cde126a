"""Runs many benchmark cells in one set of processes: ``main([CELLS.json, RESULTS.json])`` in each.

Starting torch costs more than a cell of ``tinygpt-test``; the cells share the start, and each goes through
the benchmark's own command line, set-up and loop.
"""

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from podtune.bench.case.command_line import read_options
from podtune.bench.case.data import HeldOut
from podtune.bench.case.device import refuse_what_the_device_lacks
from podtune.bench.case.run import CaseRun
from podtune.bench.case.train import measure_and_train, train
from podtune.run.distributed import cleanup_distributed, setup_distributed
from podtune.run.errors import UserError
from podtune.run.world import World

HeldOut.rows = 32  # an accuracy of 256 took twice as long as the training before it


def broken_off(arguments: list[str], world: World, folder: str) -> Iterator[list[float]]:
    """The losses by epoch of a training that ends after its first, and of the one that continues it."""
    for more in (["--epochs", "1"], ["--resume"]):
        options, size, _ = read_options([*arguments, "--save", folder, *more], world)
        yield list(train(CaseRun(options, size, world)).loss_by_epoch)
        gc.collect()


def run_cell(arguments: list[str], world: World, folder: str) -> dict[str, object]:
    """The config, the measurements and, of a cell that trains, the same with a break; or what was wrong with
    the command line.
    """
    try:
        options, size, _ = read_options(arguments, world)
        refuse_what_the_device_lacks(options, world)
    except UserError as error:
        return {"refused": str(error)}
    try:
        measured = measure_and_train(CaseRun(options, size, world)).to_json()
        resumed = list(broken_off(arguments, world, folder)) if options.epochs else []
        return {"config": asdict(options), "measurements": measured, "broken_off": resumed}
    except Exception as error:  # the next cells still say something; a test looks at this one
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()


def main(argv: list[str]) -> int:
    sys.modules.pop("deepspeed", None)  # the process was forked from one for fine-tunes, which hide it
    cells, results = map(Path, argv)
    world = setup_distributed(300, use_cpu=True)  # of busy cores: 60 s were not enough
    found = []
    for arguments in json.loads(cells.read_text()):
        found.append(run_cell(arguments, world, str(results.with_name(f"{results.name}.{len(found)}"))))
        gc.freeze()  # the libraries that were imported: every later collection would go through them
        if world.is_main:
            results.write_text(json.dumps(found))
    cleanup_distributed()
    return 0
