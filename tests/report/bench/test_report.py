"""The benchmark's report: what may be compared is, what may not is refused, and no figure comes from a broken
record.
"""

import copy
import html
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from podtune.bench.options import Options
from podtune.bench.strategies.table import STRATEGIES
from podtune.plan.predicted_vs_measured import plans
from podtune.report.bench.records import fault_of
from podtune.report.bench.report import report
from podtune.run.errors import UserError
from podtune.run.record import Measurements

SHA = "0123456789abcdef0123456789abcdef01234567"


def record(
    strategy: str = "single", world_size: int = 1, step_s: float = 0.2, /, **changes: Any
) -> dict[str, Any]:
    """A record as podtune.benchmark writes it: tinygpt-test, fp32, 8 sequences of 128 tokens."""
    config = {
        "model": "tinygpt-test",
        "strategy": strategy,
        "precision": "fp32",
        "global_batch_size": 8,
        "sequence_length": 128,
    }
    config |= {
        "accumulation": 1,
        "activation_checkpointing": "none",
        "optimizer": "adamw",
        "micro_batches": 8 if "pipe" in strategy else 0,
    }
    times = {
        "mean": step_s,
        "std": step_s * 0.02,
        "p50": step_s,
        "p95": step_s * 1.03,
        "n": 20,
        "p50_by_repeat": [step_s, step_s * 1.001],
    }
    found: dict[str, Any] = {
        "schema": "podtune.run/1",
        "mode": "benchmark",
        "name": f"{strategy}.w{world_size}",
        "started_at": "2026-11-21T02:00:00.000Z",
        "status": "ok",
        "strategy": strategy,
        "model": "tinygpt-test",
        "world_size": world_size,
        "global_batch_size": 8,
        "config": config,
        "measurements": {
            "step_time_s": times,
            "tokens_per_s": 1024 / step_s,
            "peak_memory_gib": {
                "max": 0.5,
                "per_rank": [0.5] * world_size,
                "kind": "resident peak of the process",
            },
            "parity": {"status": "ok", "max_relative_difference": 1e-7, "tolerance": 1e-5},
            "loss": {"first": 5.5, "last": 4.0},
        },
        "provenance": {
            "git_sha": SHA,
            "hardware": {"cpu": "a CPU", "cpu_count": 2},
            "versions": {"torch": "2.13.0"},
        },
    }
    if world_size > 1:
        found["measurements"]["communication"] = {"bytes_per_step": 3501060}
    for path, value in changes.items():
        target = found
        *parents, last = path.split("__")
        for key in parents:
            target = target[key]
        target[last] = value
    return found


def folder_of(tmp_path: Path, *records: dict[str, Any]) -> Path:
    for number, one in enumerate(records):
        cell = tmp_path / "cells" / f"{number}"
        cell.mkdir(parents=True)
        (cell / "run.json").write_text(json.dumps(one))
    return tmp_path


def report_on(folder: Path) -> dict[str, Any]:
    def planner(records: Any) -> list[Any]:
        return [plan and asdict(plan) for plan in plans(records)]

    return report(folder, planner).as_json()


def test_it_advises_the_fastest_and_says_whether_processes_pay(tmp_path: Path) -> None:
    cells = [record(), record("ddp", 2, 0.11), record("naive-mp", 2, 0.21), record("fsdp", 2, 0.15)]
    cells[3]["measurements"]["communication"]["bytes_per_step"] = 5251588
    (comparison,) = report_on(folder_of(tmp_path, *cells))["comparisons"]
    text = " ".join(comparison["advice"])
    assert text.startswith("More processes pay: ddp")
    assert "With 2 processes use ddp" in text
    assert (
        "ddp keeps 91% of the ideal against single ×1, so 2 processes do 1.82 times the work of one" in text
    )


