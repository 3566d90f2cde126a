"""The HTML page: self-contained, safe with any text, and, in a real browser, drawn without errors and
operable.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from podtune.cli import app
from podtune.report.draw.page import Section, page, paragraph
from podtune.report.draw.plots import (
    Axis,
    Series,
    bar_chart,
    line_chart,
    loss_curve_png,
    running_mean,
    thin,
    tick_label,
)
from podtune.report.draw.tables import Column, Table, shown

RunMaker = Callable[..., Path]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Appended to a copy of the page: counts what is drawn, clicks and presses keys, and writes what it saw where
# --dump-dom shows it.
PROBE = """
<script>
const seen = { errors: window.podtuneErrors, wide: document.documentElement.scrollWidth > window.innerWidth };
const charts = [...document.querySelectorAll(".chart")].filter((chart) => chart.querySelector(".series"));
const box = (series) => series.getBoundingClientRect();
const drawn = (series) => box(series).width > 20
  && getComputedStyle(series.querySelector("polyline")).stroke !== "none";
seen.charts = charts.length;
seen.drawn = charts.every((chart) => [...chart.querySelectorAll(".series")].every(drawn));
const [first, second] = charts[0].querySelectorAll(".legend button");
const series = charts[0].querySelectorAll(".series");
first.click();
seen.off = box(series[0]).width === 0 && first.getAttribute("aria-pressed") === "false"
  && box(series[1]).width > 20;
