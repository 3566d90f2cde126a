"""The lines that a run prints while it trains."""

from __future__ import annotations

from typing import Any

import pytest

from podtune.run.log_lines import (
    duration,
    eval_line,
    head_line,
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


def test_a_step_is_one_line() -> None:
    line = train_line(5, 600, TRAIN)
    assert line == "step   5/600  loss 2.3457  grad 1.235  lr 1.50e-03  12,346 tokens/s  eta 1h12m"
    assert train_line(1, 9, {"loss": float("nan"), "learning_rate": 0.0}) == "step 1/9  loss nan  lr 0.00e+00"


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


def test_a_run_begins_with_its_name_strategy_devices_and_data() -> None:
    head = head_line("my run", "fsdp-grad-op", 8, "cuda", 2, 7_000_000, 8000, 123_456)
    assert head == (
        "my run: fsdp-grad-op on 8 x cuda (2 nodes), 7,000,000 trained parameters, 8,000 rows, 123,456 tokens"
    )
    assert start_line(20, 60) == "training: steps 20 to 60"


def test_an_evaluation_is_one_line() -> None:
    line = eval_line(30, {"loss": 1.98768, "perplexity": 7.297})
    assert line == "eval at step 30  loss 1.9877  perplexity 7.30"


def test_durations_are_short() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 75, 3600, 7384)] == [
        "0s",
        "59s",
        "1m15s",
        "1h00m",
        "2h03m",
    ]
