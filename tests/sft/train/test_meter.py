"""Each rank's own figures: the wait for data and the forward pass, and what podtune watch makes of a rank
that holds up the others.
"""

from __future__ import annotations

import json
import re
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


class Slow(torch.nn.Module):
    """A forward pass of a known length."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self) -> None:
        time.sleep(self.seconds)


def batches(seconds: float) -> Iterator[int]:
    while True:
        time.sleep(seconds)
        yield 1


def figures(*, data_s: float = 0.0, forward_s: float = 0.0, strategy: str = "ddp") -> dict[str, Any]:
    """One rank's figures of two steps of two micro-batches each, after a first one that took long, and of an
    evaluation.
    """
    meter, model, source = Meter(World(), strategy), Slow(forward_s), batches(data_s)
    next(meter.batches(batches(0.3)))
    for _ in range(2):
        taken = meter.batches(source)
        for _ in range(2):
            next(taken)
            meter.time_forward(model)
            model()
    model.seconds = 0.5
    model.eval()()
    meter.count({"input_ids": torch.zeros(1, 7)})
    meter.exchange()
    assert meter.tokens == 7
    return meter.ranks[0]


def test_a_rank_knows_how_long_a_step_of_it_waits_for_data_and_computes_forward() -> None:
    found = figures(data_s=0.02, forward_s=0.01)
    assert found["data_wait_s"] == pytest.approx(0.04), "the first step's wait is left out"
    assert found["forward_s"] == pytest.approx(0.02), "two micro-batches a step, and no evaluation"
    assert found["rss_gib"] > 0.01
    assert not any(name.startswith("gpu") for name in found)


def test_where_a_forward_pass_waits_for_other_ranks_it_is_not_a_ranks_own_and_absent() -> None:
    assert "forward_s" not in figures(forward_s=0.001, strategy="fsdp")
    ranks = [figures(forward_s=0.001, strategy="fsdp") for _ in range(2)]
    assert not {"forward_s", "slowest_rank"} & set(system_metrics(ranks, 0.1))


def watched(run_dir: Path, ranks: list[dict[str, Any]], step_time_s: float) -> Run:
    record = new_record(mode="sft", name="run", config={}, world_size=len(ranks), nproc_per_node=1)
    write_json(run_dir / RUN_FILE, record)
    lines = [
        {"split": "train", "step": 1, "loss": 1.0},
        {"split": "system", "step": 1, **system_metrics(ranks, step_time_s)},
    ]
    (run_dir / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load_run(run_dir, curves=False)


def test_watch_names_the_slow_rank_and_what_it_takes_its_time_for(tmp_path: Path) -> None:
    ranks = [figures(forward_s=0.005), figures(forward_s=0.02), figures(forward_s=0.005)]
    run = watched(tmp_path, ranks, step_time_s=0.1)
    (warning,) = warnings(run)
    assert re.fullmatch(
        (
            r"rank 1 is slow: the others wait for it, it takes \d+\.\d times as long .* 0\.0\d+ s for its "
            r"forward pass a step\)"
        ),
        warning,
    )
    assert [name for name, _ in facts(run) if "pod" in name] == ["pod 0", "pod 1", "pod 2"]


def test_watch_says_that_steps_wait_for_data_and_nothing_of_ranks_that_are_alike(tmp_path: Path) -> None:
    stalled, smooth = tmp_path / "stalled", tmp_path / "smooth"
    for folder in (stalled, smooth):
        folder.mkdir()
    ranks = [figures(data_s=0.02), figures(data_s=0.02)]
    assert any(
        "of a step waits for data" in warning
        for warning in warnings(watched(stalled, ranks, step_time_s=0.1))
    )
    assert warnings(watched(smooth, [figures(forward_s=0.01)] * 2, step_time_s=0.1)) == []


def test_a_figure_that_one_rank_lacks_is_none_for_that_rank_and_absent_where_all_lack_it() -> None:
    found = system_metrics([{"rss_gib": 1.0, "gpu_utilisation_percent": 90.0}, {"rss_gib": 2.0}], None)
    assert found == {
        "rss_gib": 2.0,
        "gpu_utilisation_percent": 90.0,
        "per_rank": {"rss_gib": [1.0, 2.0], "gpu_utilisation_percent": [90.0, None]},
    }
    assert "per_rank" not in system_metrics([{"rss_gib": 1.0}], None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_forward_pass_is_timed_by_its_own_clock() -> None:
    meter, model = Meter(World(device_type="cuda"), "single"), torch.nn.Linear(2048, 2048, device="cuda")
    rows = torch.randn(2048, 2048, device="cuda")
    for _ in range(3):
        next(meter.batches(iter([1])))
        meter.time_forward(model)
        model(rows)
    meter.exchange()
    assert meter.ranks[0]["forward_s"] > 0
    assert meter.ranks[0]["gpu_memory_gib"] > 0
