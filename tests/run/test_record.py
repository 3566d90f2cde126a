"""The record of a run survives restarts and says what it cannot say."""

import json
from pathlib import Path

from podtune.run.record import MetricsLog, end_record, new_record, read_metrics, write_json


def test_a_resumed_metrics_file_has_one_line_for_each_step_and_split(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path)
    for step in (1, 2, 3):
        first.write("train", step, {"loss": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"time": "torn')
    resumed = MetricsLog(path, from_step=2)
    resumed.write("train", 2, {"loss": 99.0})
    resumed.write("train", 3, {"loss": 3.5})
    resumed.close()
    assert [(entry["step"], entry["loss"]) for entry in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.5)]


def test_a_record_with_nan_is_still_json_and_says_nan(tmp_path: Path) -> None:
    record = end_record(new_record(mode="sft", name="r", config={}), "error", 65, "loss is NaN")
    record["measurements"] = {"loss": {"last": float("nan")}}
    write_json(tmp_path / "run.json", record)
    assert json.loads((tmp_path / "run.json").read_text())["measurements"]["loss"]["last"] == "nan"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
