"""The tokenizer of a fine-tune: loaded with the configuration's changes, checked against rows and model.

Imports nothing heavy by itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, NotFound, UserError
from podtune.sft.data.shapes import RowShape
from podtune.sft.source.model import Origin, base_of, explained, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizeOptions:
    """The part of a row that becomes tokens, and the tokens that are trained; the names are SFTConfig's."""

    max_length: int | None = 1024  # None leaves rows whole, as packing needs them
    truncation_mode: str = "keep_start"  # or keep_end
    completion_only_loss: bool | None = None  # None: if there are prompts and completions
    assistant_only_loss: bool = False  # train only what stands between the template's generation markers
    dataset_text_field: str = "text"

    @classmethod
    def of(cls, value: Callable[[str], Any], *, packed: bool) -> TokenizeOptions:
        """From a configuration's ``value`` of a key; rows that will be ``packed`` are not cut."""
        given = value("dataset_kwargs")
        prepared = isinstance(given, dict) and given.get("skip_prepare_dataset")  # neither cut nor packed
        return cls(
            max_length=None if packed or prepared else value("max_length"),
            truncation_mode=value("truncation_mode"),
            completion_only_loss=value("completion_only_loss"),
            assistant_only_loss=value("assistant_only_loss"),
            dataset_text_field=value("dataset_text_field"),
        )


def load_tokenizer(
    origin: Origin,
    *,
    eos_token: str | None = None,
    pad_token: str | None = None,
    chat_template_path: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model or adapter, with the special tokens and the chat template asked for.

    Raises:
        UserError: a broken folder, remote code that was not allowed, a token that is not in the vocabulary,
            or a template that cannot be used.
    """
    from transformers import AutoTokenizer

    if origin.is_adapter and "tokenizer_config.json" not in origin.files:
        origin = base_of(origin)
    with explained(origin.name, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            origin.name, trust_remote_code=trust_remote_code, **origin.arguments
        )
    for key, token in (("eos_token", eos_token), ("pad_token", pad_token)):
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ConfigError(
                f"{token!r} is not in the tokenizer's vocabulary", where=key, fix="name a token that it has"
            )
        setattr(tokenizer, key, token)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token  # as TRL does; labels are masked by position, not by token
    if chat_template_path:
        tokenizer.chat_template = _template_from(chat_template_path, tokenizer, trust_remote_code)
    return tokenizer


def _template_from(path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool) -> object:
    """The chat template of a .jinja file, or of a model whose special tokens this tokenizer must have."""
    file = Path(path)
    if file.suffix in (".jinja", ".j2"):
        if not file.is_file():
            raise NotFound("no such file", where=f"chat_template_path {path}")
        return file.read_text(encoding="utf-8")
    donor = load_tokenizer(locate_model(path, tokenizer_alone=True), trust_remote_code=trust_remote_code)
    needed = [token for token in donor.added_tokens_encoder if token in str(donor.chat_template)]
    if missing := [token for token in needed if token not in tokenizer.get_vocab()]:
        raise ConfigError(
            f"the template of {path} uses {', '.join(missing)}, which this model's tokenizer does not have",
            where="chat_template_path",
            fix="use a template (.jinja) written with this tokenizer's own special tokens",
        )
    return donor.chat_template


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    options: TokenizeOptions,
    shape: RowShape,
) -> list[str]:
    """Make sure that the tokenizer can train ``shape``; return warnings.

    Raises :class:`UserError` without a template, padding or EOS token where one is needed.
    """

    def refuse(what: str, fix: str) -> UserError:
        return ConfigError(what, where=f"tokenizer {tokenizer.name_or_path}".strip(), fix=fix)

    if shape.conversational and not tokenizer.chat_template:
        raise refuse(
            "it has no chat template, and the rows are messages",
            "set --chat_template_path to a .jinja file or to a model that has one, for example "
            "HuggingFaceTB/SmolLM3-3B",
        )
    templated = shape.templated(tokenizer.chat_template)
    if options.assistant_only_loss and not templated:
        raise refuse("assistant_only_loss needs rows of messages", f"leave it off; the rows are {shape.name}")
    if tokenizer.pad_token_id is None:
        raise refuse("it has no padding token", "set --pad_token to a token that is never part of an answer")
    warnings = []
    if tokenizer.eos_token_id is None:
        if shape.name != "tokenized" and not templated:
            raise refuse(
                "it has no EOS token, so the model could not learn where an answer ends",
                "set --eos_token, for example '<|endoftext|>'",
            )
        warnings.append(
            "the tokenizer has no EOS token: generation will not know where to stop (set --eos_token)"
        )
    if options.completion_only_loss and shape.name in ("messages", "text"):
        warnings.append(
            f"completion_only_loss has no effect: the rows are {shape.name} without a completion, and all of "
            "their tokens are trained"
            + (" (assistant_only_loss trains the assistant's turns alone)" if shape.conversational else "")
        )
    return warnings


def training_template(tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> str | None:
    """Return TRL's training template where markers are needed and the tokenizer's has none; None: its own.

    Raises :class:`UserError` if TRL has none for this tokenizer either.
    """
    if not options.assistant_only_loss or not tokenizer.chat_template:
        return None
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return None
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except ValueError:
        raise ConfigError(
            "assistant_only_loss needs a chat template with {% generation %} markers, and this tokenizer's "
            "has none",
            where=str(tokenizer.name_or_path),
            fix="set --chat_template_path FILE.jinja with markers around the assistant's turn, or leave "
            "assistant_only_loss off",
        ) from None
    return template


def is_plain_fast(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the Rust tokenizer alone makes ids of text and transformers itself renders templates."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    )


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """The hash of a tokenizer's vocabulary, rules and special tokens."""
    rules = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    special = json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str)
    return hashlib.sha256(
        "\0".join((rules, kind, special, str(tokenizer.chat_template))).encode()
    ).hexdigest()
