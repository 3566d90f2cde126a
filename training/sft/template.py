"""The chat template of the models built here, and how a row of any template becomes token ids.

The template is ChatML. An assistant turn, its stop token included, stands between generation markers, so that
assistant-only loss trains exactly what the model has to produce, the stop included. The newline after the stop token
belongs to the frame of the conversation and is not trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.run.errors import CONFIG, UserError

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

Messages = list[dict[str, Any]]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages) -> list[int]:
    """The ids a model continues from: messages with the template's generation prompt, or plain text as it is.

    Raises:
        UserError: messages, but the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    _needs_template(tokenizer)
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])


def scored_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Messages, answer: str) -> tuple[list[int], list[bool]]:
    """Token ids of prompt and answer, and for each whether it is scored: the answer with its stop token, not the prompt.

    Works for templates without generation markers too: the answer is what the conversation has beyond the generation
    prompt, up to and including the first stop token. An empty prompt scores every token.
    """
    head = prompt_ids(tokenizer, prompt) if prompt else []
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt + answer)["input_ids"])
        ids += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        return ids, [position >= len(head) for position in range(len(ids))]
    messages = [*prompt, {"role": "assistant", "content": answer}]
    ids = list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])
    start = next((at for at, (left, right) in enumerate(zip(head, ids, strict=False)) if left != right), min(len(head), len(ids)))
    added = set(tokenizer.get_added_vocab().values())
    end = next((at + 1 for at in range(len(ids) - 1, start, -1) if ids[at] in added), len(ids))
    return ids, [start <= position < end for position in range(len(ids))]


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: Any = None) -> list[int]:
    """Ids that end an answer: those of the generation config and the tokenizer's EOS, sorted."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return sorted(token for token in ids if token is not None)


def _needs_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template, so messages cannot be turned into text",
            where=str(tokenizer.name_or_path),
            fix="set chat_template_path to a tokenizer or a .jinja file that has one, or use plain prompts",
            code=CONFIG,
        )