first.click();
seen.on = box(series[0]).width > 20;
second.focus();
seen.focusable = document.activeElement === second;
seen.data = JSON.parse(document.getElementById("podtune-data").textContent).schema;
document.body.setAttribute("data-seen", JSON.stringify(seen));
</script>
"""
CATCH = (
    "<script>window.podtuneErrors = []; window.addEventListener('error', (event) => "
    "window.podtuneErrors.push(event.message));</script>"
)


@pytest.fixture
def compared(make_run: RunMaker, tmp_path: Path) -> Path:
    file = tmp_path / "compare.html"
    folders = [make_run("lr-1e-3"), make_run("lr-3e-4", learning_rate=3e-4)]
    assert CliRunner().invoke(app, ["compare", *map(str, folders), "--html", str(file)]).exit_code == 0
    return file


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("size", ["1200,900", "500,900"])
def test_in_a_browser_the_page_draws_its_curves_without_errors_and_a_series_can_be_switched_off(
    compared: Path, tmp_path: Path, size: str
) -> None:
    assert CHROMIUM
    text = compared.read_text()
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("<head>", "<head>" + CATCH, 1).replace("</body>", PROBE + "</body>"))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
    ]
    command += [
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={size}",
        "--dump-dom",
        probed.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert match, done.stderr[-2000:]
    assert match.group(1).replace("&quot;", '"') == (
        '{"errors":[],"wide":false,"charts":8,"drawn":true,"off":true,"on":true,"focusable":true,"data":"podtune.compare/1"}'
    )
    assert "CONSOLE" not in done.stderr, done.stderr


def test_the_page_needs_no_network(compared: Path) -> None:
    text = compared.read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert "@import" not in text
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_every_chart_has_a_title_labels_units_and_its_figures_in_a_table(compared: Path) -> None:
    charts = re.findall(r'<figure class="chart">.*?</figure>', compared.read_text(), re.DOTALL)
    assert len(charts) == 8
    for chart in charts:
        assert re.search(r"<figcaption>[^<]+</figcaption>", chart)
        assert len(re.findall(r'<text class="axis"', chart)) == 2
        assert 'role="img" aria-label="' in chart
        assert "<details><summary>Figures</summary>" in chart
    assert sum("nats per token" in chart for chart in charts) == 4


def test_text_of_a_run_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>\"'<b>&"
    chart = line_chart(evil, x=evil, y=evil, series=[Series(evil, [1, 2], [1, 2])]) + bar_chart(
        evil, y=evil, bars=[(evil, 1.0)]
    )
    table = Table([Column(evil)], [[evil]], caption=evil, notes=[evil]).html()
    text = page(
        evil,
        subtitle=evil,
        sections=[Section("key", evil, [chart, table, paragraph(evil)])],
        data={evil: evil},
        footer=evil,
    )
    assert "<script>alert" not in text
    assert text.count("</script>") == 2  # the data's and the page's own


def test_a_chart_leaves_out_what_is_not_finite_and_says_when_nothing_is_left() -> None:
    nan = float("nan")
    assert Series("a", [1, 2, 3], [1.0, nan, 3.0]).points() == [(1, 1.0), (3, 3.0)]
    assert "No run recorded this." in line_chart("t", x="x", y="y", series=[Series("a", [1], [nan])])
    assert "not measured" in bar_chart("t", y="y", bars=[("a", 1.0), ("b", None)])


def test_thinning_keeps_the_ends_the_peaks_and_invents_nothing() -> None:
    points = [(float(index), float(index % 7)) for index in range(10_000)]
    points[5000] = (5000.0, 99.0)
    kept = thin(points, 400)
    assert len(kept) <= 400
    assert {points[0], points[5000], points[-1]} <= set(kept)
    assert set(kept) <= set(points)
    assert [place for place, _ in kept] == sorted(place for place, _ in kept)


def test_axes_have_round_ticks_that_cover_the_values() -> None:
    axis = Axis.fit([0.93, 6.2], 100.0, 0.0)
    assert axis.ticks == (0, 1, 2, 3, 4, 5, 6, 7)
    assert axis.at(0) == 100.0
    assert axis.at(7) == 0.0
    assert Axis.fit([0.02, 50.0], 0, 1, log=True).ticks == (0.01, 0.1, 1.0, 10.0, 100.0)
    assert Axis.fit([3.0, 3.0], 0, 1).low < 3.0 < Axis.fit([3.0, 3.0], 0, 1).high
    assert [tick_label(value) for value in (0, 250, 12_000, 3_500_000, 0.0008, 0.25)] == [
        "0",
        "250",
        "12k",
        "3.5M",
        "8e-4",
        "0.25",
    ]


def test_reports_load_neither_torch_nor_aim_nor_matplotlib() -> None:
    modules = (
        "podtune.cli, podtune.report.compare.view, podtune.report.compare.comparison, "
        "podtune.report.runs.listing, podtune.report.runs.watch"
    )
    code = (
        f"import sys, {modules}; sys.exit(' '.join({{'torch', 'aim', 'matplotlib', 'rich', 'jinja2'}} & "
        "set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_running_mean_is_centred() -> None:
    assert running_mean([(0, 0.0), (1, 3.0), (2, 6.0), (3, 9.0)], 3) == [
        (0, 1.5),
        (1, 3.0),
        (2, 6.0),
        (3, 7.5),
    ]


def test_a_table_shows_the_same_figures_in_every_form() -> None:
    table = Table(
        [Column("name"), Column("loss", "right")],
        [["a|b", 1.23456], ["c", None]],
        best=frozenset({(0, 1)}),
        notes=["a note"],
    )
    assert table.text() == "name    loss\n────  ──────\na|b   1.235*\nc          –\n  a note"
    assert "| a\\|b | **1.235** |" in table.markdown()
    assert '<td class="right best">1.235</td>' in table.html()
    assert table.csv() == "name,loss\na|b,1.23456\nc,\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0.000"),
        (12345, "12,345"),
        (5120.4, "5,120"),
        (0.12345, "0.1235"),
        (1e-5, "1e-05"),
        (float("nan"), "nan"),
        (True, "yes"),
    ],
)
def test_numbers_show_four_significant_digits(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_the_loss_curve_is_a_png_of_the_run_and_nothing_for_a_run_without_losses(
    make_run: RunMaker, tmp_path: Path
) -> None:
    file = tmp_path / "loss.png"
    assert loss_curve_png(make_run("drawn"), file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not loss_curve_png(make_run("nothing", lines=[]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
