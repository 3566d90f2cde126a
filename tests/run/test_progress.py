"""What takes long says how far it is; what does not is silent."""

from __future__ import annotations

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
    advance = progress.progress("tokenising", 6000)
    for second in range(1, 31):
        clock[0] = float(second)
        advance(200)
    assert capsys.readouterr().err.splitlines() == [
        "podtune: tokenising: 2,000 of 6,000, 200/s, 20 s left",
        "podtune: tokenising: 4,000 of 6,000, 200/s, 10 s left",
    ]
