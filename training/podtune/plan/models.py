"""Shapes of the models that are known by name, and of a config.json. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from podtune.plan.shapes import ConvNet, Transformer
from podtune.run.errors import DataError, NotFound, UsageError, unknown


def gpt2(layers: int, heads: int, hidden: int, context: int, vocabulary: int) -> Transformer:
    """A decoder like GPT-2: tied embeddings, learned positions, an MLP four times as wide as the model."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=4 * hidden,
        vocabulary=vocabulary,
        sequence_length=context,
        head_dim=hidden // heads,
        gated=False,
        positions=context,
        biases=True,
    )


# What the benchmark trains. GPT-2's 50,257 tokens are rounded up to a multiple of 64, which matrix units
# like; the padding rows are never a target.
BENCHMARK_MODELS: dict[str, Transformer | ConvNet] = {
    "tinygpt-test": gpt2(layers=4, heads=4, hidden=128, context=128, vocabulary=512),
    "tinygpt-124m": gpt2(layers=12, heads=12, hidden=768, context=1024, vocabulary=50304),
    "tinygpt-350m": gpt2(layers=24, heads=16, hidden=1024, context=1024, vocabulary=50304),
    "resnet18-cifar": ConvNet("basic", (2, 2, 2, 2), stem="3x3", classes=10, image_size=32),
    "resnet34-cifar": ConvNet("basic", (3, 4, 6, 3), stem="3x3", classes=10, image_size=32),
    "resnet50": ConvNet("bottleneck", (3, 4, 6, 3), stem="7x7", classes=1000, image_size=224),
    "resnet101": ConvNet("bottleneck", (3, 4, 23, 3), stem="7x7", classes=1000, image_size=224),
}
SIZES = ("layers", "heads", "width", "context")  # options that change a benchmark model
# Rows of a step where none are asked for: the same for every strategy and world size.
GLOBAL_BATCH_SIZE = {
    "tinygpt-test": 8,
    "tinygpt-124m": 32,
    "tinygpt-350m": 16,
    "resnet18-cifar": 16,
    "resnet34-cifar": 16,
    "resnet50": 64,
    "resnet101": 64,
}


def llama(
    layers: int, hidden: int, heads: tuple[int, int], intermediate: int, vocabulary: int, head_dim: int
) -> Transformer:
    """A decoder like Llama with a tied head; ``heads`` are the queries', and those of keys and values."""
    return Transformer(
        layers=layers,
        hidden=hidden,
        heads=heads[0],
        kv_heads=heads[1],
        intermediate=intermediate,
        vocabulary=vocabulary,
        sequence_length=2048,
        head_dim=head_dim,
    )


# Models that people fine-tune, the chart's profiles' among them, as their config.json on the hub says.
KNOWN: dict[str, Transformer] = {
    "SmolLM2-135M": llama(30, 576, (9, 3), 1536, 49152, 64),
    "Qwen3-0.6B": llama(28, 1024, (16, 8), 3072, 151936, 128),
    "Qwen3-1.7B": llama(28, 2048, (16, 8), 6144, 151936, 128),
    "SmolLM3-3B": llama(36, 2048, (16, 4), 11008, 128256, 128),
    "Llama-3.1-8B": replace(llama(32, 4096, (32, 8), 14336, 128256, 128), tied=False),
    "pythia-410m": replace(gpt2(24, 16, 1024, 2048, 50304), tied=False, positions=0),
}


def resized(
    shape: Transformer | ConvNet, *, layers: int = 0, heads: int = 0, width: int = 0, context: int = 0
) -> Transformer | ConvNet:
    """A benchmark model of another size; 0 keeps its own. A residual network has a ``width`` alone.

    Raises:
        UserError: a size that the model cannot have.
    """
    if not (layers or heads or width or context):
        return shape
    if isinstance(shape, ConvNet):
        if layers or heads or context or width % 32:
            raise UsageError(
                "a residual network is resized by a width that is a multiple of 32 (its norm has 32 groups)",
                where="--layers, --heads, --width, --context",
                fix="give --width 32, 64, 96 ..., and another --model for more layers",
            )
        return replace(shape, width=width)
    if shape.folder:
        raise UsageError("an hf: model has the size of its config.json", where="--layers, --heads, --width")
    heads, width = heads or shape.heads, width or shape.hidden
    if width % heads:
        raise UsageError(f"{heads} heads do not divide a width of {width}", where="--heads, --width")
    return gpt2(layers or shape.layers, heads, width, context or shape.sequence_length, shape.vocabulary)


def shape_of(name: str, sequence_length: int | None = None) -> Transformer | ConvNet:
    """The shape of a benchmark model, a known model, ``hf:PATH`` or a folder with a config.json.

    Raises:
        UserError: unknown name (names the nearest), a missing folder, or a config.json that is not a
        decoder's.
    """
    short = name.removeprefix("hf:").rstrip("/").rsplit("/", 1)[-1]
    path = Path(name.removeprefix("hf:")).expanduser()
    shape: Transformer | ConvNet | None = BENCHMARK_MODELS.get(name)
    if shape is None and (path.is_dir() or path.name == "config.json"):
        shape = _from_config(path if path.name == "config.json" else path / "config.json")
    shape = shape or KNOWN.get(short)
    if shape is not None:
        if isinstance(shape, Transformer) and sequence_length:
            return replace(shape, sequence_length=sequence_length)
        return shape
    if name.startswith("hf:"):
        raise NotFound(
            f"no folder {path}",
            where="--model",
            fix="give a local folder with a config.json (nothing is downloaded)",
        )
    names = [*BENCHMARK_MODELS, *KNOWN, "hf:PATH of a folder with a config.json"]
    raise unknown("model", name, names, where="--model")


def _from_config(path: Path) -> Transformer:
    """A transformers ``config.json``, by the names that Llama-like and GPT-2-like models give their sizes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(
            "no such file", where=str(path), fix="give the folder of a transformers model"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as JSON: {error}", where=str(path)) from None

    def integer(*names: str, default: int | None = None) -> int:
        value: Any = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(
                f"{names[0]} is {value!r}, not a positive number",
                where=str(path),
                fix="give the folder of a decoder (Llama, SmolLM3, Qwen, GPT-2 ...)",
            )
        return value

    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise DataError(
            "a mixture of experts is not covered by these formulas",
            where=str(path),
            fix="give --params for the states alone",
        )
    gpt2 = config.get("model_type") in ("gpt2", "gpt_neo", "gptj", "gpt_neox", "opt")
    hidden, heads = integer("hidden_size", "n_embd"), integer("num_attention_heads", "n_head")
    positions = integer("max_position_embeddings", "n_positions", default=2048)
    return Transformer(
        layers=integer("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=integer("num_key_value_heads", default=heads),
        intermediate=integer("intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=integer("vocab_size"),
        sequence_length=min(positions, 2048),
        head_dim=integer("head_dim", default=hidden // heads),
        gated=not gpt2,
        # transformers leaves the key out where it has its default, which is "tied" for GPT-2 and the SmolLM
        # family
        tied=bool(config.get("tie_word_embeddings", gpt2 or config.get("model_type") == "smollm3")),
        positions=positions if config.get("model_type") in ("gpt2", "gpt_neo", "opt") else 0,
        biases=gpt2,
        folder=str(path.parent),
    )
