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
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.report.draw.loss_png import loss_curve_png
from podtune.report.draw.page import Section, Text, Warnings, folded, markdown, page
from podtune.report.draw.plots import Bar, Bars, Lines, Series, figures, legend
from podtune.report.draw.tables import Column, Table, shown

RunMaker = Callable[..., Path]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Appended to a copy of the page: looks at what is drawn, points, presses and sorts as a reader would, and
# writes what it saw where --dump-dom shows it.
PROBE = """
<script>
const seen = { errors: window.podtuneErrors, wide: document.documentElement.scrollWidth > window.innerWidth };
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const lines = () => all(".plot").filter((plot) => plot.data[0].type === "scatter");
const wide = (path) => path.getBoundingClientRect().width > 20;
const drawn = (plot) => all(".scatterlayer .js-line", plot).filter(wide).length;
seen.charts = all(".chart").length;
seen.drawn = lines().map(drawn).join(" ");
seen.bars = all(".barlayer .point").length;
const press = (button) => { button.click(); return button.getAttribute("aria-pressed"); };
const run = document.querySelector(".legend [data-run]");
seen.off = [press(run), lines().map(drawn).join(" ")];
seen.on = [press(run), drawn(lines()[0])];
seen.failed = lines()[1].data.at(-1).name;
const controls = document.querySelector(".controls");
const axis = () => [document.querySelectorAll(".xtitle")[1].textContent, lines()[1].layout.yaxis.type];
seen.axes = [axis()];
controls.axis.value = "tokens"; controls.log.checked = true;
controls.dispatchEvent(new Event("input", { bubbles: true }));
seen.axes.push(axis());
seen.inside = all(".plot").every((plot) => plot.querySelector("svg").clientWidth <= plot.clientWidth + 1);
seen.data = JSON.parse(document.getElementById("podtune-data").textContent).schema;
document.body.setAttribute("data-seen", JSON.stringify(seen));
</script>
"""
CATCH = (
    "<script>window.podtuneErrors = []; window.addEventListener('error', (event) => "
    "window.podtuneErrors.push(event.message));</script>"
)


