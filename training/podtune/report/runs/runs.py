"""Runs as their folders tell them: the record, the curves, and what is wrong with the files. No torch.

Nothing is repaired and nothing is guessed: what cannot be used is left out, and said in :attr:`Run.problems`.
"""

from __future__ import annotations

import base64
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
from podtune.run.lock import SILENT_S, read_beat
from podtune.run.metrics_log import metrics_entries
from podtune.run.record import (
    METRICS_FILE,
    RUN_FILE,
    SCHEMA,
    Json,
    Measurements,
    mapping,
    number,
    sound,
    timestamp,
)

AXES = ("step", "tokens", "time")
Curve = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Progress:
    """Progress of a run; ``total_steps`` and ``eta_s`` are None before the first metrics line."""

    step: int
    total_steps: int | None
    eta_s: float | None
    silent_s: float | None  # since its last step, where a heartbeat tells

    @property
    def share(self) -> float | None:
        """Done, from 0 to 1."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None

    @property
    def stalled(self) -> bool:
        """True if its process beats and no step was finished for a minute and five steps' time."""
        return self.silent_s is not None and self.silent_s > SILENT_S


@dataclass(repr=False)
class Run:
    """One run's folder. ``entries`` are the lines of metrics.jsonl in order, by split, one for a step."""

    path: Path
    record: Json
    name: str
    entries: dict[str, list[Json]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _curves: dict[tuple[str, str, str], Curve] = field(default_factory=dict)

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

    @property
    def over(self) -> bool:
        """True if nothing more will come."""
        return self.status not in ("running", "silent")

    def progress(self) -> Progress:
        """Its progress, from its last sign of life and last training line."""
        beat, last = read_beat(self.path), (self.entries.get("train") or [{}])[-1]
        logged = int(last.get("step", 0))
        eta, step_time = number(last.get("eta_s")), number(last.get("step_time_s"))
        step = max(logged, beat.step if beat else 0)
        planned = number((self.record.get("config") or {}).get("max_steps"))
        total = int(planned) if planned and planned > 0 else None
        if eta is not None and step_time:
            total = total or logged + round(eta / step_time)
            eta = max(0.0, eta - (step - logged) * step_time)
        # after its last step a run saves, and may answer
        waits = beat and self.status == "running" and 0 < step != total
        patience_s = 5 * (self.last("train", "step_time_s") or 0.0)
        silent = max(0.0, time.time() - beat.step_at - patience_s) if beat and waits else None
        return Progress(step, total, eta, silent)

    @property
    def started_at(self) -> float:
        """Seconds since the epoch."""
        return timestamp(self.record.get("started_at"))

    @property
    def measurements(self) -> Measurements:
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
        key = split, metric, axis
        if key not in self._curves:
            self._curves[key] = self._points(self.entries.get(split, []), metric, axis)
        return self._curves[key]

    def _points(self, entries: list[Json], metric: str, axis: str) -> Curve:
        places, values = [], []
        start = self.started_at
        for entry in entries:
            value, place = entry.get(metric), entry.get("time" if axis == "time" else axis)
            if type(value) is not float:  # nearly all are, and comparing long runs spends its time here
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

    ``curves=False`` reads, of metrics.jsonl, evaluations and the last of the other lines alone.

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
        content = metrics.read_bytes()
        with gc_paused():
            _read_lines(run, content.split(b"\n") if curves else _overview(content))
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
    """The evaluations, the last training and the last system line, found without parsing the others."""
    lines, place = [], 0
    while (place := content.find(b'"split": "eval"', place)) >= 0:
        start, end = content.rfind(b"\n", 0, place) + 1, content.find(b"\n", place)
        if end < 0:
            break
        lines.append(content[start:end])
        place = end
    complete = content.rfind(b"\n") + 1
    for split in (b'"split": "train"', b'"split": "system"'):
        if (place := content.rfind(split, 0, complete)) >= 0:
            lines.append(content[content.rfind(b"\n", 0, place) + 1 : content.find(b"\n", place)])
    return lines


def _read_lines(run: Run, lines: list[bytes]) -> None:
    """Parse ``lines`` into ``run.entries``; the first of a step and split counts."""
    entries, broken = metrics_entries(lines)
    if broken:
        run.problems.append(f"{run.path / METRICS_FILE}: torn or no metrics lines: {len(broken)}; left out")
    seen = set()
    for entry in entries:
        split, step = entry["split"], entry["step"]
        if (split, step) not in seen:
            seen.add((split, step))
            run.entries.setdefault(split, []).append(entry)
    for split, kept in run.entries.items():
        losses = ((entry["step"], number(entry.get("loss"))) for entry in kept)
        steps = [step for step, loss in losses if loss is not None and not math.isfinite(loss)]
        if steps:
            what = f"{split} loss is not finite {len(steps)} times, first at step {steps[0]}"
            run.problems.append(f"{run.path / METRICS_FILE}: {what}; left out of curves")


def unique_names(named: Sequence[tuple[str, Path | str]]) -> list[str]:
    """Names of runs to show, of names and folders: a name that occurs twice gets its folder beside it."""
    often = Counter(name for name, _ in named)
    return [name if often[name] == 1 else f"{name} ({path})" for name, path in named]
