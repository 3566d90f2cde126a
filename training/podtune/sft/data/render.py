"""Messages into text by a chat template, and characters into tokens, as transformers' ``apply_chat_template``
does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]

_PLAIN = {"role", "content"}


def rendered(
    chats: list[Messages],
    template: str,
    tools: Any,
    generation_prompt: bool,
    spans: bool,
    variables: dict[str, Any],
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """transformers' rendering. Messages of plain text need none of its conversions, which take longer than
    the template.
    """
    from transformers.utils import chat_template_utils as library

    plain = tools is None and all(
        message.keys() == _PLAIN and type(message["content"]) is str for chat in chats for message in chat
    )
    if plain and not spans and all(isinstance(value, str | bool | int) for value in variables.values()):
        render = library._compile_jinja_template(template).render
        return [
            render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=generation_prompt,
                **variables,
            )
            for chat in chats
        ], []
    texts, found = library.render_jinja_template(
        conversations=chats,
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=spans,
        add_generation_prompt=generation_prompt,
        **variables,
    )
    return texts, found


def as_messages(value: Sequence[dict[str, Any]]) -> Messages:
    """Messages with role and content; ``from`` and ``value`` are their older names."""
    renamed = {"from": "role", "value": "content"}
    return [{renamed.get(key, key): item for key, item in message.items()} for message in value]


def span_mask(encoding: Any, spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Tokens within character spans, as transformers' ``apply_chat_template`` finds them."""
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None:  # beyond the cut
            break
        mask[first : last + 1 if last else None] = True
    return mask


def is_plain_fast(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if text becomes ids by the Rust tokenizer alone and templates are rendered by transformers
    itself.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    )
