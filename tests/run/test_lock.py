"""One lock between processes and pods: kept from the living, taken from the dead, whatever the clocks say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podtune.run import lock
from podtune.run.errors import PeerLost, UserError
from podtune.run.files import open_new, remove_parts, replacing, write_atomically
from podtune.run.lock import LOCK_FILE, claim, life, read_beat

FOREIGN = """
import json, os, select, sys, time
beats = 0
while not select.select([0], [], [], 0.02)[0]:
    beats += 1
    now = time.time() + float(sys.argv[2])
    content = {"time": now + beats, "step": 6, "step_at": now, "pid": 1, "host": "pod-on-another-node"}
    file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    os.pwrite(file, json.dumps(content | {"started": 1.0, "job": ""}).encode().ljust(500), 0)
    if beats == 1:
        print("beating", flush=True)
"""
CLAIM = """
import sys
from pathlib import Path
from podtune.run.lock import claim
lock = claim(Path(sys.argv[1]))
print("mine", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("clock_s", [86_400, 0, -86_400])
def test_a_foreign_heartbeat_that_moves_is_alive_whatever_its_clock_says(
    tmp_path: Path, clock_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mover = subprocess.Popen(
        [sys.executable, "-c", FOREIGN, str(tmp_path / LOCK_FILE), str(clock_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert mover.stdout
    assert mover.stdout.readline() == "beating\n"
    with pytest.raises(UserError, match="process 1 on pod-on-another-node, at step 6"):
        claim(tmp_path)
    mover.communicate("")
    monkeypatch.setattr(lock, "GONE_S", 0.3)
    claim(tmp_path).release()  # and a still one does not hold the folder


def test_the_last_attempt_of_the_same_job_is_waited_for_and_then_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODTUNE_JOB_NAME", "my-run")
    first = subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout
    assert first.stdout.readline() == "mine\n"
    with pytest.raises(PeerLost, match="last attempt has not ended"):
        claim(tmp_path, ending_s=0.1)
    monkeypatch.setenv("PODTUNE_JOB_NAME", "another-run")
    with pytest.raises(UserError, match="another job writes here"):
        claim(tmp_path)
    monkeypatch.setenv("PODTUNE_JOB_NAME", "my-run")
    first.kill()
    first.communicate()
    claim(tmp_path, ending_s=60).release()


def test_where_there_are_no_locks_of_the_kernel_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "GONE_S", 0.2)

    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    with claim(tmp_path):
        beat = json.loads((tmp_path / LOCK_FILE).read_text())
        command = [sys.executable, "-c", CLAIM, str(tmp_path)]
        assert "another job writes here" in subprocess.run(command, capture_output=True, text=True).stderr
    (tmp_path / LOCK_FILE).write_text(json.dumps(beat | {"host": "elsewhere"}))
    claim(tmp_path).release()


def test_a_live_process_of_this_host_is_never_called_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    file = tmp_path / LOCK_FILE
    with claim(tmp_path) as held:
        held.step(7)
        end = time.monotonic() + 20
        while (content := json.loads(file.read_text()))["step"] != 7:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert life(tmp_path) == "unknown"
    for hours in (-24, 24, 24 * 400):  # a frozen volume, a clock that was set
        file.write_text(json.dumps(content | {"time": time.time() + hours * 3600}))
        assert life(tmp_path) == "alive"
    assert (found := read_beat(tmp_path))
    assert (found.pid, found.step) == (os.getpid(), 7)
    file.write_text(json.dumps(content | {"started": 1.0}))
    assert life(tmp_path) == "dead", "a later process has the number"


def test_links_that_others_planted_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK_FILE).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic"):
        claim(run)
    (run / "run.json").symlink_to(precious)
    write_atomically(run / "run.json", "{}")  # replaces the link itself
    assert not (run / "run.json").is_symlink()
    (run / "new").symlink_to(precious)
    with pytest.raises(FileExistsError):
        open_new(run / "new")
    assert precious.read_text() == "precious"


def test_a_write_that_fails_leaves_the_old_content_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(TypeError), replacing(tmp_path / "a") as file:
        json.dump({"a": object}, file)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
    (tmp_path / ".a.0123456789abcdef.part").touch()  # of a writer that was killed
    remove_parts(tmp_path)
    assert os.listdir(tmp_path) == ["a"]


SILENT = """
import os, sys, threading, time
from pathlib import Path
from podtune.run.output_volume import watch_volume
with watch_volume(Path(sys.argv[1]), 0.5, interval_s=0.05):
    time.sleep(2)
    print("answers", os.listdir(sys.argv[1])[0].endswith(".part"), flush=True)
    os.fsync = lambda file: threading.Event().wait()
    time.sleep(60)
"""


def test_a_volume_that_stops_answering_ends_the_process_to_be_started_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SILENT, str(tmp_path)], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.returncode) == ("answers True\n", 170)
    assert "the volume has not answered" in done.stderr
