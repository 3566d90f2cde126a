"""What is counted is starts without progress, on the volume; and nothing in the counting changes a code."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from podtune.pod import retries as counting
from podtune.pod.retries import Retries
from podtune.run import checkpoint


def save(output: Path, step: int) -> None:
    staging_dir = output / checkpoint.SAVING / f"checkpoint-{step}"
    staging_dir.mkdir(parents=True)
    checkpoint.commit(staging_dir, output / staging_dir.name, step, {})


def start(output: Path, code: int | None, *, reaches: int = 0) -> int:
    """A start that ends with ``code``, None: with its whole container; the code that Kubernetes sees."""
    count = Retries(output, "run-master-0", 3)
    if ended := count.begin():
        return ended
    if reaches:
        save(output, reaches)
    return 137 if code is None else count.end(code)


def test_failures_without_progress_end_for_good_and_the_next_start_counts_anew(tmp_path: Path) -> None:
    assert [start(tmp_path, 170) for _ in range(5)] == [170, 170, 170, 75, 170]


def test_a_newer_checkpoint_starts_the_count_anew(tmp_path: Path) -> None:
    assert [start(tmp_path, 137, reaches=step) for step in range(20, 220, 20)] == [137] * 10
    assert [start(tmp_path, 137) for _ in range(4)] == [137, 137, 137, 75]


def test_deaths_of_the_whole_container_are_counted(tmp_path: Path) -> None:
    assert [start(tmp_path, None) for _ in range(5)] == [137, 137, 137, 137, 75]


def test_a_pod_that_gets_another_name_each_time_is_counted_by_its_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    ends = []
    for suffix in "abcd":
        monkeypatch.setenv("PODTUNE_POD_NAME", f"run-1-{suffix}")
        count = counting.retries(2)
        assert count
        ends.append(count.begin() or count.end(170))
    assert ends == [170, 170, 75, 170]


def test_being_asked_to_stop_is_nobodys_failure(tmp_path: Path) -> None:
    codes = [start(tmp_path, code) for code in (143, 130, 129) * 4]
    assert codes == [143, 130, 129] * 4
    assert start(tmp_path, 0) == 0
    assert not (tmp_path / ".retries" / "run-master-0").exists()


@pytest.mark.parametrize("content", ["\0\0", "", "7", '{"starts": "x"}', "[" * 9999])
def test_a_count_that_cannot_be_read_changes_no_code(tmp_path: Path, content: str) -> None:
    (tmp_path / ".retries").mkdir()
    (tmp_path / ".retries" / "run-master-0").write_text(content)
    assert start(tmp_path, 170) == 170


def test_an_output_folder_that_is_gone_or_cannot_be_written_changes_no_code(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert start(tmp_path / "file" / "run", 137) == 137
    (tmp_path / ".retries").symlink_to("/proc/nothing")
    assert start(tmp_path, 170) == 170


def test_a_volume_that_does_not_answer_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "ANSWER_S", 0.1)
    monkeypatch.setattr(counting, "write_atomically", lambda *_: threading.Event().wait())
    assert start(tmp_path, 137) == 137
