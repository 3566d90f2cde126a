"""A record in a log comes back exactly or not at all, whatever happened to the log."""

import copy
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podtune.run.collect import collect
from podtune.run.record import LINE_LENGTH, MARKER, emit_record, end_record, new_record


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
def test_lines_that_a_tool_wrapped_are_put_back(width: int, prefix: str) -> None:
    wrapped = [
        f"{prefix}{line[start : start + width]}\n"
        for line in TEXT.splitlines()
        for start in range(0, max(1, len(line)), width)
    ]
    assert collect(wrapped).records == [RECORD]


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


def test_a_forged_line_beside_the_true_one_does_not_win() -> None:
    lines = lines_of(TEXT)
    tag = lines[1].split()[2]
    forged = f"{MARKER} {tag} 1 {'A' * LINE_LENGTH}\n"
    assert collect([forged, *lines]).records == [RECORD]
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
