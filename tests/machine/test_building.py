"""A build that was killed holds up nobody, and two processes never build at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podtune.machine.building import sole_builder
from podtune.run.errors import UserError


def test_the_mark_of_a_build_that_was_killed_long_ago_is_taken_away(tmp_path: Path) -> None:
    mark = tmp_path / "lock"
    mark.touch()
    os.utime(mark, (time.time() - 500,) * 2)
    with sole_builder(tmp_path):
        assert not mark.exists()


def test_who_builds_is_waited_for_with_a_bound_and_forgotten_when_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from podtune.machine.building import sole_builder\n"
        "with sole_builder(Path(sys.argv[1])): print('builds', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "builds\n"
        with (
            pytest.raises(UserError, match=r"another process has been building") as caught,
            sole_builder(tmp_path, timeout_s=0.3),
        ):
            pass
        assert caught.value.code == 69
        other.kill()
    with sole_builder(tmp_path, timeout_s=30):
        pass