def test_weak_scaling_is_one_comparison_over_its_batches_and_says_so(tmp_path: Path) -> None:
    """Twice the rows in 1.1 times the time: each process keeps 91% of its throughput."""
    weak = {"config__per_device_batch_size": 8}
    cells = [
        record(**weak),
        record("ddp", 2, 0.22, global_batch_size=16, measurements__tokens_per_s=2048 / 0.22, **weak),
        record("ddp", 2, 0.15),
    ]
    comparisons = report_on(folder_of(tmp_path, *cells))["comparisons"]
    titles = [each["title"] for each in comparisons]
    assert "8 sequences a step and process (effective batch 8 on 1, 16 on 2)" in titles[0]
    assert "8 sequences a step, " in titles[1]
    assert "ddp keeps 91% of the ideal against single ×1 with the same rows a process" in " ".join(
        comparisons[0]["advice"]
    )
    assert "per_device_batch_size" in (tmp_path / "report.csv").read_text().splitlines()[0]


def test_among_equals_it_advises_the_simplest_and_marks_the_least_memory(tmp_path: Path) -> None:
    cells = [record("ddp", 2, 0.1101), record("zero3", 2, 0.11, measurements__peak_memory_gib={"max": 0.2})]
    folder = folder_of(tmp_path, *cells)
    (comparison,) = report_on(folder)["comparisons"]
    text = " ".join(comparison["advice"])
    assert "use ddp" in text
    assert "as fast within the spread: zero3" in text
    assert "run.json) | **0.200** |" in (folder / "report.md").read_text()


