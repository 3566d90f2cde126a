"""Errors and warnings, as people and machines read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from podtune.run.errors import warn

PACKAGE = Path(__file__).parents[2] / "training" / "podtune"


def test_a_warning_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    warn("2 rows are empty")
    assert capsys.readouterr() == ("", "podtune: warning: 2 rows are empty\n")


def test_every_warning_goes_through_warn() -> None:
    own = [path.name for path in PACKAGE.rglob("*.py") if "warning: {" in path.read_text(encoding="utf-8")]
    assert own == ["errors.py"]
