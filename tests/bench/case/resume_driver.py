"""Trains each strategy twice: ``main([FOLDER, RESULTS.json, STRATEGIES ...])``, at once and with a break."""

import gc
import json
import sys
from pathlib import Path

from podtune.bench.case.command_line import read_options
from podtune.bench.case.run import CaseRun
from podtune.bench.case.train import train
from podtune.run.distributed import cleanup_distributed, setup_distributed
from podtune.run.errors import UserError

TINY = ["--model", "tinygpt-test", "--sequence-length", "32", "--cpu", "--epoch-steps", "2"]


def main(argv: list[str]) -> int:
    sys.modules.pop("deepspeed", None)  # the process was forked from one for fine-tunes, which hide it
    folder, results, *strategies = argv
    world = setup_distributed(60, use_cpu=True)

    def losses(strategy: str, *words: str) -> list[float]:
        # the warm-up ends after the break
        chosen = [
            *TINY,
            "--strategy",
            *strategy.split(),
            "--lr-warmup",
            "3",
            "--learning-rate",
            "1e-3",
            *words,
        ]
        options, size, _ = read_options(chosen, world)
        try:
            return list(train(CaseRun(options, size, world)).loss_by_epoch)
        finally:
            gc.collect()

    found: dict[str, object] = {}
    for strategy in strategies:
        saved = ["--save", f"{folder}/{strategy}"]
        whole = losses(strategy, "--epochs", "3")
        losses(strategy, "--epochs", "1", *saved)
        found[strategy] = whole, losses(strategy, "--epochs", "3", "--resume", *saved)
    try:
        losses(
            strategies[0], "--epochs", "4", "--resume", "--save", f"{folder}/{strategies[0]}", "--seed", "1"
        )
    except UserError as error:
        found["refused"] = str(error)
    if world.is_main:
        Path(results).write_text(json.dumps(found))
    cleanup_distributed()
    return 0
