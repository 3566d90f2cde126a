"""The rows that a run trained, step by step, noted by every rank and over all its starts.

A launched rank keeps a ledger under ``env={FOLDER: ...}``. Rows are named by their tokens, so that nothing of
the program has to number them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

FOLDER = "PODTUNE_TEST_LEDGER"


class RowLedger:
    """One rank's notes of one start."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        start = len(list(folder.glob(f"rank-{rank}.*.jsonl")))
        # by lines: what a killed rank has trained is in its file
        self._file = (folder / f"rank-{rank}.{start}.jsonl").open("a", buffering=1)

    def note(self, step: int, epoch: int, rows: list[Any]) -> None:
        """A micro-batch of ``rows`` in ``step``, the first being 1, of ``epoch``, the first being 0."""
        self._file.write(json.dumps([step, epoch, rows]) + "\n")


def keep(folder: Path) -> None:
    """Have the trainers of this process note what they train."""
    from podtune.sft.train.trainer import PodtuneTrainer

    usual, ledgers = PodtuneTrainer.training_step, list[RowLedger]()

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        if not ledgers:
            ledgers.append(RowLedger(folder, self.args.process_index))
        epoch = int((self.state.epoch or 0.0) + 1e-6)
        ledgers[0].note(self.state.global_step + 1, epoch, _rows(inputs))
        return usual(self, model, inputs, *args)

    PodtuneTrainer.training_step = training_step  # type: ignore[method-assign]


def _rows(inputs: dict[str, Any]) -> list[str]:
    """A name for each row of a micro-batch, whose rows lie end to end."""
    (tokens,), (places,) = inputs["input_ids"].tolist(), inputs["position_ids"].tolist()
    ends = [*(index for index, place in enumerate(places) if place == 0), len(tokens)]
    rows = [tokens[begin:end] for begin, end in itertools.pairwise(ends)]
    return [hashlib.sha256(str(row).encode()).hexdigest()[:16] for row in rows]


def trained(folder: Path) -> dict[int, dict[int, tuple[int, list[Any]]]]:
    """By rank and step: epoch and rows. What a later start trained again stands in place of the earlier."""
    found: dict[int, dict[int, tuple[int, list[Any]]]] = defaultdict(dict)
    for file in sorted(folder.glob("rank-*.jsonl"), key=lambda file: file.name.split(".")[1].zfill(9)):
        of_rank, of_start = found[int(file.name.split(".")[0][5:])], dict[int, tuple[int, list[Any]]]()
        lines = file.read_text().rpartition("\n")[0].splitlines()  # a killed writer leaves a torn one
        for step, epoch, rows in map(json.loads, lines):
            of_start.setdefault(step, (epoch, []))[1].extend(rows)
        for step in [step for step in of_rank if of_start and step >= min(of_start)]:
            del of_rank[step]
        of_rank.update(of_start)
    return dict(found)


def epochs(folder: Path) -> list[Counter[Any]]:
    """How often each row was trained, in each epoch, by all ranks."""
    counted: dict[int, Counter[Any]] = defaultdict(Counter)
    for of_rank in trained(folder).values():
        for epoch, rows in of_rank.values():
            counted[epoch].update(rows)
    return [counted[epoch] for epoch in sorted(counted)]
