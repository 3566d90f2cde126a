"""A record of which a value is of the wrong kind is said to be odd, and ends nobody's view in a traceback."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from podtune.report.compare import view
from podtune.report.compare.comparison import compare
from podtune.report.compare.page import html_page
from podtune.report.runs import listing
from podtune.report.runs.runs import load_run
from podtune.report.runs.watch import watch
from podtune.run.errors import UserError
from podtune.run.record import METRICS_FILE, RUN_FILE

RunMaker = Callable[..., Path]
ODD = (None, [], {}, "x", "\ud800", 10**400, -1, True, {"a": [{}]}, [[1]], 1e308, "2026", [[]] * 3)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container below ``value`` with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def every_view(good: Path, odd: Path) -> None:
    runs = [load_run(good), load_run(odd)]
    found = compare(runs)
    json.dumps(found.as_json())
    view.text(found, width=80)
    html_page(found).encode()
    listing.table(listing.sort_rows(listing.list_runs(runs), "loss")).text(width=80)
    watch(lambda: load_run(odd), once=True)


def test_no_odd_value_of_a_record_or_a_line_ends_a_view(make_run: RunMaker) -> None:
    answers = {"answers": {"samples": [{"prompt": "a", "tuned": "b"}], "base": {"loss": 1.0}}}
    good, odd = make_run("good", steps=30), make_run("odd", steps=30, record={"attempts": [{"status": "ok"}]})
    record = json.loads((odd / RUN_FILE).read_text())
    record["measurements"] |= answers
    lines = [json.loads(line) for line in (odd / METRICS_FILE).read_text().splitlines()]
    dice = random.Random(7)
    for _ in range(30):
        content = json.loads(json.dumps([record, lines]))
        for _ in range(3):
            for part in content:
                container, key = dice.choice(list(places(part)))
                container[key] = dice.choice(ODD)
        spoiled, spoiled_lines = content
        (odd / RUN_FILE).write_text(json.dumps({**spoiled, "schema": record["schema"]}))
        (odd / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in spoiled_lines))
        with contextlib.suppress(UserError):
            every_view(good, odd)


def test_what_is_odd_in_a_record_is_said_and_the_rest_is_used(make_run: RunMaker) -> None:
    run = load_run(
        make_run("odd", record={"mode": [], "provenance": {"versions": "x"}, "world_size": 10**400})
    )
    assert [line.split(": ", 1)[1].split(" is ")[0] for line in run.problems] == [
        "mode",
        "world_size",
        "provenance.versions",
    ]
    assert (run.status, run.record["strategy"]) == ("ok", "ddp")
