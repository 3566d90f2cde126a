"""A metrics file is read while it grows."""

from __future__ import annotations

import json
from pathlib import Path

from podtune.run.follow import MetricsTail
from podtune.run.metrics_log import MetricsLog


def test_new_lines_are_read_once_and_a_torn_one_when_it_is_complete(tmp_path: Path) -> None:
    tail, file = MetricsTail(tmp_path), tmp_path / "metrics.jsonl"
    assert tail.read() == []
    first, second = ({"step": step, "split": "train", "loss": 1.0} for step in (1, 2))
    torn = json.dumps(second)
    file.write_text(f"{json.dumps(first)}\n{torn[:10]}")
    assert tail.read() == [first]
    assert tail.read() == []
    with file.open("a") as grown:
        grown.write(f"{torn[10:]}\n")
    assert tail.read() == [second]


def test_a_run_that_resumes_is_read_from_the_top(tmp_path: Path) -> None:
    tail, path = MetricsTail(tmp_path), tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write("train", step, {"loss": 4.0 - step})
    assert [entry["step"] for entry in tail.read()] == [1, 2, 3]
    again = MetricsLog(path, from_step=1)
    for step in (2, 3, 4):
        again.write("train", step, {"loss": 0.5})
    assert [(entry["step"], entry["loss"]) for entry in tail.read()] == [
        (1, 3.0),
        (2, 0.5),
        (3, 0.5),
        (4, 0.5),
    ]
