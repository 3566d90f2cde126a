"""Errors and warnings, as people and machines read them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from podtune.run import output_volume
from podtune.run.errors import IO, PEER_LOST, ConfigError, PeerLost, Unavailable, UserError, exit_code, warn

PACKAGE = Path(__file__).parents[2] / "training" / "podtune"


def test_a_warning_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    warn("2 rows are empty")
    assert capsys.readouterr() == ("", "podtune: warning: 2 rows are empty\n")


def test_every_warning_goes_through_warn() -> None:
    own = [path.name for path in PACKAGE.rglob("*.py") if "warning: {" in path.read_text(encoding="utf-8")]
    assert own == ["errors.py"]


def test_an_error_has_the_code_of_its_class_or_of_its_base() -> None:
    class Silent(Unavailable):
        """A service that does not answer."""

    assert (Silent("x").code, ConfigError("x").code, UserError("x", code=3).code) == (69, 78, 3)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/out/a"), PEER_LOST),
        (OSError(errno.EIO, "Input/output error", "/out/a"), PEER_LOST),
        (OSError(errno.ESTALE, "Stale file handle", "/out/a"), PEER_LOST),
        (OSError(errno.ETIMEDOUT, "Connection timed out", "/out/a"), PEER_LOST),
        (OSError(errno.ENOSPC, "No space left on device", "/out/a"), IO),
        (RuntimeError("Error while serializing: I/O error: Input/output error (os error 5)"), PEER_LOST),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), PEER_LOST),
        (RuntimeError("DataLoader worker (pid 71) is killed by signal: Bus error. "), 1),
        (OSError(errno.ENOENT, "No such file or directory", "/out/a"), 1),
        (UserError("Read-only file system"), 78),
    ],
)
def test_faults_of_the_platform_are_retried_and_those_of_the_user_are_final(
    error: BaseException, code: int
) -> None:
    assert exit_code(error) == code


def test_a_volume_that_held_checkpoints_and_cannot_be_written_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/out/a")

    monkeypatch.setattr(Path, "write_bytes", read_only)
    with pytest.raises(UserError, match="Read-only"):
        output_volume.check_writable(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(PeerLost, match="at the moment"):
        output_volume.check_writable(tmp_path)


def test_a_terminal_sees_life_while_something_works_and_a_pipe_its_one_line() -> None:
    code = (
        "import time\nfrom podtune.run.errors import working\n"
        "with working('counting [1]'):\n    time.sleep(0.5)\n    print('one')\nprint('two')"
    )
    ours, theirs = os.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert done.stdout == "one\ntwo\n"
    assert shown.count("podtune: counting [1] ...") > 2  # a spinner that turns
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (piped.stdout, piped.stderr) == ("one\ntwo\n", "podtune: counting [1] ...\n")


def test_a_command_that_is_printed_beside_a_spinner_stays_one_line() -> None:
    code = (
        "from podtune.run.errors import working\nwith working('x'):\n    print('podtune watch ' + 'd' * 300)"
    )
    ours, theirs = os.openpty()
    subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "podtune watch " + "d" * 300 in shown
