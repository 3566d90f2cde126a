"""The chat template of the models built here, and how a row of any template becomes token ids.

The template is ChatML. An assistant turn, its stop token included, stands between generation markers, so that
assistant-only loss trains exactly what the model has to produce, the stop included. The newline after the
stop token belongs to the frame of the conversation and is not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, DataError
from podtune.sft.data.encode import common_prefix
from podtune.sft.data.shapes import Messages, as_messages, named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_START, TURN_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def prompt_and_answer(row: dict[str, Any]) -> tuple[str | Messages, str | None]:
    """Split a row of any shape into prompt and answer; plain text is the answer to an empty prompt.

    Raises :class:`UserError` for another row.
    """
    row = named(row)
    if turns := row.get("messages") or row.get("conversations"):
        messages = as_messages(turns)
        last = max(
            (at for at, turn in enumerate(messages) if turn["role"] == "assistant"), default=len(messages)
        )
        return messages[:last], str(messages[last]["content"]) if last < len(messages) else None
    if row.get("question") is not None:
        return [{"role": "user", "content": row["question"]}], row.get("answer")
    if row.get("prompt") is not None:
        completion = row.get("completion")
        return row["prompt"], str(completion[0]["content"]) if isinstance(completion, list) else completion
    if row.get("text") is not None:
        return "", row["text"]
    raise DataError(
        f"no shape that is understood: the columns are {', '.join(sorted(row)) or 'none'}",
        fix="give messages, question and answer, prompt (and completion), or text",
    )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> list[int]:
    """Encode a prompt for generation: messages by the chat template, or plain text as it is."""
    prompt = _without_template(tokenizer, prompt)
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(_rendered(tokenizer, prompt, add_generation_prompt=True)["input_ids"])


def _rendered(
    tokenizer: PreTrainedTokenizerBase, turns: Messages, **options: bool
) -> Mapping[str, list[int]]:
    """Apply the chat template. Raises :class:`DataError` if it fails, as where it leaves its sandbox."""
    try:
        encoded: Mapping[str, list[int]] = tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=True, **options
        )
    except Exception as error:  # a template may raise anything
        raise DataError(
            f"the chat template fails: {type(error).__name__}: {str(error)[:200]}",
            where=str(tokenizer.name_or_path),
            fix="correct it, or train with another: --chat_template_path",
        ) from error
    return encoded


def scored_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, answer: str
) -> tuple[list[int], list[bool]]:
    """Encode prompt and answer, with a mark for each token of the answer and for its stop token.

    Works for templates without generation markers too: the answer is what the conversation has beyond the
    generation prompt, up to its last special token. An empty prompt scores every token.
    """
    prompt = _without_template(tokenizer, prompt)
    head = prompt_ids(tokenizer, prompt) if prompt else []
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt + answer)["input_ids"])
        ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        return ids, [position >= len(head) for position in range(len(ids))]
    messages = [*prompt, {"role": "assistant", "content": answer}]
    ids = list(_rendered(tokenizer, messages)["input_ids"])
    start = common_prefix(head, ids)
    special = set(tokenizer.get_added_vocab().values())
    end = next((at + 1 for at in range(len(ids) - 1, start, -1) if ids[at] in special), len(ids))
    return ids, [start <= position < end for position in range(len(ids))]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any = None) -> list[int]:
    """List the ids that end an answer: the generation config's and the tokenizer's EOS, sorted."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(token for token in ids if token is not None)


def _without_template(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> str | Messages:
    """Return ``prompt``; without a template, one question as the line of text that training makes of it."""
    if isinstance(prompt, str) or tokenizer.chat_template:
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"]) + "\n"
    raise ConfigError(
        "the tokenizer has no chat template, so a conversation cannot be turned into text",
        where=str(tokenizer.name_or_path),
        fix="use a tokenizer that has one, or one plain question at a time",
    )
