"""Machines with GPUs: what the driver and torch say of a card that is not there, and runs on one that is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@dataclass(frozen=True)
class Card:
    """A kind of GPU: its name, compute capability and memory."""

    name: str
    capability: tuple[int, int]
    memory_gib: float


T4 = Card("Tesla T4", (7, 5), 14.6)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 79.3)
L40S = Card("NVIDIA L40S", (8, 9), 44.4)
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 79.2)
CARDS = (T4, A100, L40S, H100)


def on_cards(
    monkeypatch: pytest.MonkeyPatch, card: Card, count: int = 1, free_gib: float | None = None
) -> None:
    """Let torch answer questions about CUDA as on a machine with ``count`` cards; nothing can be computed."""
    import torch

    major, minor = card.capability
    free = card.memory_gib if free_gib is None else free_gib
    properties = SimpleNamespace(
        name=card.name, major=major, minor=minor, total_memory=int(card.memory_gib * 2**30)
    )
    answers = {
        "is_available": True,
        "device_count": count,
        "current_device": 0,
        "get_device_capability": card.capability,
        "get_device_properties": properties,
        "get_device_name": card.name,
        "mem_get_info": (int(free * 2**30), int(card.memory_gib * 2**30)),
        "set_device": None,
        "init": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    # accelerate takes the CPU, on which everything else of a test happens
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")


Train = Callable[..., dict[str, Any]]


def program(*words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """The fine-tune in a process of its own, for what a process leaves behind."""
    command = [sys.executable, "-m", "podtune.training", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=240)


def random_model(folder: Path, tokenizer: Path, **sizes: Any) -> Path:
    """A model with random weights in bf16, and the tokenizer of another."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM, SmolLM3Config

    for file in tokenizer.iterdir():
        if "token" in file.name or file.name == "chat_template.jinja":
            shutil.copy(file, folder / file.name)
    config = SmolLM3Config(pad_token_id=0, **sizes)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
