"""Which rows a run trained, step by step, if ``sample_ledger`` asks for it: written by every rank, judged by
``podtune data ledger``. Needs no torch.

``RUN/sample-ledger/rank-N.txt`` has a line a micro-batch: its step, its epoch, its rows. A row is named by
its place in the set that is trained, packed if it is packed.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from podtune.run.errors import DataError, NotFound
from podtune.run.files import write_whole

FOLDER, ABOUT = "sample-ledger", "about.json"


class Ledger:
    """One rank's file. It is opened at the first micro-batch, when rank 0 has called :func:`begin`."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = Path(run_dir) / FOLDER / f"rank-{rank}.txt"
        self._file: IO[str] | None = None

    def note(self, step: int, epoch: int, rows: Sequence[int]) -> None:
        """A micro-batch of ``rows`` in ``step``, the first being 1, of ``epoch``, the first being 0."""
        if self._file is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._file = os.fdopen(os.open(self._path, flags, 0o664), "a", encoding="ascii")
        self._file.write(f"{step} {epoch} {' '.join(map(str, rows))}\n")

    def flush(self) -> None:
        """To the volume, before a checkpoint is sealed that a later start goes on from."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())


def begin(run_dir: Path, *, from_step: int, rows: int, drop_last: bool) -> None:
    """Make the ledger of a run that trains ``rows`` rows an epoch, or leave of an earlier start's what is up
    to ``from_step``. Rank 0, before anybody trains.
    """
    folder = Path(run_dir) / FOLDER
    folder.mkdir(exist_ok=True)
    for file in folder.glob("rank-*.txt"):
        kept = [line for line in _lines(file) if line[0] <= from_step]
        write_whole(file, "".join(" ".join(map(str, line)) + "\n" for line in kept))
    write_whole(folder / ABOUT, json.dumps({"rows": rows, "drop_last": drop_last}))


def _lines(file: Path) -> list[list[int]]:
    """Whole lines; a killed writer leaves a torn one."""
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [list(map(int, line.split())) for line in whole.splitlines()]


@dataclass(frozen=True)
class Epoch:
    """What became of the rows in one epoch.

    Attributes:
        number: the first is 1.
        seen: rows that were trained at least once.
        filling: rows that accelerate took again so that all ranks have full batches in the last step.
        repeated: rows that were trained more than once for no such reason.
        missed: rows that were not trained; of an epoch that has not ended, None.
    """

    number: int
    seen: int
    filling: int
    repeated: tuple[int, ...]
    missed: tuple[int, ...] | None


@dataclass(frozen=True)
class Judgement:
    """What a ledger says. ``unrecorded``: steps without an entry; the epochs that they may belong to are left
    out.
    """

    rows: int
    ranks: int
    steps: int
    drop_last: bool
    unrecorded: tuple[int, ...]
    epochs: tuple[Epoch, ...]

    @property
    def exact(self) -> bool:
        """Every row came once an epoch, but for accelerate's filling and what was asked to be dropped."""
        missed = any(epoch.missed for epoch in self.epochs) and not self.drop_last
        return not missed and not any(epoch.repeated for epoch in self.epochs)


def judge(run_dir: Path) -> Judgement:
    """Read the ledger of ``run_dir``.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    folder = Path(run_dir) / FOLDER
    by_step: dict[tuple[int, int], list[int]] = defaultdict(list)
    try:
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        size, drop_last = int(about["rows"]), bool(about["drop_last"])
        files = sorted(folder.glob("rank-*.txt"))
        for file in files:
            for step, epoch, *rows in _lines(file):
                by_step[epoch, step] += rows
    except FileNotFoundError:
        raise NotFound(
            "no sample ledger", where=str(run_dir), fix="train with --sample_ledger true"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(folder)) from None
    steps = {step for _, step in by_step}
    unrecorded = tuple(sorted(set(range(1, max(steps, default=0) + 1)) - steps))
    numbers = sorted({epoch for epoch, _ in by_step})
    # an epoch whose first steps are not there cannot be judged
    whole = [number for number in numbers if not unrecorded or _first(by_step, number) > unrecorded[-1] + 1]
    return Judgement(
        rows=size,
        ranks=len(files),
        steps=len(steps),
        drop_last=drop_last,
        unrecorded=unrecorded,
        epochs=tuple(_epoch(by_step, number, size, ended=number < numbers[-1]) for number in whole),
    )


def _first(by_step: dict[tuple[int, int], list[int]], epoch: int) -> int:
    return min(step for number, step in by_step if number == epoch)


def _epoch(by_step: dict[tuple[int, int], list[int]], number: int, size: int, *, ended: bool) -> Epoch:
    steps = sorted(step for epoch, step in by_step if epoch == number)
    counted = Counter(row for step in steps for row in by_step[number, step])
    ended = ended or counted.total() >= size
    in_last = Counter(by_step[number, steps[-1]]) if ended else Counter()
    more = {row: times - 1 for row, times in counted.items() if times > 1}
    filling = sum(min(times, in_last[row]) for row, times in more.items())
    return Epoch(
        number=number + 1,
        seen=len(counted),
        filling=filling,
        repeated=tuple(sorted(row for row, times in more.items() if times > in_last[row])),
        missed=tuple(row for row in range(size) if row not in counted) if ended else None,
    )