def source(script: str) -> str:
    """A script as a Content-Security-Policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def podtune(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def dumped(page: Path, tmp_path: Path, size: str = "1200,900", complains: str = "") -> str:
    """The page as a browser has it after its scripts; none of them may complain of anything else."""
    assert CHROMIUM
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *flags, f"--window-size={size}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert all(complains and complains in line for line in lines), done.stderr
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
    probe = PROBE.strip().removeprefix("<script>").removesuffix("</script>")
    text = text.replace("script-src ", f"script-src {source(probe)} ", 1).replace(
        "</body>", PROBE + "</body>"
    )
    probed.write_text(text.replace("<head>", "<head>" + CATCH, 1))
    shown = dumped(probed, tmp_path, size)
    match = re.search(r'data-seen="([^"]*)"', shown)
    assert match, shown[-2000:]
    assert json.loads(html.unescape(match.group(1))) == {
        "errors": [],
        "wide": False,
        "charts": 9,
        "drawn": "3 3 3 3 3 3 3 3",
        "bars": 3,
        "off": ["false", "2 2 2 2 2 2 2 2"],
        "on": ["true", 3],
        "failed": "nan: failed at 45: the loss is NaN",
        "axes": [["step", "linear"], ["tokens (real, all ranks)", "log"]],
        "inside": True,
        "data": "podtune.compare/1",
    }


def test_the_page_needs_no_network_and_may_not_use_it(compared: Path) -> None:
    from plotly.offline import get_plotlyjs

    text = compared.read_text()
    assert text.count(get_plotlyjs()) == 1
    own = text.replace(get_plotlyjs(), "")
    policy = re.search(r"default-src 'none'; script-src ([^;]*);", own)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert policy
    assert policy[1].split() == [source(script) for script in scripts], "nothing else may run"
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', own)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|EventSource|sendBeacon", own)
    assert "@import" not in own
    assert "url(" not in own
    assert "http" not in own.replace("http-equiv", "")


def test_every_chart_has_a_title_and_a_unit(compared: Path) -> None:
    charts = re.findall(r'<figure class="chart".*?</figure>', compared.read_text(), re.DOTALL)
    assert len(charts) == 9
    for chart in charts:
        assert re.search(r'<figcaption>[^<]+ <span class="unit">[^<]+</span>', chart)
        assert json.loads(re.search(r'<script type="application/json">(.*?)</script>', chart)[1])["data"]  # type: ignore[index]
    assert sum("nats per token</span>" in chart for chart in charts) == 2


def test_text_of_a_run_cannot_break_out_of_the_page() -> None:
    evil = "</script><script>alert(1)</script>\"'<b>&"
    curve = Series(evil, {"step": [1, 2]}, [1, 2], end=evil)
    chart = Lines(evil, evil, {"step": evil}, [curve], note=evil).html()
    chart += Bars(evil, evil, [evil], [Bar(evil, [1.0])]).html() + legend([evil])
    table = Table([Column(evil)], [[evil]], caption=evil, notes=[evil])
    sections = [Section("key", evil, [chart, table, Text(evil), Warnings([evil]), folded(evil, "")])]
    text = page(evil, sections, subtitle=evil, data={evil: evil}, footer=evil)
    assert "<script>alert" not in text
    assert text.count("</script>") == 5  # of two charts, of the data, Plotly's and the page's own
    assert not re.search(r"(?<!\\)<", markdown(evil, sections, subtitle=evil))


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")
def test_what_the_script_draws_of_a_runs_text_is_text(make_run: RunMaker, tmp_path: Path) -> None:
    evil = '<img src=x onerror="document.body.dataset.evil=1">\''
    runs = [make_run(name, record={"name": name + evil, "reason": evil}, status="error") for name in "ab"]
    file = tmp_path / "evil.html"
    podtune("compare", *map(str, runs), "--html", str(file))
    shown = dumped(file, tmp_path)
    assert "data-evil" not in shown
    added = "<script>document.body.dataset.evil = 1</script>" + evil
    file.write_text(file.read_text().replace("<main", added + "<main", 1))
    assert "data-evil" not in dumped(file, tmp_path, complains="Content Security Policy")
    assert "<img" not in re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)


def test_a_chart_of_nothing_is_left_out() -> None:
    assert figures([Lines("t", "y", {"step": "x"}, [Series("a", {}, [])])]) == ""
    assert figures([Bars("t", "y", ["s"], [Bar("a", [None])])]) == ""


def test_a_long_curve_is_drawn_by_the_means_of_its_stretches_with_their_extremes() -> None:
    values = [float(index % 7) for index in range(10_000)]
    values[5000] = 99.0
    faint, drawn = Series("a", {"step": list(range(10_000))}, values).traces()
    assert len(drawn.y) == len(drawn.meta["step"]) == 295
    assert drawn.meta["step"][-1] == 9999
    assert (min(faint.y), max(faint.y), len(faint.y)) == (0, 99, 590)
    (short,) = Series("a", {"step": [1, 2]}, [0.123456789, 2.0]).traces()
    assert short.y == (0.123457, 2)


def test_reports_load_neither_torch_nor_aim_nor_what_draws() -> None:
    modules = (
        "podtune.cli, podtune.report.compare.page, podtune.report.compare.comparison, "
        "podtune.report.runs.listing, podtune.report.runs.watch"
    )
    code = (
        f"import sys, {modules}; "
        "sys.exit(' '.join({'torch', 'aim', 'matplotlib', 'plotly', 'rich', 'jinja2'} & "
        "set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_table_shows_the_same_figures_in_every_form() -> None:
    table = Table(
        [Column("name"), Column("loss", "right")],
        [["a|b", 1.23456], ["c", None]],
        best=frozenset({(0, 1)}),
        notes=["a note"],
        links=["./a", "./c"],
    )
    assert table.text() == "name    loss\n────  ──────\na|b   1.235*\nc          –\n  a note"
    assert "| [a\\|b](./a) | **1.235** |" in table.markdown()
    assert '<th scope="row" class="left"><a href="./a">a|b</a></th>' in table.html()
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


def test_half_a_surrogate_pair_ends_no_page() -> None:
    assert page("\ud800", []).encode()


def test_the_loss_curve_is_a_png_of_the_run_and_nothing_for_a_run_without_losses(
    make_run: RunMaker, tmp_path: Path
) -> None:
    file = tmp_path / "loss.png"
    assert loss_curve_png(make_run("drawn"), file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not loss_curve_png(make_run("nothing", lines=[]), tmp_path / "none.png")
    (victim := tmp_path / "victim").write_text("mine")
    (link := tmp_path / "link.png").symlink_to(victim)
    assert loss_curve_png(tmp_path / "drawn", link)
    assert victim.read_text() == "mine"
    assert not (tmp_path / "none.png").exists()
