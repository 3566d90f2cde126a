"""What becomes tokens and which of them are trained, and whether a tokenizer can do it. Imports nothing heavy
by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from podtune.run.errors import CONFIG, UserError
from podtune.sft.data.shapes import Shape

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class TokenizeOptions:
    """What of a row becomes tokens, and which of them are trained; the names are SFTConfig's.

    Attributes:
        max_length: longest row in tokens; None leaves rows whole (and is what packing needs).
        truncation_mode: ``keep_start`` or ``keep_end``.
        completion_only_loss: None means: if there are prompts and completions.
        assistant_only_loss: train only what stands between the template's generation markers.
        dataset_text_field: the column of plain text.
    """

    max_length: int | None = 1024
    truncation_mode: str = "keep_start"
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    dataset_text_field: str = "text"


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, model_vocab_size: int | None, options: TokenizeOptions, shape: Shape
) -> list[str]:
    """Make sure that the tokenizer can train ``shape``; return warnings.

    Args:
        tokenizer: the tokenizer.
        model_vocab_size: rows of the model's embedding; None skips that check.
        options: as for :func:`tokenize`.
        shape: of the data set, see :func:`shape_of`.

    Raises:
        UserError: no template, padding or EOS token where one is needed, or ids beyond the model's
            vocabulary; each says what to set.
    """
    where = f"tokenizer {tokenizer.name_or_path}".strip()

    def refuse(what: str, fix: str) -> UserError:
        return UserError(what, where=where, fix=fix, code=CONFIG)

    if shape.conversational and not tokenizer.chat_template:
        raise refuse(
            "it has no chat template, and the rows are messages",
            "set --chat_template_path to a .jinja file or to a model that has one, for example "
            "HuggingFaceTB/SmolLM3-3B",
        )
    if options.assistant_only_loss and not (
        shape.conversational or (shape.name == "question-answer" and tokenizer.chat_template)
    ):
        raise refuse("assistant_only_loss needs rows of messages", f"leave it off; the rows are {shape.name}")
    training_template(tokenizer, options)
    plain = (
        not shape.conversational
        and shape.name != "tokenized"
        and not (shape.name == "question-answer" and tokenizer.chat_template)
    )
    if tokenizer.eos_token_id is None and plain:
        raise refuse(
            ("it has no EOS token, so the model could not learn where an answer ends"),
            "set --eos_token, for example '<|endoftext|>'",
        )
    if tokenizer.pad_token_id is None:
        raise refuse("it has no padding token", "set --pad_token to a token that is never part of an answer")
    highest = max(tokenizer.get_vocab().values(), default=0)
    if model_vocab_size is not None and highest >= model_vocab_size:
        beyond = sorted(
            (number, token) for token, number in tokenizer.get_vocab().items() if number >= model_vocab_size
        )
        raise refuse(
            f"its ids go up to {highest}, but the model has {model_vocab_size} embeddings; beyond them: "
            + ", ".join(f"{token!r} ({number})" for number, token in beyond[:3]),
            "use the tokenizer that belongs to the model, or a model whose embeddings were resized for it",
        )
    return _tokenizer_warnings(tokenizer, options, shape)


def _tokenizer_warnings(
    tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: Shape
) -> list[str]:
    found = []
    if tokenizer.eos_token_id is None:
        found.append(
            "the tokenizer has no EOS token: generation will not know where to stop (set --eos_token)"
        )
    if options.completion_only_loss and shape.name in ("messages", "text"):
        found.append(
            f"completion_only_loss has no effect: the rows are {shape.name} without a completion, and all of "
            "their tokens are trained"
            + (" (assistant_only_loss trains the assistant's turns alone)" if shape.conversational else "")
        )
    if options.assistant_only_loss and shape.name != "tokenized":
        from trl.chat_template_utils import is_chat_template_stop_token_trained

        if not is_chat_template_stop_token_trained(
            tokenizer, chat_template=training_template(tokenizer, options)
        ):
            found.append(
                "the chat template leaves the stop token outside of {% generation %}: the model "
                "will not learn to stop"
            )
    return found


def unknown_roles(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, shape: Shape) -> list[str]:
    """A warning about roles, in the first thousand rows, that the chat template does not speak of: it may
    write or drop them.
    """
    if not shape.conversational:
        return []
    rows = dataset.select_columns(list(shape.columns))[:1000]
    found = {
        message.get("role") or message.get("from")
        for name in shape.columns
        for chat in rows[name]
        for message in chat or ()
    }
    template = str(tokenizer.chat_template)
    unknown = sorted(
        role
        for role in found
        if role and role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template
    )
    if not unknown:
        return []
    return [
        (
            f"the chat template may not know the role {', '.join(unknown)}; those that templates know are "
            f"{', '.join(ROLES)}"
        )
    ]


def training_template(tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions) -> str | None:
    """TRL's training template if generation markers are needed and the tokenizer's has none; None: its own.

    Raises:
        UserError: neither it nor TRL's collection has a template with markers.
    """
    if not options.assistant_only_loss or not tokenizer.chat_template:
        return None
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return None
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except ValueError:
        raise UserError(
            "assistant_only_loss needs a chat template with {% generation %} markers, and this tokenizer's "
            "has none",
            where=str(tokenizer.name_or_path),
            fix=(
                "set --chat_template_path FILE.jinja with markers around the assistant's turn, or leave "
                "assistant_only_loss off"
            ),
            code=CONFIG,
        ) from None
    return found
