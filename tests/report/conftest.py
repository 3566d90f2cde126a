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

from training.run.record import METRICS_FILE, RUN_FILE, end_record, new_record, write_json

RunMaker = Callable[..., Path]
START = datetime.datetime(2026, 11, 20, 9, 0, tzinfo=datetime.UTC)


def stamp(seconds: float) -> str:
    return (START + datetime.timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def metrics_lines(
    *, steps: int, learning_rate: float, every: int = 1, eval_every: int = 0, seed: int = 0, floor: float = 1.0
) -> list[dict[str, Any]]:
    """A loss that falls from 6 towards ``floor``, the faster the larger the learning rate, with noise."""
    noise = random.Random(seed)
    lines: list[dict[str, Any]] = []
    tokens = 0
    for step in range(1, steps + 1):
        tokens += 2000 + noise.randrange(200)
        base = floor + (6 - floor) * math.exp(-step * learning_rate * 10)
        if step % every == 0:
            lines.append(
                {
                    "time": stamp(step * 0.5), "step": step, "split": "train", "epoch": step / 100,
                    "loss": base + noise.gauss(0, 0.03), "grad_norm": 1 + noise.random(), "learning_rate": learning_rate * (1 - step / (steps + 1)),
                    "tokens": tokens, "tokens_per_s": 4000 + noise.gauss(0, 50), "step_time_s": 0.5, "eta_s": (steps - step) * 0.5,
                }
            )  # fmt: skip
        if eval_every and step % eval_every == 0:
            loss = base + 0.05 + noise.gauss(0, 0.005)
            lines.append(
                {
                    "time": stamp(step * 0.5 + 0.1),
                    "step": step,
                    "split": "eval",
                    "epoch": step / 100,
                    "loss": loss,
                    "perplexity": math.exp(loss),
                    "tokens": tokens,
                }
            )
            lines.append({"time": stamp(step * 0.5 + 0.2), "step": step, "split": "system", "rss_gib": 1.5 + 0.01 * noise.random()})
    return lines


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """make_run(name, learning_rate=, steps=, status=, **changes to the record) -> the run's folder."""

    def make(
        name: str, *, learning_rate: float = 1e-3, steps: int = 60, eval_every: int = 20, seed: int = 0, status: str = "ok",
        folder: Path | None = None, config: dict[str, Any] | None = None, lines: list[dict[str, Any]] | None = None, floor: float = 1.0, **record_changes: Any,
    ) -> Path:  # fmt: skip
        run_dir = (folder or tmp_path) / name
        run_dir.mkdir(parents=True)
        entries = (
            lines
            if lines is not None
            else metrics_lines(steps=steps, learning_rate=learning_rate, eval_every=eval_every, seed=seed, floor=floor)
        )
        record = new_record(
            mode="sft", name=name, config={"learning_rate": learning_rate, "max_steps": steps, "per_device_train_batch_size": 8, **(config or {})},
            strategy="ddp", model="micro", world_size=2, nnodes=1, nproc_per_node=2, global_batch_size=16, seed=seed,
            data={"path": "data/train.parquet", "rows": 8000, "fingerprint": "f00d", "tokens": 1_000_000},
            provenance={"git_sha": "a" * 40, "versions": {"python": "3.11.7", "torch": "2.13.0"}, "hardware": {"cpu": "test cpu", "cpu_count": 2}},
        )  # fmt: skip
        record["started_at"] = stamp(0)
        train = [entry for entry in entries if entry["split"] == "train"]
        if status != "running":
            end_record(record, status, 0 if status == "ok" else 1)  # type: ignore[arg-type]
            record["ended_at"] = stamp(steps * 0.5 + 1)
            record["measurements"] = {
                "steps": train[-1]["step"], "tokens": train[-1]["tokens"], "tokens_per_s": 4000.0 + seed, "peak_memory_gib": {"max": 2.5, "per_rank": [2.5, 2.4]},
                "step_time_s": {"mean": 0.5, "std": 0.01, "p50": 0.5, "p95": 0.52, "n": len(train)},
                "loss": {"first": train[0]["loss"], "last": train[-1]["loss"]},
            } if train else {}  # fmt: skip
        record.update(record_changes)
        write_json(run_dir / RUN_FILE, record)
        (run_dir / METRICS_FILE).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return run_dir

    return make
