"""Each rank's own figures, and what podtune watch makes of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from podtune.report.runs.runs import Run, load_run
from podtune.report.runs.watch import facts, warnings
from podtune.run.record import METRICS_FILE, RUN_FILE, new_record, write_json
from podtune.run.world import World
from podtune.sft.train.meter import Meter, system_metrics


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by sleeping alone: a busy machine changes no figure."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)


def batches(seconds: float) -> Iterator[int]:
    while True:
        time.sleep(seconds)
        yield 1


def figures(data_s: float) -> dict[str, Any]:
    """One rank's figures of two steps of two micro-batches each, after a first one that took long."""
    meter, source = Meter(World()), batches(data_s)
    next(meter.batches(batches(0.3)))
    for _ in range(2):
        taken = meter.batches(source)
        for _ in range(2):
            next(taken)
    meter.count({"input_ids": torch.zeros(1, 7)})
    meter.exchange()
    assert meter.tokens == 7
    return meter.ranks[0]


def test_a_rank_knows_how_long_a_step_of_it_waits_for_data() -> None:
    found = figures(0.02)
    assert found["data_wait_s"] == pytest.approx(0.04), "the first step's wait is left out"
    assert found["rss_gib"] > 0.01
    assert not any(name.startswith("gpu") for name in found)


def watched(run_dir: Path, ranks: list[dict[str, Any]], step_time_s: float) -> Run:
    record = new_record(mode="sft", name="run", config={}, world_size=len(ranks), nproc_per_node=1)
    write_json(run_dir / RUN_FILE, record)
    lines = [
        {"split": "train", "step": 1, "loss": 1.0},
        {"split": "system", "step": 1, **system_metrics(ranks, step_time_s)},
    ]
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(run_dir, curves=False)


def test_watch_says_that_steps_wait_for_data(tmp_path: Path) -> None:
    stalled, smooth = tmp_path / "stalled", tmp_path / "smooth"
    for folder in (stalled, smooth):
        folder.mkdir()
    (warning,) = warnings(watched(stalled, [figures(0.02)] * 2, step_time_s=0.1))
    assert "of a step waits for data" in warning
    run = watched(smooth, [figures(0.001)] * 3, step_time_s=0.1)
    assert warnings(run) == []
    assert [name for name, _ in facts(run) if "pod" in name] == ["pod 0", "pod 1", "pod 2"]


def test_a_figure_that_one_rank_lacks_is_none_for_that_rank_and_absent_where_all_lack_it() -> None:
    found = system_metrics([{"rss_gib": 1.0, "gpu_utilisation_percent": 90.0}, {"rss_gib": 2.0}], None)
    assert found == {
        "rss_gib": 2.0,
        "gpu_utilisation_percent": 90.0,
        "per_rank": {"rss_gib": [1.0, 2.0], "gpu_utilisation_percent": [90.0, None]},
    }
    assert "per_rank" not in system_metrics([{"rss_gib": 1.0}], None)
