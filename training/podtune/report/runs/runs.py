"""Runs as their folders tell them: the record, the curves, and what is wrong with the files. No torch.

Nothing is repaired and nothing is guessed: a torn line, a NaN, a contradiction is used as far as it goes and
said, with the file and the line, in :attr:`Run.problems`.
"""

from __future__ import annotations

import base64
import datetime
import html
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from podtune.run.errors import DataError, NotFound
from podtune.run.follow import state
from podtune.run.garbage import gc_paused
from podtune.run.lock import read_beat
from podtune.run.metrics_log import each_entry
from podtune.run.record import (
    METRICS_FILE,
    RUN_FILE,
    SCHEMA,
    Json,
    Losses,
    Measurements,
    mapping,
    number,
    sound,
)

AXES = {"step": "step", "tokens": "tokens", "time": "time since start (s)"}
Curve = tuple[list[float], list[float]]


@dataclass(repr=False)
class Run:
    """One run's folder. ``entries`` are the lines of metrics.jsonl in order, by split, one for a step."""

    path: Path
    record: Json
    name: str
    entries: dict[str, list[Json]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _curves: dict[tuple[str, str, str], tuple[list[Json], int, Curve]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Run({self._summary()})"

    def _repr_html_(self) -> str:
        """A notebook's view: the summary, and the curve of the loss if the run has drawn it."""
        text = f"<p>{html.escape(self._summary())}</p>"
        try:
            image = base64.b64encode((self.path / "loss.png").read_bytes()).decode()
        except OSError:
            return text
        return f'{text}<img src="data:image/png;base64,{image}" width="620" alt="losses by step">'

    def _summary(self) -> str:
        """Name, status, steps, and the last evaluation or training loss."""
        steps = self.measurements.steps or self.last("train", "step")
        parts = [self.name, self.status, f"{steps or 0:.0f} steps"]
        for split, words in (("eval", "eval loss"), ("train", "loss")):
            if (loss := self.last(split, "loss")) is not None:
                return ", ".join([*parts, f"{words} {loss:.4f}"])
        return ", ".join(parts)

    @cached_property
    def status(self) -> str:
        """ok, oom, preempted, error, running; died (its process is gone); silent (elsewhere, no
        heartbeat).
        """
        status, reason = state(self.path, self.record)
        return reason if reason in ("died", "silent") else status

    def last_step(self) -> tuple[int, float] | None:
        """The step that its process has reached, and when (seconds since the epoch); None if unknown."""
        beat = read_beat(self.path)
        return (beat.step, beat.step_at) if beat else None

    def patience_s(self) -> float:
        """Seconds after the last step before a run is called silent: five steps' time."""
        return 5 * (self.last("train", "step_time_s") or 0.0)

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        return timestamp(self.record.get("started_at"))

    @property
    def measurements(self) -> Measurements:
        """Measurements of the record."""
        return Measurements.read(self.record)

    def last(self, split: str, metric: str) -> float | None:
        """The last recorded value, NaN included, or None."""
        for entry in reversed(self.entries.get(split, [])):
            if (value := number(entry.get(metric))) is not None:
                return value
        return None

    def counted(self, metric: str) -> int | None:
        """The last recorded value of a training line's count."""
        value = self.last("train", metric)
        return None if value is None or not math.isfinite(value) else int(value)

    def best(self, split: str, metric: str) -> float | None:
        """The lowest finite value, or None."""
        losses = [
            value
            for entry in self.entries.get(split, [])
            if (value := number(entry.get(metric))) is not None and math.isfinite(value)
        ]
        return min(losses, default=None)

    def exact_share(self) -> tuple[float, int] | None:
        """Share of held-out rows that the tuned model answers exactly, and their number."""
        answers = self.measurements.answers or {}
        share, rows = number(mapping(answers.get("tuned")).get("exact_match")), number(answers.get("rows"))
        return None if share is None or not rows else (share, int(rows))

    def curve(self, split: str, metric: str, axis: str = "step") -> Curve:
        """Finite points of a metric over ``step``, ``tokens`` (of all ranks) or ``time`` (s since start)."""
        entries = self.entries.get(split, [])
        curve = self._curves.get((split, metric, axis))
        if curve is None or curve[0] is not entries or curve[1] != len(entries):  # a watched run grows
            curve = self._curves[split, metric, axis] = (
                entries,
                len(entries),
                self._points(entries, metric, axis),
            )
        return curve[2]

    def _points(self, entries: list[Json], metric: str, axis: str) -> Curve:
        places, values = [], []
        start = self.started_at
        for entry in entries:
            value, place = entry.get(metric), entry.get("time" if axis == "time" else axis)
            if (
                type(value) is not float
            ):  # nearly all are: this is what comparing long runs spends its time on
                value = number(value)
            place = timestamp(place) - start if axis == "time" else number(place)
            if value is not None and place is not None and math.isfinite(value) and math.isfinite(place):
                places.append(place)
                values.append(value)
        return places, values

    def seconds(self) -> float | None:
        """Wall-clock time from the start to the end, or to the last sign of life."""
        ended = self.record.get("ended_at")
        if ended and self.status != "running":
            return timestamp(ended) - self.started_at
        if self.status == "running":
            return time.time() - self.started_at
        signs = [timestamp(entries[-1].get("time")) for entries in self.entries.values() if entries]
        return max(signs) - self.started_at if signs else None

    def one_line(self) -> str:
        """Summarise the run: ``sft · micro · ddp · 2 ranks · ok``."""
        size = self.record.get("world_size")
        ranks = f"{size} rank{'s' if size != 1 else ''}" if size else None
        model = Path(str(self.record["model"])).name if self.record.get("model") else None
        return " · ".join(
            str(part)
            for part in (self.record.get("mode"), model, self.record.get("strategy"), ranks, self.status)
            if part
        )


def load_run(path: Path, *, curves: bool = True) -> Run:
    """Read a run's folder (or its run.json).

    ``curves=False`` reads, of metrics.jsonl, only evaluations and the last training line: enough for a list.

    Raises:
        UserError: no folder, no run in it, a run.json that cannot be read or is of another schema.
    """
    path = Path(path)
    folder = path.parent if path.name == RUN_FILE else path
    record, odd = sound(_read_record(folder))
    run = Run(folder, record, str(record.get("name") or folder.name))
    run.problems += [f"{folder / RUN_FILE}: {line}; left out" for line in odd]
    metrics = folder / METRICS_FILE
    if metrics.is_file():
        lines = metrics.read_bytes().split(b"\n") if curves else _overview(metrics.read_bytes())
        with gc_paused():
            _read_lines(run, lines, numbered=curves)
        if curves:
            _check(run)
    elif record.get("mode") == "sft" and run.status != "running":
        run.problems.append(f"{metrics}: missing; there are no curves, only what {RUN_FILE} says")
    return run


def _read_record(folder: Path) -> Json:
    file = folder / RUN_FILE
    if not file.exists():
        what = f"is no run: it has no {RUN_FILE}" if folder.is_dir() else "no such folder"
        raise NotFound(
            what,
            where=str(folder),
            fix="give the --output_dir of a run; podtune runs DIR lists those below DIR",
        )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"cannot be read: {error}", where=str(file), fix="restore it, or podtune collect it from the log"
        ) from None
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise DataError(
            f"has schema {schema!r}; this podtune reads {SCHEMA!r}",
            where=str(file),
            fix="read it with the podtune that wrote it",
        )
    return dict(record)


def _overview(content: bytes) -> list[bytes]:
    """The evaluation lines and the last training line of a metrics file, found without parsing the rest."""
    lines, place = [], 0
    while (place := content.find(b'"split": "eval"', place)) >= 0:
        start, end = content.rfind(b"\n", 0, place) + 1, content.find(b"\n", place)
        if end < 0:
            break
        lines.append(content[start:end])
        place = end
    complete = content.rfind(b"\n") + 1
    if (place := content.rfind(b'"split": "train"', 0, complete)) >= 0:
        lines.append(content[content.rfind(b"\n", 0, place) + 1 : content.find(b"\n", place)])
    return lines


def _read_lines(run: Run, lines: list[bytes], *, numbered: bool) -> None:
    """Parse ``lines`` into ``run.entries``; a torn line is left out, the first of a step and split counts."""
    where = run.path / METRICS_FILE
    seen: dict[tuple[str, int], Json] = {}
    bad_numbers: dict[tuple[str, str], list[int]] = {}
    for index, (line, entry) in enumerate(zip(lines, each_entry(lines), strict=True), 1):
        if not line:
            continue
        if entry is None:
            at = f" line {index}" if numbered else ""
            run.problems.append(f"{where}{at}: torn or no metrics line; left out")
            continue
        split, step = entry["split"], entry["step"]
        if (split, step) in seen:
            if {**entry, "time": ""} != {**seen[split, step], "time": ""}:
                run.problems.append(
                    f"{where} line {index}: contradicts an earlier {split} line of step {step}; the first "
                    "is used"
                )
            continue
        seen[split, step] = entry
        run.entries.setdefault(split, []).append(entry)
        if not (b"nan" in line or b"inf" in line or b"NaN" in line or b"Infinity" in line):
            continue
        for key, value in entry.items():
            if value in ("nan", "inf", "-inf") or (isinstance(value, float) and not math.isfinite(value)):
                bad_numbers.setdefault((split, key), []).append(step)
    for (split, key), steps in bad_numbers.items():
        times = f"{len(steps)} times, first" if len(steps) > 1 else "once,"
        run.problems.append(
            f"{where}: {split} {key} is not finite {times} at step {steps[0]}; left out of curves"
        )


def _check(run: Run) -> None:
    """Compare the two files of a run that ended: its record and its metrics must tell the same story."""
    if run.status in ("running", "silent", "died"):
        return
    where = run.path / RUN_FILE
    measured, steps = run.measurements, [int(entry["step"]) for entry in run.entries.get("train", [])]
    recorded, loss = measured.steps, measured.loss or Losses()
    if recorded is not None and steps and steps[-1] > recorded:
        run.problems.append(
            f"{where}: contradicts {METRICS_FILE}: {recorded} steps, but there is a line of step {steps[-1]}"
        )
    for split, said in (("train", loss.last), ("eval", loss.eval)):
        logged = run.last(split, "loss")
        if (
            said is not None
            and logged is not None
            and not math.isclose(said, logged, rel_tol=1e-6, abs_tol=1e-9)
            and said == said
        ):
            run.problems.append(
                f"{where}: contradicts {METRICS_FILE}: {split} loss {said:.6g}, but its last line says "
                f"{logged:.6g}"
            )


def unique_names(named: Sequence[tuple[str, Path | str]]) -> list[str]:
    """Names of runs to show, of names and folders: a name that occurs twice gets its folder beside it."""
    often = Counter(name for name, _ in named)
    return [name if often[name] == 1 else f"{name} ({path})" for name, path in named]


def timestamp(value: object) -> float:
    """RFC 3339 to seconds since the epoch; NaN for what is no time."""
    try:
        return datetime.datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return math.nan
