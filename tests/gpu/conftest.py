"""What the tests on a GPU share. Elsewhere all of them are skipped, with the reason."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gpus import Train, random_model

from podtune.machine.facts import visible_gpus

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = pytest.mark.skip(reason="needs an NVIDIA GPU (make test-gpu on such a machine)")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not visible_gpus():
                item.add_marker(absent)


@pytest.fixture(autouse=True)
def _card_as_it_was() -> Iterator[None]:
    """No test meets another's peak, memory or TF32: transformers leaves the latter on after torch_compile."""
    import torch

    precision = torch.backends.fp32_precision
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    torch.backends.fp32_precision = precision
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def train(qa_data: Path, micro_model: Path, tmp_path: Path) -> Train:
    """Run the fine-tune in this process, whose imports are paid for; returns its record."""

    def run(
        *words: object,
        model: Path = micro_model,
        data: Path = qa_data / "train.parquet",
        name: str = "run",
        code: int = 0,
    ) -> dict[str, Any]:
        from accelerate.state import AcceleratorState, PartialState

        from podtune.training import main

        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        output = tmp_path / name
        argv = ["--model_name_or_path", model, "--dataset_name", data]
        argv += ["--output_dir", output, "--seed", 7, "--logging_steps", 1, "--save_strategy", "no", *words]
        assert main([str(word) for word in argv]) == code
        gc.collect()
        shutil.rmtree(output / "final", ignore_errors=True)  # 12 GB each where the model has 3B
        record = output / "run.json"
        return json.loads(record.read_text()) if record.exists() else {}

    return run


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Path:
    """A model with the shape of SmolLM2-135M."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    return random_model(
        tmp_path_factory.mktemp("medium"), micro_model, num_attention_heads=9, num_key_value_heads=3, **sizes
    )


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Path:
    """A model with the shape of SmolLM3-3B; 6 GiB on the disk."""
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "vocab_size": 128256}
    return random_model(
        tmp_path_factory.mktemp("large"), micro_model, num_attention_heads=16, num_key_value_heads=4, **sizes
    )


@pytest.fixture(scope="session")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2,000 rows of more than 2,048 tokens each: the made models' tokenizer has a token a digit or two."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("long") / "rows.jsonl"
    with file.open("w") as stream:
        for _ in range(2000):
            words = " ".join(f"{draw.randrange(10**6)}" for _ in range(1200))
            stream.write(json.dumps({"text": words}) + "\n")
    return file
