"""CIFAR-10: both archives hold the same images, every epoch every row, and a model learns to name them."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from podtune.bench.case import cifar10
from podtune.bench.case.command_line import read_options
from podtune.bench.case.data import open_rows, open_test_rows
from podtune.bench.case.run import CaseRun
from podtune.bench.case.train import train
from podtune.cli import app
from podtune.run.errors import UserError
from podtune.run.world import World


def archive(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file


@pytest.fixture
def archives(tmp_path: Path) -> dict[str, Path]:
    """The python and the binary archive of the same 12 images."""
    generator = np.random.default_rng(0)
    python, binary = {}, {}
    for name, rows in {"data_batch_1": 4, "data_batch_2": 4, "test_batch": 4}.items():
        labels = generator.integers(10, size=rows, dtype=np.uint8)
        pixels = generator.integers(256, size=(rows, 3072), dtype=np.uint8)
        batch = {b"labels": labels.tolist(), b"data": pixels, b"batch_label": name.encode()}
        python[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=4)
        binary[f"cifar-10-batches-bin/{name}.bin"] = np.column_stack([labels, pixels]).tobytes()
    python["cifar-10-batches-py/batches.meta"] = binary["cifar-10-batches-bin/readme.html"] = b"text"
    made = {"python": python, "binary": binary}
    return {kind: archive(tmp_path / f"{kind}.tar.gz", members) for kind, members in made.items()}


def run_of(folder: Path, *words: str) -> CaseRun:
    fixed = ["--model", "resnet18-cifar", "--width", "32", "--strategy", "single", "--data", str(folder)]
    options, size, _ = read_options([*fixed, "--cpu", "--epochs", "1", *words], World())
    return CaseRun(options, size, World())


def test_the_python_and_the_binary_archive_hold_the_same_images(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    for kind, file in archives.items():
        words = ["data", "cifar10", "--archive", str(file), "--output", str(tmp_path / kind)]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        assert "train 8 images, test 4 images" in done.output
    one, other = ((tmp_path / kind / cifar10.FILE).read_bytes() for kind in archives)
    assert one == other


def test_the_test_split_is_normalised_and_never_cropped(archives: dict[str, Path], tmp_path: Path) -> None:
    splits = cifar10.read_archive(archives["python"])
    cifar10.write(tmp_path, splits)
    images, labels = splits["test"]
    batch = cifar10.Cifar10(tmp_path, "test", seed=0).batch(range(5))
    assert torch.equal(batch.targets, torch.tensor([*labels, labels[0]]))  # the fifth is the first again
    for channel, (mean, std) in enumerate(zip(cifar10.MEAN, cifar10.STD, strict=True)):
        restored = (batch.inputs[:4, channel] * std + mean) * 255
        assert torch.allclose(restored, images[:, channel].float(), atol=1e-3)


def test_an_epoch_has_every_row_once_and_another_order_and_crop_than_the_next(
    archives: dict[str, Path], tmp_path: Path
) -> None:
    cifar10.write(tmp_path, cifar10.read_archive(archives["binary"]))
    rows = cifar10.Cifar10(tmp_path, "train", seed=0)
    rows.labels = torch.arange(8)
    first, second = rows.batch(range(8)), rows.batch(range(8, 16))
    assert sorted(first.targets.tolist()) == sorted(second.targets.tolist()) == list(range(8))
    assert first.targets.tolist() != second.targets.tolist()
    assert torch.equal(rows.batch(range(6, 10)).inputs, torch.cat([first.inputs[6:], second.inputs[:2]]))
    again = second.inputs[second.targets.argsort()]
    assert not any(map(torch.equal, first.inputs[first.targets.argsort()], again))


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"data_batch_1": pickle.dumps(Evil())}, "system, which CIFAR-10 does not"),
        ({"data_batch_1.bin": b"12"}, "cannot be read as CIFAR-10"),
        ({"data_batch_1.bin": bytes([10] * 3073)}, "labels above 9"),
        ({"data_batch_1": pickle.dumps([1])}, "cannot be read as CIFAR-10"),
        ({"readme": b""}, "give cifar-10-python.tar.gz"),
    ],
)
def test_what_is_not_the_archive_is_refused_and_runs_no_code(
    members: dict[str, bytes], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        cifar10.read_archive(archive(tmp_path / "other.tar.gz", members))


def test_a_model_of_other_images_is_refused(tmp_path: Path) -> None:
    cifar10.write(tmp_path, cifar10.make(10))
    with pytest.raises(UserError, match="resnet18-cifar"):
        run_of(tmp_path, "--model", "resnet50", "--width", "64")


def test_a_narrow_resnet_learns_made_images_in_an_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cifar10.write(tmp_path, cifar10.make(256))
    run = run_of(tmp_path, "--norm", "batch")
    trained = train(run)
    assert trained.accuracy is not None
    assert trained.accuracy > 0.6
    assert trained.accuracy_by_epoch == (trained.accuracy,)
    assert (
        f"epoch 1 of 1: loss {trained.loss:.4f}, accuracy {trained.accuracy:.1%}" in capsys.readouterr().out
    )


def test_synthetic_rows_have_a_test_split_that_no_training_comes_to() -> None:
    for model in ("tinygpt-test", "resnet18-cifar"):
        options, size, _ = read_options(["--model", model, "--strategy", "single"], World())
        rows, test = open_rows(options, size), open_test_rows(options, size)
        assert test is not None
        assert not torch.equal(rows.batch(range(4)).inputs, test.batch(range(4)).inputs)
