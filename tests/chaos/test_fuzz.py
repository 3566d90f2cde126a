"""Damaged logs, records, metrics, manifests and counts: read exactly, or named; never wrong, never a
traceback.

``make chaos`` asks for 20,000 cases (PODTUNE_CHAOS_CASES); the suite takes a tenth with the same seed.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import damage

from podtune.run import checkpoint
from podtune.run.collect import collect, emit_record
from podtune.run.errors import MARKER
from podtune.run.follow import read_record
from podtune.run.lock import LOCK_FILE, life
from podtune.run.manifest import MANIFEST
from podtune.run.metrics_log import MetricsLog, read_metrics
from podtune.run.record import new_record

CASES = int(os.environ.get("PODTUNE_CHAOS_CASES", "2000"))
SEED = int(os.environ.get("PODTUNE_CHAOS_SEED", "1"))
Lines = list[str]


def cut(text: str, dice: random.Random) -> str:
    start = dice.randrange(len(text))
    return text[:start] + text[start + dice.randrange(1, 9000) :]


def flip(text: str, dice: random.Random) -> str:
    place = dice.randrange(len(text))
    return text[:place] + dice.choice('abzXYZ09+/=," \n\r\0\x1b{}[]é') + text[place + 1 :]


def double(text: str, dice: random.Random) -> str:
    return "".join(line for line in text.splitlines(keepends=True) for _ in range(1 + (dice.random() < 0.2)))


def drop(text: str, dice: random.Random) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if dice.random() > 0.05)


def shuffle(text: str, dice: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    dice.shuffle(lines)
    return "".join(lines)


def prefix(text: str, dice: random.Random) -> str:
    return "".join(f"2026-11-21T20:00:00Z stdout F {line}" for line in text.splitlines(keepends=True))


def carriage(text: str, dice: random.Random) -> str:
    return text.replace("\n", "\r\n")


def wrap(text: str, dice: random.Random) -> str:
    width = dice.choice([80, 120, 1000, 4000, 16384])
    rows = text.splitlines()
    return "".join(f"{row[at : at + width]}\n" for row in rows for at in range(0, max(1, len(row)), width))


HARMS: list[Callable[[str, random.Random], str]] = [
    *(cut, flip, double, drop, shuffle, prefix, carriage, wrap)
]


def harmed(text: str, dice: random.Random) -> str:
    for _ in range(dice.choice([1, 1, 2, 3])):
        text = dice.choice(HARMS)(text, dice) if text else text
    return text


def record(dice: random.Random, letters: int = 10) -> dict[str, Any]:
    noise = "".join(chr(dice.randrange(33, 0x2000)) for _ in range(letters))
    return new_record(mode="sft", name=f"run-{dice.random()}", config={"noise": noise})


def test_a_log_gives_back_the_exact_record_or_says_what_is_missing() -> None:
    dice = random.Random(SEED)
    pool = [record(dice, noise) for noise in (10, 10, 4000, 9000)]
    for case in range(CASES // 2):
        true = dice.sample(pool, dice.choice([1, 2]))
        stream = io.StringIO()
        for each in true:
            stream.write("step 1/2  loss 2.0\n")
            emit_record(each, stream)
        whole = stream.getvalue()
        log = harmed(whole, dice)
        found = collect(log.splitlines(keepends=True))
        assert all(each in true for each in found.records), case
        for tag, each in zip(re.findall("begin ([0-9a-f]{12})", whole), true, strict=True):
            left = re.search(rf"{MARKER} (begin |end )?{tag}", log)
            assert each in found.records or found.damaged or not left, case


def test_a_damaged_metrics_file_keeps_its_good_lines(tmp_path: Path) -> None:
    dice, path = random.Random(SEED + 1), tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 41):
        log.write("train", step, {"loss": dice.random(), "tokens": step * 100})
    log.close()
    text = path.read_text()
    whole = {json.dumps(entry, sort_keys=True) for entry in read_metrics(path)[0]}
    for case in range(CASES // 10):
        damaged = flip(text, dice)
        path.write_text(damaged)
        MetricsLog(path, from_step=40).close()
        kept = {json.dumps(entry, sort_keys=True) for entry in read_metrics(path)[0]}
        assert len(whole - kept) <= 2, case
        path.write_text(harmed(text, dice))
        read_metrics(path)


def test_a_damaged_manifest_is_seen_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    dice = random.Random(SEED + 2)
    for step in (1, 2):
        staging_dir = tmp_path / checkpoint.SAVING / f"checkpoint-{step}"
        staging_dir.mkdir(parents=True)
        (staging_dir / "model.safetensors").write_bytes(bytes(100))
        checkpoint.commit(
            staging_dir, tmp_path / staging_dir.name, step, {"learning_rate": 1e-3, "tokens": 7}
        )
    file = tmp_path / "checkpoint-2" / MANIFEST
    text = file.read_text()
    true = json.loads(text)
    for case in range(CASES // 5):
        damaged = flip(text, dice) if case % 2 else harmed(text, dice)
        file.write_text(damaged)
        try:
            same = json.loads(damaged) == true  # white space
        except ValueError:
            same = False
        assert same or damage(file.parent), damaged


def odd(value: Any, dice: random.Random) -> Any:
    """``value`` with one part of it of another kind."""
    kinds = [None, [], {}, "x", -1, 1e308, 10**400, True, "\ud83d", "\x1b]52;c;x\x07", [[[]]]]
    if not isinstance(value, dict) or not value or dice.random() < 0.1:
        return copy.deepcopy(dice.choice(kinds))
    name = dice.choice(list(value))
    return value | {name: odd(value[name], dice)}


def test_odd_records_and_heartbeats_are_no_tracebacks(tmp_path: Path) -> None:
    dice = random.Random(SEED + 3)
    beat = {"time": 1.0, "step": 1, "step_at": 1.0, "pid": 1, "host": "h", "started": 1.0, "job": ""}
    for _ in range(CASES // 5):
        (tmp_path / LOCK_FILE).write_text(json.dumps(odd(beat, dice)))
        life(tmp_path)
        (tmp_path / "run.json").write_text(json.dumps(odd(record(dice), dice)))
        read_record(tmp_path)


@pytest.mark.parametrize("text", ["", "\0" * 100, "[" * 10_000, "9" * 10_000])
def test_files_of_nothing_but_rot_are_no_tracebacks(tmp_path: Path, text: str) -> None:
    for name in (LOCK_FILE, "metrics.jsonl", "run.json"):
        (tmp_path / name).write_text(text)
    life(tmp_path)
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == []
