"""A checkpoint is complete or invisible, and one that was damaged is never chosen."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import damage
from support.resume_keys import KEY

from podtune.run import checkpoint, output_volume
from podtune.run.errors import UserError, report
from podtune.run.manifest import MANIFEST, flushed_files

UMASK = os.umask(0o022)
os.umask(UMASK)
FACTS = KEY.facts() | {"tokens": 7}


def save(output: Path, step: int) -> Path:
    staging_dir = output / checkpoint.SAVING / f"checkpoint-{step}"
    (staging_dir / "nested").mkdir(parents=True)
    (staging_dir / "model.safetensors").write_bytes(bytes([step]) * 1000)
    (staging_dir / "nested" / "optimizer.pt").write_bytes(b"x" * 500)
    checkpoint.commit(staging_dir, output / staging_dir.name, step, FACTS)
    return output / staging_dir.name


def test_a_first_start_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path / "absent") == (None, [])


def test_the_newest_complete_checkpoint_is_found_with_what_it_was(tmp_path: Path) -> None:
    save(tmp_path, 9)
    save(tmp_path, 10)
    found, warnings = checkpoint.newest_complete(tmp_path)
    assert found is not None
    assert (found.step, found.facts, warnings) == (10, FACTS, [])


@pytest.mark.parametrize(
    "harm", ["missing", "truncated", "flipped", "no manifest", "torn manifest", "interrupted"]
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path, harm: str) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    weights, manifest = newest / "model.safetensors", newest / MANIFEST
    if harm == "missing":
        weights.unlink()
    elif harm == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif harm == "flipped":
        weights.write_bytes(b"\x00" + weights.read_bytes()[1:])
    elif harm == "no manifest":
        manifest.unlink()
    elif harm == "torn manifest":
        manifest.write_text(manifest.read_text()[:-20])
    else:
        newest.rename(tmp_path / checkpoint.SAVING / newest.name)
    found, warnings = checkpoint.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 1
    assert not (tmp_path / checkpoint.SAVING).exists()
    if harm != "interrupted":
        assert (tmp_path / "damaged-checkpoint-2").is_dir()
        assert "damaged" in warnings[0]


def test_when_every_checkpoint_is_damaged_the_run_stops_with_the_list(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"checkpoint-2: model\.safetensors is missing; checkpoint-1"):
        checkpoint.newest_complete(tmp_path)
    assert len(checkpoint.checkpoints(tmp_path)) == 2


def test_a_change_since_the_checkpoint_is_refused_unless_allowed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found, _ = checkpoint.newest_complete(tmp_path)
    assert found is not None
    changed = dataclasses.replace(KEY, world_size=4)
    with pytest.raises(UserError, match="world_size was 2 and is 4"):
        checkpoint.check_resume(found, changed, allowed=False)
    assert checkpoint.check_resume(found, changed, allowed=True) == ["world_size was 2 and is 4"]
    assert checkpoint.check_resume(found, KEY, allowed=False) == []


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step)
    checkpoint.rotate(tmp_path, 2, keep=tmp_path / "checkpoint-1")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-10"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        output_volume.check_writable(tmp_path / "file" / "output")


def test_looking_whether_a_folder_can_be_written_leaves_the_volume_as_it_was(tmp_path: Path) -> None:
    """Pods of one job look at the same time: none may take away a folder that another has just made."""
    output_volume.check_writable(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_volume_that_the_checkpoints_will_not_fit_on_is_refused_with_both_figures(tmp_path: Path) -> None:
    each = shutil.disk_usage(tmp_path).free // 2
    with pytest.raises(UserError, match=r"GiB are free and checkpoints of .* GiB need about .* GiB more"):
        output_volume.check_space(tmp_path, each, 2)
    output_volume.check_space(tmp_path, 2**20, 2)
    assert [output_volume.size_text(size) for size in (3 * 2**20, 1.5 * 2**30)] == ["3 MiB", "1.5 GiB"]


def test_checkpoints_that_are_there_count_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    each = sum(file.stat().st_size for file in (tmp_path / "checkpoint-1").rglob("*") if file.is_file())
    monkeypatch.setattr(output_volume.shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * each))
    output_volume.check_space(tmp_path, each, 2)
    with pytest.raises(UserError, match="are free and checkpoints"):
        output_volume.check_space(tmp_path, each, 3)


def test_a_full_disk_has_a_code_of_its_own_and_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError) as full, Path("/dev/full").open("w") as device:
        device.write("x")
    assert report(full.value) == 74
    assert "complete checkpoints are kept" in capsys.readouterr().err


def test_a_flipped_bit_anywhere_in_the_newest_checkpoint_is_seen(tmp_path: Path) -> None:
    newest, dice = save(tmp_path, 2), random.Random(3)
    for path in (newest / MANIFEST, newest / "model.safetensors"):
        content = path.read_bytes()
        for place in [*range(0, len(content), 7), *(dice.randrange(len(content)) for _ in range(100))]:
            flipped = bytearray(content)
            flipped[place] ^= 1 << dice.randrange(7)
            path.write_bytes(flipped)
            same = path.name == MANIFEST and _same_json(flipped, content)  # white space
            assert same or damage(newest), (
                path.name,
                place,
                flipped[max(0, place - 20) : place + 20],
            )
        path.write_bytes(content)
    assert damage(newest) == ""


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.parametrize(
    "manifest",
    [
        "[" * 5000,
        "[]",
        '{"files": {"a": "b"}, "step": "x", "facts": []}',
        '{"schema": "podtune.checkpoint/2", "files": {}, "step": "x", "facts": {}}',
        '{"schema": "podtune.checkpoint/2", "files": {}, "step": 18, "facts": {}}',
        '{"schema": "podtune.checkpoint/2", "files": {"a": {"cytes": 1}}, "step": 2, "facts": {}}',
    ],
)
def test_an_odd_manifest_is_damage_and_the_checkpoint_before_is_used(tmp_path: Path, manifest: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / MANIFEST).write_text(manifest)
    found, _ = checkpoint.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 1


def test_a_file_that_the_manifest_does_not_know_is_damage(tmp_path: Path) -> None:
    newest = save(tmp_path, 2)
    (newest / ".nfs0001").touch()
    assert damage(newest) == ""
    (newest / "rng_state_1.pth").touch()
    assert "rng_state_1.pth is not in its manifest" in damage(newest)


def test_a_kill_in_the_midst_of_a_deletion_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)

    def interrupted(path: Path, **_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            (path / "model.safetensors").unlink()

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    checkpoint.rotate(tmp_path, 2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-3"]


def test_a_link_among_a_checkpoints_files_is_not_read_and_every_user_may_read_the_rest(
    tmp_path: Path,
) -> None:
    staging_dir = tmp_path / checkpoint.SAVING / "checkpoint-1"
    staging_dir.mkdir(parents=True)
    (staging_dir / "model.safetensors").write_bytes(b"w")
    (staging_dir / "model.safetensors").chmod(0o600)  # as safetensors leaves it
    (staging_dir / "environment").symlink_to("/proc/self/environ")
    assert list(flushed_files(staging_dir)) == ["model.safetensors"]
    checkpoint.commit(staging_dir, tmp_path / "checkpoint-1", 1, FACTS)
    saved = tmp_path / "checkpoint-1"
    assert (saved / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~UMASK
    assert damage(saved) == "environment is not in its manifest"


def test_a_linked_checkpoint_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    elsewhere = save(tmp_path / "other", 9)
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "checkpoint-9").symlink_to(elsewhere)
    checkpoint.rotate(tmp_path, 2)
    found, _ = checkpoint.newest_complete(tmp_path)
    assert found is not None
    assert found.step == 3
    assert elsewhere.is_dir()
