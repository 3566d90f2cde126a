"""Build a small SmolLM3-architecture model with random weights and a tokenizer of its own, from a data set.

The same data and size give the same bytes. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podtune.run.errors import CannotCreate, DataError, UsageError
from podtune.run.files import replacing_folder
from podtune.run.record import Json, write_json
from podtune.sft.data.readers import rows_at
from podtune.sft.model.template import CHAT_TEMPLATE, PAD, SPECIAL_TOKENS, TURN_END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, SmolLM3Config

BUILD_FILE = "podtune_build.json"
Size = Literal["micro", "tiny"]


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a model. The vocabulary is a multiple of 64, which matrix units like."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int = 2048


SIZES: dict[str, Dimensions] = {
    "micro": Dimensions(1024, 64, 192, 4, 2, 1),  # 0.26 M parameters: the demo, tests
    "tiny": Dimensions(4096, 256, 1024, 6, 4, 2),  # 7.0 M parameters: dry runs
}


def build_model(size: str, data: Path, output: Path, *, seed: int = 0) -> Json:
    """Write a model folder of ``size`` with a tokenizer trained on ``data``; return its podtune_build.json.

    A folder that a build with the same data, size, seed and versions left is kept as it is.

    Raises:
        UserError: unknown size, unreadable or empty data, an output that holds something else or cannot be
        written.
    """
    if size not in SIZES:
        raise UsageError(f"unknown size {size!r}", fix=f"choose one of {', '.join(SIZES)}")
    import tokenizers
    import torch
    import transformers
    from safetensors.torch import save_file

    corpus = ["\n".join(_strings(row)) for row in rows_at(data)]
    if not any(corpus):
        raise DataError(
            "there is no text in it",
            where=str(data),
            fix="give question/answer, prompt/completion, messages or text",
        )
    build: Json = {
        "size": size,
        "seed": seed,
        "data_sha256": hashlib.sha256("\0".join(corpus).encode()).hexdigest(),
        "rows": len(corpus),
        "versions": {
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    }
    if (output / BUILD_FILE).exists():
        left: Json = json.loads((output / BUILD_FILE).read_text(encoding="utf-8"))
        if build.items() <= left.items():
            return left
    tokenizer = train_tokenizer(corpus, SIZES[size])
    # the weights must not depend on the machine's default device
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(seed)
        model = transformers.SmolLM3ForCausalLM(model_config(SIZES[size], tokenizer))
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    build |= {"parameters": model.num_parameters(), "vocabulary": len(tokenizer), **asdict(SIZES[size])}
    with new_folder(output, replaceable=BUILD_FILE) as part:
        # not model.save_pretrained: it imports deepspeed where that is installed, which prints to stdout
        # tied to the embedding
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        model.config.save_pretrained(part)
        model.generation_config.save_pretrained(part)
        tokenizer.save_pretrained(part)
        write_json(part / BUILD_FILE, build)
    return build


def train_tokenizer(corpus: list[str], shape: Dimensions) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: every text round-trips, EOS is the stop token, padding another."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # with the template's own words, which stand in every row and would else be spelled out in it
    tokenizer.train_from_iterator((f"user\n{text}\nassistant\n" for text in corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=shape.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def model_config(shape: Dimensions, tokenizer: PreTrainedTokenizerFast) -> SmolLM3Config:
    """Configure SmolLM3 at ``shape``: grouped queries, tied embeddings, NoPE in a layer of four."""
    from transformers import SmolLM3Config

    return SmolLM3Config(
        **asdict(shape),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # SmolLM3's own at its short context
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        architectures=["SmolLM3ForCausalLM"],
        dtype="float32",
        # SmolLM3's own is 0.02, at a width of 2,048; a narrow model needs larger weights to learn as fast
        initializer_range=0.5 / shape.hidden_size**0.5,
    )


def _strings(row: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a row that a model would see, without provenance columns."""
    asked = ("system", "question", "prompt", "instruction", "input", "messages", "conversations")
    for name in (*asked, "answer", "completion", "output", "text"):
        value = row.get(name)
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            turns = (turn.get("content") or turn.get("value") for turn in value if isinstance(turn, dict))
            yield from (text for text in turns if isinstance(text, str))


@contextlib.contextmanager
def new_folder(output: Path, *, replaceable: str | None = None) -> Iterator[Path]:
    """Yield a folder to fill, which one rename makes ``output`` if the block succeeds; else it is removed.

    Raises :class:`UserError` if ``output`` has files and none is called ``replaceable``.
    """
    ours = replaceable is not None and (output / replaceable).exists()
    if output.exists() and not ours and not (output.is_dir() and not any(output.iterdir())):
        raise CannotCreate(
            "exists and was not made by this command",
            where=str(output),
            fix="give another --output, or remove it",
        )
    with contextlib.ExitStack() as stack:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            part = stack.enter_context(replacing_folder(output))
        except OSError as error:
            raise CannotCreate(f"cannot be written: {error.strerror}", where=str(output)) from error
        yield part
