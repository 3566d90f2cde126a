"""podtune compare: what differs, what may be compared, which is better; one set of figures in the terminal,
the page and Aim.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.report.compare import view
from podtune.report.compare.answers import wilson
from podtune.report.compare.comparison import compare
from podtune.report.compare.figures import interpolate
from podtune.report.compare.page import html_page, swept
from podtune.report.draw.tables import shown
from podtune.report.runs import listing
from podtune.report.runs.runs import load_run
from podtune.run.errors import UserError
from podtune.run.record import METRICS_FILE, RUN_FILE, write_json

RunMaker = Callable[..., Path]
DOCS = Path(__file__).parents[3] / "docs" / "aim.md"


def podtune(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def comparison(*folders: Path) -> dict[str, Any]:
    result = podtune("compare", *folders, "--json")
    assert result.exit_code == 0, result.exception
    return dict(json.loads(result.stdout))


def embedded(page: Path) -> dict[str, Any]:
    match = re.search(
        (
            r'<script type="application/json" '
            r'id="podtune-data">(.*?)</script>'
        ),
        page.read_text(),
        re.DOTALL,
    )
    assert match
    return dict(json.loads(match.group(1)))


def test_the_first_thing_said_is_what_differs(make_run: RunMaker) -> None:
    changed = {
        "provenance": {
            "git_sha": "b" * 40,
            "versions": {"python": "3.11.7", "torch": "2.12.0"},
            "hardware": {"cpu": "test cpu"},
        }
    }
    found = comparison(make_run("a"), make_run("b", learning_rate=3e-4, record=changed))
    differences = {
        group: {row["key"]: row["values"] for row in rows} for group, rows in found["differences"].items()
    }
    assert differences["config"] == {"learning_rate": [1e-3, 3e-4]}
    assert differences["code"] == {"git_sha": ["a" * 40, "b" * 40]}
    assert differences["versions"] == {"torch": ["2.13.0", "2.12.0"]}
    assert differences["hardware"] == {"cpu_count": [2, None]}
    assert differences["data"] == {}


def train_lines(*points: tuple[int, float], tokens: int = 100, split: str = "train") -> list[dict[str, Any]]:
    """Lines of (step, loss), ``tokens`` a step."""
    at = "2026-11-20T09:00:01Z"
    return [
        {"time": at, "split": split, "step": step, "tokens": step * tokens, "loss": loss}
        for step, loss in points
    ]


def test_metrics_stand_side_by_side_where_the_shortest_run_ends(make_run: RunMaker) -> None:
    a = make_run("a", lines=train_lines((2, 8.0), (4, 6.0), (6, 4.0)))
    b = make_run("b", lines=train_lines(*((step, 9.0 - step) for step in (2, 3, 4, 6, 8)), tokens=300))
    found = comparison(a, b)["at_equal"]
    assert [(row["at"], row["values"]) for row in found["step"]] == [(6, [4.0, 3.0])]
    assert [(row["at"], row["values"]) for row in found["tokens"]] == [(600, [4.0, 7.0])]
    text = view.text(compare([load_run(a), load_run(b)]))
    assert re.search(r"train loss at 600 tokens +4\.000 +7\.000", text)


def test_where_no_place_is_common_values_are_interpolated_but_never_down_from_the_untrained_model(
    make_run: RunMaker,
) -> None:
    a = make_run("a", lines=train_lines((0, 8.4), (100, 3.0), (200, 2.0), split="eval"))
    b = make_run("b", lines=train_lines((0, 8.4), (90, 3.1), (190, 2.1), split="eval"))
    (row,) = comparison(a, b)["at_equal"]["step"]
    assert (row["at"], row["values"]) == (190, [pytest.approx(2.1), 2.1])
    short = make_run("short", lines=train_lines((0, 8.4), (50, 4.0), split="eval"))
    assert comparison(a, short)["at_equal"]["step"] == []
    assert interpolate(([1.0, 2.0], [5.0, 7.0]), 3.0) is None


def test_a_run_that_failed_or_has_no_loss_is_left_out_by_name_and_the_others_are_ranked(
    make_run: RunMaker,
) -> None:
    """Four runs: their verdict is that of the two complete ones, at their end."""
    good, worse = (
        make_run(name, floor=floor, learning_rate=5e-3, steps=200)
        for name, floor in (("good", 1.0), ("worse", 1.5))
    )
    short = make_run("short", learning_rate=5e-3, steps=60, status="error")
    nan = make_run("nan", status="error", lines=train_lines((1, 8.0), (2, math.nan)))
    empty = make_run("empty", status="running", lines=[])
    alone, found = comparison(good, worse), comparison(good, short, worse, nan, empty)
    assert found["verdict"]["left_out"] == {
        "short": "failed at 60",
        "nan": "failed at 2",
        "empty": "running",
    }
    assert found["verdict"]["text"].endswith(
        " Left out: short (failed at 60), nan (failed at 2), empty (running)."
    )
    assert found["verdict"]["better"] == "good"
    assert found["verdict"]["difference"] == alone["verdict"]["difference"]
    for axis in ("step", "tokens"):
        assert [row["at"] for row in found["at_equal"][axis]] == [
            row["at"] for row in alone["at_equal"][axis]
        ]
    third = make_run("third", floor=2.0, learning_rate=5e-3, steps=200)
    assert comparison(good, worse, third, empty)["verdict"]["text"].startswith(
        "Best of 3: good has the lowest"
    )


def test_a_clear_difference_is_called_one_and_noise_is_called_noise(make_run: RunMaker) -> None:
    better, worse = (
        make_run("better", floor=1.0, learning_rate=5e-3, steps=200),
        make_run("worse", floor=1.5, learning_rate=5e-3, steps=200),
    )
    verdict = comparison(worse, better)["verdict"]
    assert (verdict["metric"], verdict["better"], verdict["exceeds_noise"]) == ("eval loss", "better", True)
    assert verdict["difference"] == pytest.approx(0.5, abs=0.03)
    same = make_run("same", floor=1.0, learning_rate=5e-3, steps=200, seed=5)
    verdict = comparison(better, same)["verdict"]
    assert (verdict["better"], verdict["exceeds_noise"]) == (None, False)
    assert "does not exceed the noise" in verdict["text"]


def test_a_loss_that_still_falls_does_not_count_its_slope_as_noise(make_run: RunMaker) -> None:
    def evaluations(rate: float) -> list[dict[str, Any]]:
        points = [(step, 1 + 5 * math.exp(-step * rate)) for step in range(0, 100, 10)]
        return train_lines(*points, split="eval")

    verdict = comparison(
        make_run("slow", lines=evaluations(0.02)), make_run("fast", lines=evaluations(0.03))
    )["verdict"]
    assert (verdict["better"], verdict["exceeds_noise"]) == ("fast", True)
    assert verdict["noise_of_difference"] < 0.02


def test_a_seed_repeat_is_the_noise_where_there_is_one(make_run: RunMaker) -> None:
    runs = [make_run(f"seed-{seed}", seed=seed, learning_rate=5e-3, steps=200) for seed in (1, 2, 3)]
    verdict = comparison(*runs, make_run("other", floor=1.4, learning_rate=6e-3, steps=200))["verdict"]
    assert "spread between seeds" in verdict["noise_basis"]
    assert (verdict["better"], verdict["exceeds_noise"]) == ("the mean of seed-1, seed-2, seed-3", True)


def test_another_data_set_tokenizer_or_length_makes_losses_incomparable_and_no_run_better(
    make_run: RunMaker,
) -> None:
    base = make_run("base")
    other_data = make_run("other-data", record={"data": {"path": "x.parquet", "fingerprint": "beef"}})
    verdict = comparison(base, other_data)["verdict"]
    assert verdict["better"] is None
    assert "the data sets differ (fingerprint: base: f00d, other-data: beef)" in verdict["text"]
    longer = make_run("longer", config={"max_length": 2048})
    (line,) = comparison(base, longer)["not_comparable"]
    assert "other tokens are trained and judged (max_length: base: None, longer: 2048)" in line


def test_another_tokenizer_makes_losses_incomparable_and_another_model_does_not(make_run: RunMaker) -> None:
    data = {"path": "qa/train.parquet", "rows": 8000, "fingerprint": "f00d", "tokens": 1_000_000}
    one, same, other = (
        make_run(name, record={"model": f"models/{name}", "data": data | {"tokenizer": tokenizer}})
        for name, tokenizer in (("one", "aa"), ("same", "aa"), ("other", "bb"))
    )
    assert not any("tokenizers" in line for line in comparison(one, same)["not_comparable"])
    assert any(
        "the tokenizers differ" in line and "one: aa, other: bb" in line
        for line in comparison(one, other)["not_comparable"]
    )


def test_another_batch_or_machine_is_said_and_does_not_forbid_a_verdict(make_run: RunMaker) -> None:
    base = make_run("base", learning_rate=5e-3, steps=200)
    hardware = {
        "git_sha": "a" * 40,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "hardware": {"cpu": "another cpu", "cpu_count": 2},
    }
    other = make_run(
        "other",
        learning_rate=5e-3,
        steps=200,
        floor=1.5,
        record={"global_batch_size": 32, "provenance": hardware},
    )
    found = comparison(base, other)
    assert any(
        "the global batch differs (global_batch_size: base: 16, other: 32)" in line
        for line in found["not_comparable"]
    )
    assert any(
        ("speed, memory and equal times: the hardware differs") in line for line in found["not_comparable"]
    )
    assert found["verdict"]["better"] == "base"


def test_unequal_budgets_are_compared_at_equal_tokens(make_run: RunMaker) -> None:
    short, long = (
        make_run("short", learning_rate=2e-4, steps=100),
        make_run("long", learning_rate=2e-4, steps=300),
    )
    verdict = comparison(short, long)["verdict"]
    assert verdict["where"] == "at equal tokens, interpolated"
    # the same curve, not the longer run's end
    assert verdict["values"][0] == pytest.approx(verdict["values"][1], abs=0.1)


def test_a_folder_twice_is_refused_and_a_name_twice_is_told_apart(make_run: RunMaker) -> None:
    first, second = make_run("x/same"), make_run("y/same")
    assert [run["name"] for run in comparison(first, second)["runs"]] == [
        f"same ({first})",
        f"same ({second})",
    ]
    with pytest.raises(UserError, match="the same folder is given twice"):
        compare([load_run(first), load_run(first)])


def test_answers_decide_by_a_binomial_interval(make_run: RunMaker) -> None:
    def answering(name: str, share: float, rows: int = 400) -> Path:
        tuned = {"answers": {"rows": rows, "base": {"exact_match": 0.0}, "tuned": {"exact_match": share}}}
        return make_run(name, record={"measurements": tuned})

    good, bad, alike, few = (
        answering("good", 0.905),
        answering("bad", 0.223),
        answering("alike", 0.89),
        answering("few", 1.0, 20),
    )
    found = comparison(bad, good)["answers"]
    assert found["better"] == "good"
    assert (
        "good answers 90.5% of 400 held-out rows exactly, bad 22.3%: better by 68.2 points" in found["text"]
    )
    assert found["interval"] == pytest.approx([0.628, 0.728], abs=1e-3)
    found = comparison(good, alike)["answers"]
    assert (found["better"], "neither is better" in found["text"]) == (None, True)
    assert comparison(good, few)["answers"] is None
    assert wilson(1.0, 20)[0] < 0.9  # 20 of 20 is not certainty
    rows = listing.list_runs([load_run(good), load_run(few)])
    assert [row.exact_match for row in rows] == [0.905, 1.0]
    assert "exact" in listing.table(rows).text()


def test_a_sweep_s_page_has_its_name_the_swept_values_the_best_first_and_a_curve_over_them(
    make_run: RunMaker,
) -> None:
    rates = [1e-5 * 3**power for power in range(6)]
    folders = [
        make_run(
            f"learning_rate-{rate:g}_seed-{seed}_{index}ab{seed}cd",
            learning_rate=rate,
            seed=seed,
            steps=100,
        )
        for index, rate in enumerate(rates)
        for seed in (1, 2)
    ]
    runs = [load_run(folder) for folder in folders]
    found = compare(runs)
    assert found.names[0] == "learning_rate-1e-05_seed-1"  # unique without the hash
    page = html_page(found, "Sweep rates").replace(get_plotlyjs(), "")
    assert "<h1>Sweep rates</h1>" in page
    first = re.search(r"<tbody>(.*?)</tbody>", page, re.DOTALL)
    assert first
    shown_rates = re.findall(
        r'<tr>.*?<td class="left">ok</td><td class="left">[12]</td><td class="left">([^<]*)</td>', first[1]
    )
    assert float(shown_rates[0]) == pytest.approx(rates[-1])
    assert first[1].count(" best") >= 1
    assert "Eval loss over learning_rate" in page
    (chart,) = swept(found)
    assert chart.log_x
    assert [curve.name for curve in chart.series] == ["seed 1", "seed 2"]
    assert list(chart.series[0].places["learning_rate"]) == pytest.approx(rates)


def test_one_run_or_a_folder_that_is_none_is_refused(make_run: RunMaker, tmp_path: Path) -> None:
    run = make_run("one")
    assert "one run cannot be compared" in str(podtune("compare", run).exception)
    assert "no such folder" in str(podtune("compare", run, tmp_path / "nothing").exception)


def test_what_is_wrong_with_the_files_is_in_the_comparison(make_run: RunMaker) -> None:
    torn = make_run("torn")
    with (torn / METRICS_FILE).open("a") as file:
        file.write('{"step": 61, "spl')
    found = podtune("compare", torn, make_run("whole", learning_rate=3e-4))
    assert "torn or no metrics line" in found.stdout


def test_ten_thousand_steps_twice_with_the_page_take_a_few_times_the_parsing_of_their_files(
    make_run: RunMaker,
) -> None:
    """About a second on a quiet machine. A busy one makes processor time longer, so parsing is the clock."""
    folders = [make_run(name, steps=10_000, learning_rate=rate) for name, rate in (("a", 2e-5), ("b", 1e-5))]

    def parse() -> None:
        for folder in folders:
            for line in (folder / METRICS_FILE).read_bytes().splitlines():
                json.loads(line)

    def compare_them() -> None:
        runs = [load_run(folder) for folder in folders]
        assert len(html_page(compare(runs)).replace(get_plotlyjs(), "")) < 400_000

    def seconds(task: Callable[[], None]) -> float:
        began = time.process_time()
        task()
        return time.process_time() - began

    ratio = min(seconds(compare_them) / seconds(parse) for _ in range(3))
    assert ratio < 6, f"{ratio:.1f} times"


def test_terminal_page_and_aim_show_the_same_figures(make_run: RunMaker, tmp_path: Path) -> None:
    pytest.importorskip("aim")
    from aim.sdk.repo import Repo

    folders = [make_run("lr-1e-3", learning_rate=1e-3), make_run("lr-3e-4", learning_rate=3e-4)]
    page = tmp_path / "compare.html"
    terminal = podtune("compare", *folders, "--html", page).stdout
    found = comparison(*folders)
    assert embedded(page)["final"] == found["final"]
    assert embedded(page)["verdict"] == found["verdict"]

    repo = str(tmp_path / "aim")
    assert podtune("aim-sync", tmp_path, "--repo", repo).exit_code == 0
    expressions = re.findall(r'^metric\.name == .*run\.experiment == "qa"$', DOCS.read_text(), re.MULTILINE)
    assert len(expressions) == 4

    def every(expression: str) -> list[Any]:
        found = Repo.from_path(repo).query_metrics(expression, report_mode=0).iter_runs()
        return [metric for collection in found for metric in collection]

    last: dict[str, list[float]] = {}
    for key, expression in zip(("train loss", "eval loss", "speed"), expressions[:3], strict=True):
        by_name = {}
        for metric in every(expression):
            by_name[metric.run.name] = metric.data.items_list()[1][0][-1]
            measured = metric.run["measurements", "tokens_per_s"]
            assert measured == found["final"][0]["tokens_per_s"]
        last[key] = [by_name["lr-1e-3"], by_name["lr-3e-4"]]
    for key in ("train loss", "eval loss"):
        assert last[key] == [final[key] for final in found["final"]]
        row = next(
            line.split() for line in terminal.splitlines() if re.match(rf"{key}\s+[0-9.]+\s+[0-9.]+$", line)
        )
        assert row[-2:] == [shown(value) for value in last[key]]
    use = {
        (metric.run.name, metric.context.to_dict().get("rank")): metric.data.items_list()[1][0][-1]
        for metric in every(expressions[3])
    }
    assert use == {
        (folder.name, rank): percent
        for folder in folders
        for rank, percent in ((None, 85.0), (0, 90.0), (1, 80.0))
    }
    assert last["speed"] == [load_run(folder).last("train", "tokens_per_s") for folder in folders]


def test_many_runs_have_a_short_title_stand_in_rows_and_fit_a_narrow_terminal(
    make_run: RunMaker, tmp_path: Path
) -> None:
    folders = [make_run(f"sweep-{index}", learning_rate=1e-3 + index * 1e-4) for index in range(8)]
    runs = [load_run(folder) for folder in folders]
    found = compare(runs)
    assert view.text(found, width=80).splitlines()[9:12] == [
        "WHAT DIFFERS",
        "config   learning_rate",
        "───────  ─────────────",
    ]
    assert "<h1>8 runs</h1>" in html_page(found)
    table = [line for line in view.text(found, width=80).splitlines() if line.startswith("sweep-3 ")]
    assert table
    assert all(len(line) <= 80 for line in table)


def test_the_page_has_each_runs_answers_command_and_configuration(make_run: RunMaker) -> None:
    def answers(tuned: str) -> dict[str, Any]:
        sample = {"prompt": "Which script?", "reference": "KANNADA", "base": "ugug", "tuned": tuned}
        return {"measurements": {"answers": {"samples": [sample, "odd"]}}}

    a, b = (make_run(name, record=answers(text)) for name, text in (("a", "KANNADA"), ("b", "TAMIL")))
    record = json.loads((a / RUN_FILE).read_text())
    record["provenance"]["command"] = ["podtune", "train", "--config", "my file.yaml"]
    write_json(a / RUN_FILE, record)
    runs = [load_run(a), load_run(b)]
    page = html_page(compare(runs))
    row = re.search(r"<tr><th[^>]*>Which script\?</th>(.*?)</tr>", page)
    assert row
    assert re.findall(r'<td class="left( best)?">([^<]*)</td>', row[1]) == [
        ("", "KANNADA"),
        ("", "ugug"),
        (" best", "KANNADA"),
        ("", "TAMIL"),
    ]
    assert "podtune train --config &#x27;my file.yaml&#x27;" in page
    assert "&quot;learning_rate&quot;: 0.001" in page
