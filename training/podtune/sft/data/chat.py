"""Chats as text by a chat template: what transformers' ``apply_chat_template`` renders, many at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from podtune.sft.data.shapes import Messages

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

TemplateArguments = dict[str, Any]  # of one row: its tools, and the template's own arguments
Spans = list[tuple[int, int]]  # (start, end) in characters, marked by {% generation %}


class ChatRenderer:
    """Renders chats with ``template``, or with the tokenizer's own where that is None."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
        self.tokenizer, self.template = tokenizer, template

    def render(
        self,
        chats: list[Messages],
        arguments: list[TemplateArguments],
        *,
        generation_prompt: bool = False,
        spans: bool = False,
    ) -> tuple[list[str], list[Spans]]:
        """Texts, and (if asked for) the spans of each that the template marks as generated."""
        # a column of Arrow structs has all keys in every message; templates ask which keys there are
        chats = [
            [{key: value for key, value in message.items() if value is not None} for message in chat]
            for chat in chats
        ]
        if not any(arguments):
            return self._render(chats, {}, generation_prompt, spans)
        texts, marked = [], list[Spans]()
        for chat, its_own in zip(chats, arguments, strict=True):
            rendered = self._render([chat], its_own, generation_prompt, spans)
            texts += rendered[0]
            marked += rendered[1]
        return texts, marked

    def _render(
        self, chats: list[Messages], arguments: TemplateArguments, generation_prompt: bool, spans: bool
    ) -> tuple[list[str], list[Spans]]:
        from transformers.utils import chat_template_utils as library

        arguments = dict(arguments)
        tools = arguments.pop("tools", None)
        template = arguments.pop("chat_template", None)
        template = template or self.tokenizer.get_chat_template(self.template, tools)
        variables = {**self.tokenizer.special_tokens_map, **arguments}
        # the library converts messages before it renders them, which takes longer than the template
        plain = tools is None and all(
            message.keys() == {"role", "content"} and type(message["content"]) is str
            for chat in chats
            for message in chat
        )
        if plain and not spans and all(isinstance(value, str | bool | int) for value in variables.values()):
            render = library._compile_jinja_template(template).render
            fixed = {"tools": None, "documents": None, "add_generation_prompt": generation_prompt}
            return [render(messages=chat, **fixed, **variables) for chat in chats], []
        texts, marked = library.render_jinja_template(
            conversations=chats,
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=spans,
            add_generation_prompt=generation_prompt,
            **variables,
        )
        return texts, marked


def span_mask(encoding: Any, spans: Spans) -> NDArray[np.bool_]:
    """A mask of the tokens within character spans, as ``apply_chat_template`` of transformers makes it."""
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None:
            break
        mask[first : last + 1 if last else None] = True
    return mask
