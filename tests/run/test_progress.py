"""What takes long says how far it is; what does not is silent."""

from __future__ import annotations

import io

import pytest

from podtune.run import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress("tokenising", 6000) as advance:
        for second in range(1, 31):
            clock[0] = float(second)
            advance(200)
    assert capsys.readouterr().err.splitlines() == [
        "podtune: tokenising: 2,000 of 6,000, 200/s, 20 s left",
        "podtune: tokenising: 4,000 of 6,000, 200/s, 10 s left",
    ]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    with progress.progress("tokenising", 10) as advance:
        advance(10)
    assert "tokenising" in terminal.getvalue()
    assert "10/10" in terminal.getvalue()
