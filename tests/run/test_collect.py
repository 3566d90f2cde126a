"""A record in a log comes back exactly or not at all, whatever happened to the log."""

import copy
import hashlib
import io
import json
import random
import subprocess
import sys
import time
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from podtune.run.collect import LINE_LENGTH, collect, emit_record
from podtune.run.errors import MARKER, UserError
from podtune.run.record import end_record, new_record, write_json


def a_record(name: str = "cell", noise: int = 9000) -> dict[str, Any]:
    """A finished record whose printed form takes several lines: random text does not compress."""
    letters = random.Random(name)
    record = new_record(
        mode="benchmark",
        name=name,
        config={"noise": "".join(chr(letters.randrange(33, 0x2000)) for _ in range(noise))},
    )
    record["measurements"] = {"tokens_per_s": 1234.5}
    return end_record(record, "ok", 0)


def printed(record: dict[str, Any]) -> str:
    stream = io.StringIO()
    emit_record(record, stream)
    return stream.getvalue()


RECORD = a_record()
TEXT = printed(RECORD)


def lines_of(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_a_printed_record_comes_back_exactly() -> None:
    assert TEXT.count("\n") > 5
    found = collect(lines_of(TEXT))
    assert found.records == [RECORD]
    assert found.damaged == []


def test_two_pods_merged_with_prefixes_timestamps_and_other_lines_between_give_both_records() -> None:
    other = a_record("other")
    streams = [
        [f"[pod/run-master-0/pytorch] 2026-11-21T02:00:00.123456789Z {line}" for line in lines_of(TEXT)],
        [
            (f"[pod/run-worker-0/pytorch] 2026-11-21T02:00:00.223456789Z {line}")
            for line in lines_of(printed(other))
        ],
        ["step 1 loss 2.5\n", "\x1b[32mok\x1b[0m done\n", "100%|####| 20/20\r\n"] * 5,
    ]
    dice = random.Random(1)
    merged = []
    while any(streams):
        merged.append(dice.choice([stream for stream in streams if stream]).pop(0))
    found = collect(merged)
    assert sorted(found.records, key=lambda record: record["name"]) == [RECORD, other]
    assert found.damaged == []


def test_the_same_record_in_two_logs_counts_once() -> None:
    assert collect(lines_of(TEXT + TEXT)).records == [RECORD]


@pytest.mark.parametrize("width", [80, 120, 1000, 4000])
@pytest.mark.parametrize("prefix", ["", "2026-11-21T02:00:00Z "])
def test_a_record_whose_lines_a_tool_wrapped_is_refused_and_named(width: int, prefix: str) -> None:
    wrapped = [
        f"{prefix}{line[start : start + width]}\n"
        for line in TEXT.splitlines()
        for start in range(0, max(1, len(line)), width)
    ]
    found = collect(wrapped)
    assert found.records == []
    reasons = " ".join(map(str, found.damaged))
    assert "wrapped" in reasons or "cut in two" in reasons


def test_docker_json_logs_are_read_as_they_are() -> None:
    logged = [
        json.dumps({"log": line, "stream": "stdout", "time": "2026-11-21T02:00:00Z"}) + "\n"
        for line in lines_of(TEXT)
    ]
    assert collect(logged).records == [RECORD]


def test_a_log_cut_off_anywhere_gives_the_exact_record_or_says_damaged() -> None:
    """Every place of the first and last lines, and a sample of the middle."""
    first_line_end, last_line = TEXT.index("\n", 1), TEXT.rindex(f"{MARKER} end")
    cuts = [
        *range(first_line_end + 40),
        *range(first_line_end, last_line, 997),
        *range(last_line - 40, len(TEXT)),
    ]
    for cut in cuts:
        found = collect(lines_of(TEXT[:cut]))
        assert found.records in ([], [RECORD]), cut
        if cut >= 5 and not found.records:  # before that nothing of the marker is there
            assert found.damaged, cut
        if cut < last_line - 1:
            assert found.records == [], cut


def test_a_changed_letter_anywhere_never_changes_the_record() -> None:
    dice = random.Random(2)
    for _ in range(300):
        place = dice.randrange(1, len(TEXT) - 1)
        letter = dice.choice("A7/+ =\nz0")
        found = collect(lines_of(TEXT[:place] + letter + TEXT[place + 1 :]))
        assert found.records in ([], [RECORD]), (place, letter)
        assert found.records or found.damaged, (place, letter)


def test_a_missing_line_is_counted() -> None:
    lines = lines_of(TEXT)
    found = collect([*lines[:3], *lines[4:]])
    assert found.records == []
    assert "1 of its" in str(found.damaged[0])


def test_lines_out_of_order_and_an_end_line_lost_to_rotation_do_not_matter() -> None:
    lines = lines_of(TEXT)[1:-1]
    assert collect([*reversed(lines[1:]), lines[0]]).records == [RECORD]


def test_a_forged_line_beside_the_true_one_is_damage() -> None:
    lines = lines_of(TEXT)
    tag = lines[1].split()[2]
    forged = f"{MARKER} {tag} 1 {'A' * LINE_LENGTH}\n"
    assert "forged" in str(collect([forged, *lines]).damaged[0])
    without_truth = [line for line in lines if f" {tag} 1 " not in line]
    assert collect([forged, *without_truth]).records == []


def test_a_begin_line_that_promises_too_little_or_another_checksum_is_damage() -> None:
    for old, new in (("bytes=", "bytes=1"), ("lines=", "lines=1"), ("sha256=", "sha256=0")):
        found = collect(lines_of(TEXT.replace(old, new)))
        assert found.records == []
        assert found.damaged


def test_other_figures_under_the_checksum_of_the_true_ones_are_damage() -> None:
    """Well-formed, of the right length, complete: only the checksum tells."""
    forged = copy.deepcopy(RECORD)
    forged["measurements"]["tokens_per_s"] = 9999.5
    true, false = lines_of(TEXT), lines_of(printed(forged))
    true_tag, false_tag = true[1].split()[2], false[1].split()[2]
    found = collect([true[1], *(line.replace(false_tag, true_tag) for line in false[2:])])
    assert found.records == []
    assert "checksum" in str(found.damaged[0])


def test_something_else_between_the_markers_is_no_record() -> None:
    found = collect(lines_of(printed({"schema": "podtune.run/99", "tokens_per_s": 1e9})))
    assert found.records == []
    assert "podtune.run/99" in str(found.damaged[0])


def test_the_command_writes_the_records_and_exits_65_naming_the_damaged(tmp_path: Path) -> None:
    log = tmp_path / "pod.log"
    log.write_bytes(b"\xff\xfe not text\n" + TEXT.encode() + printed(a_record("other"))[:-200].encode())
    command = [sys.executable, "-m", "podtune.cli", "collect", str(log)]
    result = subprocess.run([*command, "--output", str(tmp_path / "out")], capture_output=True, text=True)
    assert result.returncode == 65
    assert "damaged" in result.stderr
    (written,) = (tmp_path / "out").glob("*/run.json")
    assert json.loads(written.read_text()) == RECORD
    log.write_text(TEXT)
    assert subprocess.run(command, capture_output=True).returncode == 0
    log.write_text("nothing here\n")
    empty = subprocess.run(command, capture_output=True, text=True)
    assert empty.returncode == 65
    assert "missing" in empty.stderr


def header(tag: str, lines: int, size: int, digest: str = "") -> str:
    return f"{MARKER} begin {tag} lines={lines} bytes={size} sha256={(digest or tag).ljust(64, '0')}\n"


def test_a_log_made_to_exhaust_its_reader_costs_seconds_and_not_gigabytes() -> None:
    tag = "0123456789ab"
    bomb = b64encode(zlib.compress(b"[" + b"{}," * 21_000_000 + b"{}]", 9)).decode()
    chunks = [bomb[start : start + LINE_LENGTH] for start in range(0, len(bomb), LINE_LENGTH)]
    began = time.process_time()
    logs: list[list[str]] = [
        [header(tag, len(chunks), size), *(f"{MARKER} {tag} {n} {c}\n" for n, c in enumerate(chunks))]
        for size in (63_000_003, 4_000_000)
    ] + [[header(tag, 999_999, 10)]]
    for log in logs:
        assert collect(log).records == []
        assert collect(log).damaged
    assert time.process_time() - began < 20


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"schema": [[[' + b"[" * 5000, b'"\\ud800"'])
def test_a_record_that_is_no_json_object_is_damage_and_no_traceback(content: bytes) -> None:
    digest, packed = hashlib.sha256(content).hexdigest(), b64encode(zlib.compress(content)).decode()
    log = [header(digest[:12], 1, len(content), digest), f"{MARKER} {digest[:12]} 0 {packed}\n"]
    assert len(collect(log).damaged) == 1


def test_half_a_surrogate_pair_in_a_record_survives_the_way(tmp_path: Path) -> None:
    record = a_record() | {"reason": "cut \ud83d"}
    (again,) = collect(lines_of(printed(record))).records
    write_json(tmp_path / "run.json", again)
    assert json.loads((tmp_path / "run.json").read_text()) == record


def test_an_error_that_quotes_a_record_is_no_record() -> None:
    said = str(UserError(f"column '{TEXT}' is no text", where="data.jsonl"))
    assert "\n" not in said
    assert collect([said]).records == []


def test_the_command_replaces_no_other_record_and_follows_no_link(tmp_path: Path) -> None:
    log, out = tmp_path / "pod.log", tmp_path / "out"
    log.write_text(TEXT)
    command = [sys.executable, "-m", "podtune.cli", "collect", str(log), "--output", str(out)]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert subprocess.run(command, capture_output=True).returncode == 0  # the same one again
    (written,) = out.glob("*/run.json")
    # twelve digits of it can be hit on purpose
    assert len(written.parent.name.rpartition("-")[2]) == 64
    written.write_text(json.dumps(RECORD | {"status": "error"}))
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, "another record" in refused.stderr) == (73, True)
    written.unlink()
    written.parent.rmdir()
    written.parent.symlink_to(tmp_path)
    refused = subprocess.run(command, capture_output=True, text=True)
    assert (refused.returncode, "is a link" in refused.stderr) == (73, True)
