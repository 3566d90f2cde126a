"""Tokenizer and model as the arguments ask for them: special tokens, template, precision, quantization,
strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from podtune.run.errors import CONFIG, NO_INPUT, UserError
from podtune.sft.model import load as models
from podtune.sft.model.origin import locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from podtune.sft.config.resolve import Arguments


def load_tokenizer(arguments: Arguments) -> PreTrainedTokenizerBase:
    """The tokenizer with ``--eos_token``, ``--pad_token`` and ``--chat_template_path`` applied.

    Raises:
        UserError: a token that is not in the vocabulary, or a template that cannot be used.
    """
    training, wanted = arguments.training, arguments.model
    tokenizer = models.load_tokenizer(
        wanted.model_name_or_path, wanted.model_revision, training.trust_remote_code
    )
    for key in ("eos_token", "pad_token"):
        token = getattr(training, key)
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise UserError(
                (f"{token!r} is not in the tokenizer's vocabulary"),
                where=key,
                fix="name a token that it has",
                code=CONFIG,
            )
        setattr(tokenizer, key, token)
    if template := training.chat_template_path:
        path = Path(template)
        if path.suffix in (".jinja", ".j2"):
            if not path.is_file():
                raise UserError("no such file", where=f"chat_template_path {template}", code=NO_INPUT)
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        else:
            cloned = models.load_tokenizer(template, None, training.trust_remote_code)
            used = [token for token in cloned.added_tokens_encoder if token in str(cloned.chat_template)]
            if missing := [token for token in used if token not in tokenizer.get_vocab()]:
                raise UserError(
                    f"the template of {template} uses {', '.join(missing)}, which this model's tokenizer "
                    "does not have",
                    where="chat_template_path",
                    fix="use a template (.jinja) written with this tokenizer's own special tokens",
                    code=CONFIG,
                )
            tokenizer.chat_template = cloned.chat_template
    return tokenizer


def vocabulary_size(arguments: Arguments) -> int:
    """Rows of the model's embedding, by its configuration alone."""
    origin = locate_model(arguments.model.model_name_or_path, arguments.model.model_revision)
    return int(models.load_config(origin, arguments.training.trust_remote_code).get_text_config().vocab_size)


def load_model(arguments: Arguments) -> PreTrainedModel:
    """The model with its weights, in the precision, quantization and attention asked for.

    Raises:
        UserError: see :func:`podtune.sft.model.load.load_model`; QLoRA without a GPU says so before anything
        is loaded.
    """
    from trl import get_quantization_config

    training, wanted = arguments.training, arguments.model
    model = models.load_model(
        wanted.model_name_or_path,
        dtype=wanted.dtype or "auto",
        attn_implementation=wanted.attn_implementation,
        revision=wanted.model_revision,
        trust_remote_code=training.trust_remote_code,
        quantization_config=get_quantization_config(wanted),
        model_init_kwargs=training.model_init_kwargs,
    )
    # applied here, SFTTrainer need not look again
    training.model_init_kwargs = training.chat_template_path = None
    return model
