"""Run folders that look like real ones, written through the program's own record module."""

from __future__ import annotations

import datetime
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podtune.run.record import METRICS_FILE, RUN_FILE, Json, Status, end_record, new_record, write_json

RunMaker = Callable[..., Path]
START = datetime.datetime(2026, 11, 20, 9, 0, tzinfo=datetime.UTC)
STEP_S = 0.5


def stamp(seconds: float) -> str:
    return (
        (START + datetime.timedelta(seconds=seconds))
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def metrics_lines(
    *, steps: int, learning_rate: float, eval_every: int = 20, seed: int = 0, floor: float = 1.0
) -> list[Json]:
    """A loss that falls from 6 towards ``floor``, the faster the larger the learning rate, with noise."""
    noise = random.Random(seed)
    lines: list[Json] = []
    tokens = 0
    for step in range(1, steps + 1):
        tokens += 2000 + noise.randrange(200)
        base = floor + (6 - floor) * math.exp(-step * learning_rate * 100)
        common = {"step": step, "epoch": step / 100, "tokens": tokens}
        lines.append(
            common
            | {
                "time": stamp(step * STEP_S),
                "split": "train",
                "loss": base + noise.gauss(0, 0.03),
                "grad_norm": 1 + noise.random(),
                "learning_rate": learning_rate * (1 - step / (steps + 1)),
                "tokens_per_s": 4000 + noise.gauss(0, 50),
                "step_time_s": STEP_S,
                "eta_s": (steps - step) * STEP_S,
            }
        )
        if eval_every and step % eval_every == 0:
            loss = base + 0.05 + noise.gauss(0, 0.005)
            at = stamp(step * STEP_S + 0.1)
            lines.append(common | {"time": at, "split": "eval", "loss": loss, "perplexity": math.exp(loss)})
        memory = [1.5 + 0.01 * noise.random(), 1.4]
        figures = {
            "data_wait_s": 0.01,
            "data_wait_share": 0.02,
            "forward_s": 0.2,
            "rss_gib": memory[0],
            "slowest_rank": 0,
            "slowest_ratio": 1.1,
            "gpu_utilisation_percent": 85.0,
        }
        per_rank = {
            "data_wait_s": [0.01, 0.009],
            "forward_s": [0.2, 0.18],
            "rss_gib": memory,
            "gpu_utilisation_percent": [90.0, 80.0],
        }
        lines.append(
            common | {"time": stamp(step * STEP_S), "split": "system", **figures, "per_rank": per_rank}
        )
    return lines


def record_of(
    name: str, *, learning_rate: float, steps: int, seed: int, lines: list[Json], status: str
) -> Json:
    record = new_record(
        mode="sft",
        name=name,
        config={
            "learning_rate": learning_rate,
            "max_steps": steps,
            "per_device_train_batch_size": 8,
            "output_dir": name,
        },
        strategy="ddp",
        model="models/micro",
        world_size=2,
        global_batch_size=16,
        seed=seed,
        data={"path": "qa/train.parquet", "rows": 8000, "fingerprint": "f00d", "tokens": 1_000_000},
        provenance={
            "git_sha": "a" * 40,
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "hardware": {"cpu": "test cpu", "cpu_count": 2},
        },
    )
    record["started_at"] = stamp(0)
    if status == "running":
        return record
    end_record(record, _status(status), 0 if status == "ok" else 1)
    record["ended_at"] = stamp(steps * STEP_S + 1)
    if train := [entry for entry in lines if entry["split"] == "train"]:
        evaluations = [entry["loss"] for entry in lines if entry["split"] == "eval"]
        record["measurements"] = {
            "steps": train[-1]["step"],
            "tokens": train[-1]["tokens"],
            "tokens_per_s": 4000.0,
            "peak_memory_gib": {"max": 2.5, "per_rank": [2.5, 2.4]},
            "step_time_s": {"mean": STEP_S, "std": 0.01, "p50": STEP_S, "p95": 0.52, "n": len(train)},
            "loss": {"first": train[0]["loss"], "last": train[-1]["loss"]}
            | ({"eval": evaluations[-1]} if evaluations else {}),
        }
    return record


def _status(text: str) -> Status:
    assert text in ("ok", "oom", "preempted", "error")
    return text  # type: ignore[return-value]


def write_lines(run_dir: Path, lines: list[Json]) -> None:
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """make_run(name, learning_rate=, steps=, seed=, status=, lines=, record={changes}, config={changes}) ->
    the run's folder.
    """

    def make(
        name: str,
        *,
        learning_rate: float = 1e-3,
        steps: int = 60,
        seed: int = 0,
        status: str = "ok",
        floor: float = 1.0,
        lines: list[Json] | None = None,
        record: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
    ) -> Path:
        run_dir = tmp_path / name
        run_dir.mkdir(parents=True)
        entries = (
            metrics_lines(steps=steps, learning_rate=learning_rate, seed=seed, floor=floor)
            if lines is None
            else lines
        )
        found = record_of(
            run_dir.name, learning_rate=learning_rate, steps=steps, seed=seed, lines=entries, status=status
        )
        found["config"] |= config or {}
        write_json(run_dir / RUN_FILE, found | (record or {}))
        write_lines(run_dir, entries)
        return run_dir

    return make
