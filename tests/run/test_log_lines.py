"""The lines that a run prints are read again from its log, as exactly as they were printed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from podtune.run.log_lines import (
    duration,
    eval_line,
    head_line,
    parse,
    start_line,
    train_line,
)

TRAIN = {
    "loss": 2.34567,
    "learning_rate": 1.5e-3,
    "grad_norm": 1.23456,
    "tokens_per_s": 12345.6,
    "eta_s": 4321.0,
}


def test_a_training_line_gives_back_its_figures_as_it_rounded_them() -> None:
    line = train_line(5, 600, TRAIN)
    assert line == "step   5/600  loss 2.3457  grad 1.235  lr 1.50e-03  12,346 tokens/s  eta 1h12m"
    (entry,) = parse(line)
    assert entry == {
        "split": "train",
        "step": 5,
        "max_steps": 600,
        "loss": 2.3457,
        "grad_norm": 1.235,
        "learning_rate": 1.5e-3,
        "tokens_per_s": 12346.0,
        "eta_s": 4320.0,
    }


def test_a_line_without_speed_or_gradient_and_one_that_is_not_finite_are_read_too() -> None:
    (entry,) = parse(train_line(1, 9, {"loss": float("nan"), "learning_rate": 0.0}))
    assert str(entry["loss"]) == "nan"
    assert not {"grad_norm", "tokens_per_s", "eta_s"} & set(entry)
    (entry,) = parse(train_line(1, 9, TRAIN | {"grad_norm": float("inf")}))
    assert entry["grad_norm"] == float("inf")


@pytest.mark.parametrize(
    ("system", "processes", "printed"),
    [
        ({"rss_gib": 1.26}, 1, "  memory 1.3 GiB"),
        ({"rss_gib": 2.0, "per_rank": {"rss_gib": [1.0, 2.0, 3.04, 1.0]}}, 2, "  memory 2.0 GiB, 3.0 GiB"),
        (
            {
                "gpu_memory_gib": 40.0,
                "per_rank": {
                    "gpu_memory_gib": [30.0, 40.0, 31.0, 30.0],
                    "gpu_utilisation_percent": [90.0, 100.0, 40.0, 50.0],
                    "rss_gib": [5.0] * 4,
                },
            },
            2,
            "  gpu 95% 40.0 GiB, 45% 31.0 GiB",
        ),
        ({"gpu_memory_gib": 40.0}, 1, "  gpu 40.0 GiB"),
        (
            {"rss_gib": 1.0, "slowest_rank": 3, "slowest_ratio": 2.61, "data_wait_share": 0.34},
            1,
            "  memory 1.0 GiB  slow rank 3 (2.6x)  data wait 34%",
        ),
        (
            {"rss_gib": 1.0, "slowest_rank": 3, "slowest_ratio": 1.4, "data_wait_share": 0.02},
            1,
            "  memory 1.0 GiB",
        ),
    ],
)
def test_each_pods_use_and_what_holds_the_steps_up_stand_at_the_end_of_the_line(
    system: dict[str, Any], processes: int, printed: str
) -> None:
    line = train_line(5, 600, TRAIN, system, processes)
    assert line == train_line(5, 600, TRAIN) + printed
    assert parse(line) == parse(train_line(5, 600, TRAIN))


def test_evaluations_starts_and_the_first_line_are_read() -> None:
    assert parse(eval_line(30, {"loss": 1.98768, "perplexity": 7.297})) == [
        {"split": "eval", "step": 30, "loss": 1.9877, "perplexity": 7.3}
    ]
    assert parse(start_line(20, 60)) == [{"split": "start", "step": 20, "max_steps": 60}]
    head = head_line("my run", "fsdp-grad-op", 8, "cuda", 2, 7_000_000, 8000, 123_456)
    assert parse(head) == [
        {
            "split": "head",
            "name": "my run",
            "strategy": "fsdp-grad-op",
            "device": "cuda",
            "world_size": 8,
            "nnodes": 2,
        }
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 5",
        "step 5/60  loss",
        "loading weights: 5/60",
        ("podtune: warning: step 5/60  loss 2.0  lr 1e-3"),
        "eval at step x",
    ],
)
def test_other_lines_hold_nothing(line: str) -> None:
    assert parse(line) == []


def test_durations_are_short() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 75, 3600, 7384)] == [
        "0s",
        "59s",
        "1m15s",
        "1h00m",
        "2h03m",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "step 1/1  loss " + "1" * 16_000,
        "step 1/1  loss " + "1," * 1900,
        "eval at step 1  loss 1,2  perplexity 3",
    ],
)
def test_a_line_made_to_exhaust_or_break_the_parser_is_read_at_once_or_not_at_all(line: str) -> None:
    began = time.process_time()
    parse(line)
    assert time.process_time() - began < 1
