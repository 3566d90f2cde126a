"""CIFAR-10 (Krizhevsky 2009): its archives as one file of bytes, and the rows that are trained on.

``podtune data cifar10`` writes the file, ``--data DIR`` reads it. No torchvision is needed but to download.
"""

from __future__ import annotations

import functools
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from podtune.bench.strategies.contract import Batch
from podtune.run.errors import DataError, Unavailable

FILE = "cifar10.safetensors"
CLASSES, SIDE = 10, 32
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training split's channels
PADDING = 4  # black pixels around an image before a crop (He et al. 2015, section 4.2)
Split = Literal["train", "test"]
ARRAYS = {"_reconstruct", "ndarray", "dtype"}  # what the python archive's pickles are made of


class Cifar10:
    """Rows of one split by number; those to train on are shuffled every epoch, cropped and flipped."""

    def __init__(self, folder: Path, split: Split, seed: int) -> None:
        try:
            tensors = load_file(folder / FILE)
            images, self.labels = tensors[f"{split}.images"], tensors[f"{split}.labels"].long()
        except (OSError, SafetensorError, KeyError) as error:
            raise DataError(
                f"cannot be read: {error}", where=str(folder / FILE), fix="podtune data cifar10 --output DIR"
            ) from None
        self.rows, self.seed, self.trains = len(images), seed, split == "train"
        self.images = torch.nn.functional.pad(images, [PADDING] * 4) if self.trains else images

    def batch(self, numbers: range) -> Batch:
        """Images (rows, 3, 32, 32), normalised by channel, and class numbers (rows,)."""
        if self.trains:
            chosen = [
                int(_shuffled(self.rows, self.seed, number // self.rows)[number % self.rows])
                for number in numbers
            ]
            pixels = torch.stack([self._augmented(*row) for row in zip(chosen, numbers, strict=True)])
        else:
            chosen = [number % self.rows for number in numbers]
            pixels = self.images[chosen]
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return Batch((pixels / 255 - mean) / std, self.labels[chosen])

    def _augmented(self, index: int, number: int) -> Tensor:
        """One of 81 crops, flipped or not, by the seed and the row's number alone."""
        top, left, flip = torch.randint(
            2 * (2 * PADDING + 1), (3,), generator=generator_of(self.seed, number)
        ).tolist()
        top, left = top % (2 * PADDING + 1), left % (2 * PADDING + 1)
        image = self.images[index, :, top : top + SIDE, left : left + SIDE]
        return image.flip(2) if flip % 2 else image


def generator_of(seed: int, number: int) -> torch.Generator:
    """A generator of its own for each row, so that no rank needs another's."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


@functools.lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def _shuffled(rows: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(rows, generator=generator_of(seed, -1 - epoch))


def write(folder: Path, splits: dict[Split, tuple[Tensor, Tensor]]) -> Path:
    """Write the file: of each split images (rows, 3, 32, 32) and labels (rows,), as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for split, (images, labels) in splits.items():
        tensors[f"{split}.images"] = images.to(torch.uint8).contiguous()
        tensors[f"{split}.labels"] = labels.to(torch.uint8).contiguous()
    save_file(tensors, folder / FILE)
    return folder / FILE


def read_archive(file: Path) -> dict[Split, tuple[Tensor, Tensor]]:
    """Both splits of the python or the binary archive, as its site has them.

    Raises:
        UserError: not an archive of CIFAR-10, or a damaged one.
    """
    parts: dict[Split, list[np.ndarray[Any, Any]]] = {"train": [], "test": []}
    try:
        with tarfile.open(file) as archive:
            for member in sorted(archive.getmembers(), key=lambda each: each.name):
                name = Path(member.name).name
                stream = archive.extractfile(member) if "_batch" in name else None
                if stream is not None:
                    read = _binary if name.endswith(".bin") else _pickled
                    records = read(stream.read())
                    if records.shape[1] != 1 + 3 * SIDE * SIDE or records[:, 0].max() >= CLASSES:
                        raise ValueError(f"{name} has images of another size, or labels above 9")
                    parts["test" if name.startswith("test") else "train"].append(records)
    except Exception as error:  # a damaged archive or pickle can end in any error
        raise DataError(f"cannot be read as CIFAR-10: {error}", where=str(file)) from None
    if not all(parts.values()):
        raise DataError(
            "holds no data_batch and test_batch",
            where=str(file),
            fix="give cifar-10-python.tar.gz or cifar-10-binary.tar.gz",
        )
    return {split: _tensors(np.concatenate(records)) for split, records in parts.items()}


def make(rows: int) -> dict[Split, tuple[Tensor, Tensor]]:
    """Images that can be learned, where there is no archive: a class is a coarse pattern of colours.

    ``rows`` to train on, and a fifth as many to test with. Patterns are symmetric, so that a flip keeps the
    class.
    """
    half = torch.randn(CLASSES, 3, 2, 1, generator=generator_of(0, 0))
    patterns = torch.cat([half, half.flip(3)], dim=3)
    splits: dict[Split, tuple[Tensor, Tensor]] = {}
    for number, (split, count) in enumerate({"train": rows, "test": max(1, rows // 5)}.items()):
        generator = generator_of(0, 1 + number)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
        images = torch.nn.functional.interpolate(patterns[labels], size=(SIDE, SIDE)) + noise / 4
        splits[split] = (128 + 40 * images).clamp(0, 255), labels  # type: ignore[index]
    return splits


def download(folder: Path) -> Path:
    """The python archive, by torchvision, which compares its checksum.

    Raises:
        UserError: no torchvision, or no network.
    """
    fix = "fetch cifar-10-python.tar.gz elsewhere and give it as --archive, or make images with --made 10000"
    try:
        from torchvision.datasets import CIFAR10
        from torchvision.datasets.utils import download_url

        download_url(CIFAR10.url, str(folder), CIFAR10.filename, CIFAR10.tgz_md5)
    except ImportError as error:
        raise Unavailable(f"the download is torchvision's: {error}", where="--archive", fix=fix) from None
    except (OSError, RuntimeError) as error:
        raise Unavailable(f"cannot be downloaded: {error}", where=CIFAR10.url, fix=fix) from None
    return folder / str(CIFAR10.filename)


def _binary(content: bytes) -> np.ndarray[Any, Any]:
    """Records (rows, 1 + 3072): a label, then red, green and blue, each row by row."""
    return np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * SIDE * SIDE)


def _pickled(content: bytes) -> np.ndarray[Any, Any]:
    batch = _Arrays(io.BytesIO(content), encoding="bytes").load()
    return np.column_stack([np.asarray(batch[b"labels"], np.uint8), batch[b"data"]])


class _Arrays(pickle.Unpickler):
    """A pickle of arrays alone: a foreign archive must not run code."""

    def find_class(self, module: str, name: str) -> object:
        if module.split(".")[0] != "numpy" or name not in ARRAYS:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which CIFAR-10 does not")
        found: object = super().find_class(module, name)
        return found


def _tensors(records: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    labels = torch.from_numpy(records[:, 0].copy())
    return torch.from_numpy(records[:, 1:].copy()).view(-1, 3, SIDE, SIDE), labels
