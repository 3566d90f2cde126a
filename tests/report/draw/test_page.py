"""The HTML page: self-contained, safe with any text, and, in a real browser, drawn without errors and
operable.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.report.draw.page import Section, folded, page, paragraph
from podtune.report.draw.plots import Bar, Bars, Lines, Series, loss_curve_png, running_mean
from podtune.report.draw.tables import Column, Table, shown

RunMaker = Callable[..., Path]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Appended to a copy of the page: looks at what is drawn, points, presses and sorts as a reader would, and
# writes what it saw where --dump-dom shows it.
PROBE = """
<script>
const seen = { errors: window.podtuneErrors, wide: document.documentElement.scrollWidth > window.innerWidth };
const charts = [...document.querySelectorAll(".chart")];
const all = (selector) => [...document.querySelectorAll(selector)];
const lines = () => all("svg.plot").filter((plot) => plot.querySelector("polyline"));
const drawn = (plot) => [...plot.querySelectorAll(".series")].filter((series) => {
  const box = series.getBoundingClientRect();
  return box.width > 20 && getComputedStyle(series.querySelector("polyline")).stroke !== "none";
}).length;
seen.charts = charts.length;
seen.drawn = lines().map(drawn).join(" ");
seen.bars = document.querySelectorAll(".series rect").length;
const press = (button) => { button.click(); return button.getAttribute("aria-pressed"); };
const runs = document.querySelectorAll(".all-runs [data-run]");
seen.off = [press(runs[0]), lines().map(drawn).join(" ")];
seen.on = [press(runs[0]), drawn(lines()[0])];
seen.failed = lines()[1].querySelector(".cross title").textContent;
const place = lines()[1].getBoundingClientRect();
const at = { clientX: place.left + place.width / 2, clientY: place.top + 50, bubbles: true };
lines()[1].dispatchEvent(new PointerEvent("pointermove", at));
seen.readout = document.querySelector(".readout:not([hidden])").innerText.split("\\n").length;
seen.crosshairs = [...document.querySelectorAll(".crosshair line")].length;
const controls = document.querySelector(".controls");
const axis = () => lines()[1].querySelector(".axis").textContent;
controls.axis.value = "tokens"; controls.log.checked = true; controls.smooth.value = "10";
controls.dispatchEvent(new Event("input", { bubbles: true }));
seen.axis = axis();
const names = () => all(".runs tbody th").map((cell) => cell.innerText.trim().split(" ").pop());
const heads = document.querySelectorAll(".runs thead th");
heads[2].click(); seen.sorted = names();
heads[2].click(); seen.reversed = names();
press(document.querySelector('.runs [data-run="1"] [data-pin]')); seen.pinned = names()[0];
seen.data = JSON.parse(document.getElementById("podtune-data").textContent).schema;
document.body.setAttribute("data-seen", JSON.stringify(seen));
</script>
"""
CATCH = (
    "<script>window.podtuneErrors = []; window.addEventListener('error', (event) => "
    "window.podtuneErrors.push(event.message));</script>"
)


def podtune(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def dumped(page: Path, tmp_path: Path, size: str = "1200,900") -> str:
    """The page as a browser has it after its scripts; none of them may complain."""
    assert CHROMIUM
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *flags, f"--window-size={size}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture
def compared(make_run: RunMaker, tmp_path: Path) -> Path:
    file = tmp_path / "compare.html"
    failed = {"reason": "the loss is NaN"}
    folders = [
        make_run("lr-1e-3"),
        make_run("lr-3e-4", learning_rate=3e-4),
        make_run("nan", learning_rate=1e-4, steps=45, status="error", record=failed),
    ]
    assert podtune("compare", *map(str, folders), "--html", str(file)).exit_code == 0
    return file


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("size", ["1200,900", "400,900"])
def test_in_a_browser_the_page_draws_its_curves_and_does_what_a_reader_asks_of_it(
    compared: Path, tmp_path: Path, size: str
) -> None:
    text = compared.read_text()
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("<head>", "<head>" + CATCH, 1).replace("</body>", PROBE + "</body>"))
    shown = dumped(probed, tmp_path, size)
    match = re.search(r'data-seen="([^"]*)"', shown)
    assert match, shown[-2000:]
    assert json.loads(html.unescape(match.group(1))) == {
        "errors": [],
        "wide": False,
        "charts": 9,
        "drawn": " ".join(["3"] * 8),
        "bars": 3,
        "off": ["false", " ".join(["2"] * 8)],
        "on": ["true", 3],
        "failed": "nan: failed at 45: the loss is NaN",
        "readout": 4,
        "crosshairs": 8,
        "axis": "tokens (real, all ranks)",
        "sorted": ["lr-1e-3", "lr-3e-4", "nan"],
        "reversed": ["nan", "lr-3e-4", "lr-1e-3"],
        "pinned": "lr-3e-4",
        "data": "podtune.compare/1",
    }


def test_the_page_needs_no_network(compared: Path) -> None:
    text = compared.read_text()
    markup = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', markup)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|EventSource|sendBeacon", text)
    assert "@import" not in text
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_every_chart_has_a_title_a_unit_and_its_figures_in_a_table(compared: Path) -> None:
    charts = re.findall(r'<figure class="chart".*?</figure>', compared.read_text(), re.DOTALL)
    assert len(charts) == 9
    for chart in charts:
        data = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', chart)[1]))  # type: ignore[index]
        assert data["title"] in chart
        assert data.get("y") or data["unit"]
        assert "<details><summary>Figures</summary>" in chart
    assert sum("nats per token</span>" in chart for chart in charts) == 2


def test_text_of_a_run_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>\"'<b>&"
    curve = Series(evil, {"step": [1, 2]}, [1, 2], end=evil)
    chart = Lines(evil, evil, evil, {"step": evil}, [curve], note=evil).html()
    chart += Bars(evil, evil, evil, [evil], [Bar(evil, [1.0], href=evil)]).html()
    table = Table([Column(evil)], [[evil]], caption=evil, notes=[evil]).html()
    text = page(
        evil,
        subtitle=evil,
        sections=[Section("key", evil, [chart, table, paragraph(evil), folded(evil, "")])],
        data={evil: evil},
        footer=evil,
    )
    assert "<script>alert" not in text
    assert text.count("</script>") == 2  # the data's and the page's own


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
def test_what_the_script_draws_of_a_runs_text_is_text(make_run: RunMaker, tmp_path: Path) -> None:
    evil = '<img src=x onerror="document.body.dataset.evil=1">\''
    runs = [make_run(name, record={"name": name + evil, "reason": evil}, status="error") for name in "ab"]
    file = tmp_path / "evil.html"
    podtune("compare", *map(str, runs), "--html", str(file))
    shown = dumped(file, tmp_path)
    assert "data-evil" not in shown
    assert "<img" not in re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)


def test_a_chart_of_nothing_says_so() -> None:
    assert "No run recorded this." in Lines("n", "t", "y", {"step": "x"}, [Series("a", {}, [])]).html()
    assert "No run recorded this." in Bars("n", "t", "y", ["s"], [Bar("a", [None])]).html()


def test_a_long_curve_is_drawn_by_the_means_of_its_stretches_with_their_extremes() -> None:
    values = [float(index % 7) for index in range(10_000)]
    values[5000] = 99.0
    drawn = Series("a", {"step": list(range(10_000))}, values).drawn()
    assert len(drawn["y"]) == len(drawn["x"]["step"]) == 400
    assert (max(drawn["high"]), drawn["x"]["step"][-1]) == (99.0, 9999)
    assert all(
        low <= mean <= high for low, mean, high in zip(drawn["low"], drawn["y"], drawn["high"], strict=True)
    )
    assert Series("a", {"step": [1, 2]}, [0.123456789, 2.0]).drawn()["y"] == [0.123457, 2]


def test_curves_that_hide_each_other_are_named() -> None:
    curves = [Series(name, {"step": [1]}, [value]) for name, value in (("a", 1.0), ("b", 2.0), ("c", 1.0))]
    assert "Equal, one upon the other: a, c." in Lines("n", "t", "y", {"step": "x"}, curves).html()


def test_reports_load_neither_torch_nor_aim_nor_matplotlib() -> None:
    modules = (
        "podtune.cli, podtune.report.compare.page, podtune.report.compare.comparison, "
        "podtune.report.runs.listing, podtune.report.runs.watch"
    )
    code = (
        f"import sys, {modules}; sys.exit(' '.join({{'torch', 'aim', 'matplotlib', 'rich', 'jinja2'}} & "
        "set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_running_mean_is_centred() -> None:
    assert running_mean([0.0, 3.0, 6.0, 9.0], 3) == [1.5, 3.0, 6.0, 7.5]


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
