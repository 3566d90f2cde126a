"""Runs many benchmark cells in one set of processes: ``main([CELLS.json, RESULTS.json])`` in each.

Starting torch costs more than a cell of ``tinygpt-test``; the cells share the start, and each goes through
the benchmark's own command line, set-up and loop.
"""

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path

from podtune.bench.case.command_line import read_options
from podtune.bench.case.device import refuse_what_the_device_lacks
from podtune.bench.case.run import CaseRun
from podtune.bench.case.train import measure_and_train
from podtune.run.distributed import cleanup_distributed, setup_distributed
from podtune.run.errors import UserError
from podtune.run.world import World


def run_cell(arguments: list[str], world: World) -> dict[str, object]:
    """The config and the measurements, or what was wrong with the command line."""
    try:
        options, size, _ = read_options(arguments, world)
        refuse_what_the_device_lacks(options, world)
    except UserError as error:
        return {"refused": str(error)}
    try:
        return {
            "config": asdict(options),
            "measurements": measure_and_train(CaseRun(options, size, world)).to_json(),
        }
    except Exception as error:  # the next cells still say something; a test looks at this one
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()


def main(argv: list[str]) -> int:
    sys.modules.pop("deepspeed", None)  # the process was forked from one for fine-tunes, which hide it
    cells, results = map(Path, argv)
    world = setup_distributed(60, use_cpu=True)
    found = []
    for arguments in json.loads(cells.read_text()):
        found.append(run_cell(arguments, world))
        if world.is_main:
            results.write_text(json.dumps(found))
    cleanup_distributed()
    return 0