def test_when_distributing_does_not_pay_it_says_so(tmp_path: Path) -> None:
    slower, equal = record("ddp", 2, 0.3), record("naive-mp", 2, 0.199)
    noisy = record("naive-mp", 1, 0.18), record("naive-mp", 2, 0.18)  # beats single in either number
    for number, cells in enumerate(([slower], [equal], noisy)):
        folder = folder_of(tmp_path / str(number), record(), *cells)
        (comparison,) = report_on(folder)["comparisons"]
        assert comparison["advice"][0].startswith(
            "Stay with one process unless it does not fit: no strategy does"
        )
        assert comparison["advice"][-1].startswith("With one process use single: 5,120 tokens/s")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config__precision": "bf16"}, "precision: bf16, fp32"),
        ({"global_batch_size": 16, "measurements__tokens_per_s": 2048 / 0.1}, "global batch size: 16, 8"),
        ({"provenance__git_sha": "f" * 40}, f"commit: {SHA}, {'f' * 40}"),
        ({"provenance__hardware": {"gpu": "NVIDIA L40S"}}, "device: NVIDIA L40S, a CPU"),
        ({"config__optimizer": "sgd"}, "optimizer: adamw, sgd"),
    ],
)
def test_records_that_differ_in_what_matters_are_never_compared(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    said = report_on(folder_of(tmp_path, record(), record("ddp", 2, 0.1), record("fsdp", 2, 0.1, **change)))
    assert len(said["comparisons"]) == 2
    assert named in said["not_compared"][0]
    for comparison in said["comparisons"]:
        strategies = {cell["strategy"] for cell in comparison["cells"]}
        assert strategies in ({"single", "ddp"}, {"fsdp"})
        assert not ("fsdp" in " ".join(comparison["advice"]) and "ddp" in " ".join(comparison["advice"]))


def test_a_cell_whose_losses_differ_shows_no_speed(tmp_path: Path) -> None:
    wrong = record(
        "ddp",
        2,
        0.05,
        measurements__parity={"status": "failed", "max_relative_difference": 0.1, "tolerance": 1e-5},
    )
    folder = folder_of(tmp_path, record(), wrong)
    said = report_on(folder)
    cell = next(one for one in said["comparisons"][0]["cells"] if one["strategy"] == "ddp")
    assert cell["throughput"] is None
    assert cell["step_time_mean_s"] is None
    assert any("parity: failed" in why for why in said["failed"].values())
    assert "20,480" not in (folder / "report.md").read_text()  # the speed that it would have had


def test_failed_cells_are_listed_with_how_they_failed(tmp_path: Path) -> None:
    oom = record("ddp", 2, status="oom", reason="out of memory on rank 1", measurements={"held_at_oom": {}})
    hang = record("fsdp", 2, status="error", reason="hang: not done after 60 s", measurements={})
    folder = folder_of(tmp_path, record(), oom, hang)
    report_on(folder)
    for name in ("report.md", "report.html"):
        text = html.unescape((folder / name).read_text())
        assert "oom: out of memory on rank 1" in text
        assert "error: hang: not done after 60 s" in text


@pytest.mark.parametrize(
    "change",
    [
        {"measurements__step_time_s__mean": -1.0},
        {"measurements__step_time_s__mean": "fast"},
        {"measurements__step_time_s": None},
        {"measurements__tokens_per_s": float("inf")},
        {"measurements__tokens_per_s": True},
        {"world_size": "two"},
        {"global_batch_size": 0},
        {"strategy": None},
        {"config": []},
        {"schema": "podtune.run/9"},
    ],
)
def test_a_forged_or_broken_record_gives_damaged_and_never_a_number(
    change: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, record(), record("ddp", 2, 0.11, **change))
    said = report_on(folder)
    assert len(said["damaged"]) == 1
    assert "damaged" in said["damaged"][0]
    assert [cell["strategy"] for one in said["comparisons"] for cell in one["cells"]] == ["single"]
    assert "damaged" in (folder / "report.html").read_text()


def test_a_record_cut_off_anywhere_is_damaged(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, record())
    file = folder / "cells/0/run.json"
    whole = file.read_text()
    for end in range(0, len(whole) - 1, 97):
        file.write_text(whole[:end])
        said = report_on(folder)
        assert said["damaged"], end
        assert said["comparisons"] == []
    assert fault_of(json.loads(whole)) is None


def test_an_empty_folder_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no benchmark records") as refusal:
        report_on(tmp_path)
    assert "podtune bench run --preset smoke" in str(refusal.value)
    result = subprocess.run(
        [sys.executable, "-m", "podtune.cli", "bench", "report", str(tmp_path / "none")],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 66
    assert "podtune bench run" in result.stderr


def test_every_cell_leads_to_its_record(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, record(), record("ddp", 2, 0.11), record("fsdp", 2, status="error"))
    report_on(folder)
    records = {f"./cells/{index}/run.json" for index in range(3)}
    page, markdown = (folder / "report.html").read_text(), (folder / "report.md").read_text()
    assert set(re.findall(r'<a href="(\./[^"]+)"', page)) == records
    assert set(re.findall(r"\]\((\./cells/[^)]+)\)", markdown)) == records
    assert all((folder / path).is_file() for path in records)


def test_markdown_csv_and_page_show_the_same_metrics(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, record(), record("ddp", 2, 0.11), record("pipeline-gpipe", 2, 0.13))
    said = report_on(folder)
    markdown, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    assert "9,309" in markdown  # 1024 tokens in 0.11 s
    assert "9,309" in page
    assert "9309.09" in (folder / "report.csv").read_text()
    for title in ("Throughput", "Step time", "Peak memory", "Sent in a step", "Scaling efficiency"):
        assert f"<figcaption>{title}" in page
    ddp = next(cell for cell in said["comparisons"][0]["cells"] if cell["strategy"] == "ddp")
    assert ddp["bytes_per_step"] / ddp["bytes_per_step_formula"] == pytest.approx(1, abs=0.01)
    assert ddp["efficiency"] == pytest.approx(0.2 / (2 * 0.11))


def test_the_newest_of_two_records_of_one_cell_counts_and_the_other_is_named(tmp_path: Path) -> None:
    newer = record("single", 1, 0.1, started_at="2026-11-22T02:00:00.000Z")
    (comparison,) = report_on(folder_of(tmp_path, record(), newer))["comparisons"]
    assert [cell["step_time_mean_s"] for cell in comparison["cells"]] == [0.1]
    assert any("Older records" in text for text in comparison["cautions"])


def test_names_from_a_record_cannot_break_the_page(tmp_path: Path) -> None:
    evil = copy.deepcopy(record())
    evil["model"] = "../<script>alert(1)</script>"
    folder = folder_of(tmp_path, evil)
    report_on(folder)
    assert "<script>alert(1)" not in (folder / "report.html").read_text()
    assert "Content-Security-Policy" in (folder / "report.html").read_text()


def test_names_from_a_record_cannot_break_the_markdown(tmp_path: Path) -> None:
    evil = copy.deepcopy(record())
    evil["strategy"] = evil["model"] = "a](javascript:alert(1)) <script>\x1b[31m\ud800 | b"
    folder = folder_of(tmp_path, evil)
    report_on(folder)
    text = (folder / "report.md").read_text()
    assert not re.search(r"(?<!\\)\]\((?!\./)", text), "each link leads to a record"
    assert not re.search(r"(?<!\\)<", text)
    assert "\x1b" not in text


def test_a_folder_called_like_a_script_is_a_folder_in_every_link(tmp_path: Path) -> None:
    cell = tmp_path / "javascript:alert(1)"
    cell.mkdir()
    (cell / "run.json").write_text(json.dumps(record()))
    report_on(tmp_path)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "./javascript%3Aalert%281%29/run.json" in text
        assert not re.search(r"""(href="|\]\()\s*javascript:""", text)


@pytest.mark.parametrize("step_time_s", [None, 0.1])
def test_a_planned_step_time_is_shown_only_where_there_is_one(
    step_time_s: float | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, record())
    report(folder, lambda records: [{"step_time_s": step_time_s} for _ in records])
    markdown, page = (folder / "report.md").read_text(), (folder / "report.html").read_text()
    for text, title in ((markdown, "plan (ms)"), (page, ">plan (ms)<")):
        assert (title in text) == (step_time_s is not None)


def test_the_command_prints_a_table_of_each_comparison(tmp_path: Path) -> None:
    trained = {"loss": 1.0, "loss_by_epoch": [1.0], "seconds_by_epoch": [2.0], "accuracy_by_epoch": [0.75]}
    cells = record(measurements__training=trained), record("ddp", 2, 0.11), record("fsdp", 2, status="error")
    done = subprocess.run(
        [sys.executable, "-m", "podtune.cli", "bench", "report", str(folder_of(tmp_path, *cells))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines()]
    speed = ["cell", "tokens/s", "step mean (ms)", "std", "p50", "p95", "efficiency (%)", "MFU (%)"]
    assert [*speed, "losses equal", "accuracy by epoch (%)"] in rows
    assert ["single ×1", "5,120*", "200.0", "4.00", "200.0", "206.0", "–", "–", "ok", "75.0"] in rows
    assert ["ddp ×2", "9,309*", "110.0", "2.20", "110.0", "113.3", "90.9", "–", "ok"] in rows
    assert any(row[:2] == ["ddp ×2", "0.500*"] for row in rows), rows
    assert not any(row[0] == "fsdp ×2" for row in rows)


COMMITTED = Path(__file__).parents[3] / "docs/results/smoke-cpu"


def test_the_committed_records_are_of_todays_schema() -> None:
    files = sorted(COMMITTED.rglob("run.json"))
    found = [json.loads(file.read_text()) for file in files]
    assert {each["strategy"] for each in found} >= {*STRATEGIES} - {"tensor+fsdp", "pipeline-1f1b+ddp"}
    for file, each in zip(files, found, strict=True):
        measured = Measurements.read(each)
        again = "make results"
        assert set(each["config"]) == {option.name for option in fields(Options)}, (file, again)
        assert json.loads(json.dumps(measured.to_json())) == each["measurements"], (file, again)
        assert measured.counted_memory_gib is not None, (file, again)
        assert (each["status"], measured.parity and measured.parity.status) == ("ok", "ok"), file
        assert (measured.communication is not None) == (each["world_size"] > 1), file
        assert re.fullmatch("[0-9a-f]{40}", each["provenance"]["git_sha"]), file


def test_the_committed_report_is_what_its_records_say(tmp_path: Path) -> None:
    folder = shutil.copytree(COMMITTED, tmp_path / "again")
    report_on(folder)
    for name in ("report.md", "report.csv"):
        assert (folder / name).read_text() == (COMMITTED / name).read_text(), (
            "podtune bench report docs/results/smoke-cpu"
        )
