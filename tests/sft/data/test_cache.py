"""One process makes an entry of the token cache, the others wait for it within a bound, and a dead one's lock
is taken over.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from podtune.run import lock
from podtune.run.errors import CANNOT_CREATE, UNAVAILABLE, UserError
from podtune.sft.data import cache

MAKER = """
import os, sys
from pathlib import Path
from podtune.sft.data import cache
folder, log = Path(sys.argv[1]), sys.argv[2]
def make(path):
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\\n")
    path.write_bytes(b"tokens" * 100_000)
    return {"rows": 1}
path, info, was_there = cache.get_or_make(folder, "key", make, wait_s=60)
assert path.stat().st_size == 600_000, "half an entry was seen"
print(info["rows"], was_there)
"""


def make(path: Path) -> cache.Info:
    path.write_bytes(b"tokens")
    return {"rows": 1}


def test_of_many_processes_one_does_the_work_and_all_get_it(tmp_path: Path) -> None:
    log = tmp_path / "made"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MAKER, str(tmp_path / "cache"), str(log)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    answers = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert sorted(answers) == [["1", "False"], *[["1", "True"]] * 3]
    assert len(log.read_text().split()) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key"]


def test_a_dead_process_s_lock_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "GONE_S", 0.3)
    (tmp_path / "key.lock").write_text(json.dumps({"host": "gone", "pid": 1}))
    _, _, was_there = cache.get_or_make(tmp_path, "key", make, wait_s=20)
    assert not was_there
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_living_process_s_lock_is_waited_for_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "GONE_S", 0.5)
    monkeypatch.setattr(lock, "BEAT_S", 0.05)
    with lock.hold(tmp_path / "key.lock", until=lambda: False, wait_s=1, what="preparing") as held:
        assert held
        with pytest.raises(UserError, match=f"process {os.getpid()} on") as refusal:
            cache.get_or_make(tmp_path, "key", make, wait_s=2)
    assert refusal.value.code == UNAVAILABLE
    assert "podtune data prepare" in refusal.value.fix


def test_those_who_wait_go_on_as_soon_as_the_entry_is_there(tmp_path: Path) -> None:
    entered, finish = threading.Event(), threading.Event()

    def slow(path: Path) -> cache.Info:
        entered.set()
        assert finish.wait(60)
        return make(path)

    first = threading.Thread(target=cache.get_or_make, args=(tmp_path, "key", slow))
    first.start()
    assert entered.wait(60)
    found: list[bool] = []
    second = threading.Thread(
        target=lambda: found.append(cache.get_or_make(tmp_path, "key", make, wait_s=60)[2])
    )
    second.start()
    finish.set()
    first.join(60)
    second.join(60)
    assert found == [True]


def test_work_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(path: Path) -> cache.Info:
        path.write_bytes(b"half")
        raise UserError("a bad row")

    with pytest.raises(UserError, match="a bad row"):
        cache.get_or_make(tmp_path, "key", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written") as refusal:
        cache.get_or_make(tmp_path / "file" / "cache", "key", make)
    assert refusal.value.code == CANNOT_CREATE
    assert "--tokenized_cache" in refusal.value.fix


def test_what_a_killed_writer_left_is_taken_away_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".key.01234567.part").mkdir()
    (tmp_path / ".other.01234567.part").mkdir()  # its writer may live
    cache.get_or_make(tmp_path, "key", make)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.01234567.part", "key"]
