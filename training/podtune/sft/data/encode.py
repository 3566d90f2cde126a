"""Rows into token ids and labels: exactly what TRL's SFTTrainer makes of them, a batch at a time.

Rendering and masks follow ``SFTTrainer._prepare_dataset`` of TRL 1.16; a test holds the two equal token for
token and label for label. Three things make it fast: a batch is encoded in one call on all cores, the tokens
of a prompt are not looked at one by one in Python, and ids go into flat arrays. Tokenizers that are not the
plain fast ones take TRL's own way, row by row.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from podtune.run.errors import DataError, UserError
from podtune.run.garbage import gc_paused
from podtune.sft.data.chat import ChatRenderer, TemplateArguments, span_mask
from podtune.sft.data.shapes import Messages, Row, RowShape, as_messages, check_cells, joined
from podtune.sft.data.token_batch import IGNORED, MaskedRows, TokenBatch
from podtune.sft.data.tokenizer import TokenizeOptions, check_tokenizer, is_plain_fast, training_template

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

Part = str | Messages  # a prompt, a completion, or both


class Encoder:
    """Encodes batches of one data set: shape, tokenizer and options, checked once (``check_tokenizer``)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: RowShape) -> None:
        self.tokenizer, self.options, self.shape = tokenizer, options, shape
        self.warnings = check_tokenizer(tokenizer, options, shape)
        self.templated = shape.templated(tokenizer.chat_template)
        self.template = training_template(tokenizer, options)
        with_completion = shape.name in ("prompt-completion", "question-answer")
        self.completion_only = (
            with_completion if options.completion_only_loss is None else options.completion_only_loss
        )
        self.fast = is_plain_fast(tokenizer)

    def __call__(self, rows: list[Row], first_row: int = 0) -> TokenBatch:
        """Encode a batch; ``first_row`` counts the rows before it. Raises :class:`UserError`, by row."""
        for number, row in enumerate(rows, first_row + 1):
            check_cells(row, self.shape, f"row {number}")
        try:
            with gc_paused():  # a batch is millions of objects
                masked = self._masked(rows)
        except Exception as error:  # a template may raise anything; find the row
            raise self._name_row(rows, first_row, error) from error
        blank = sum(map(self.shape.answers_nothing, rows))
        return TokenBatch.of(masked, self.options.max_length, self.options.truncation_mode, blank)

    def _masked(self, rows: list[Row]) -> MaskedRows:
        if self.shape.name == "tokenized":
            return self._tokenized(rows)
        prompts, texts = self._inputs(rows)
        arguments = list(map(_template_arguments, rows)) if self.templated else [{}] * len(rows)
        if not self.fast:
            return self._by_row(prompts, texts, arguments)
        # the library sets it in its own calls, which are passed over here
        self.tokenizer.backend_tokenizer.encode_special_tokens = self.tokenizer.split_special_tokens
        if not self.templated:
            return self._mask_prompts(self._encode(texts), self._encode(prompts))
        chat = ChatRenderer(self.tokenizer, self.template)
        heads = chat.render(prompts, arguments, generation_prompt=True)[0] if prompts else []
        texts, spans = chat.render(texts, arguments, spans=self.options.assistant_only_loss)
        if not self.options.assistant_only_loss:
            return self._mask_prompts(self._encode(texts), self._encode(heads))
        # unlike encode_batch_fast, it keeps the characters that each token comes from
        encodings = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        masks = [span_mask(encoding, marked) for encoding, marked in zip(encodings, spans, strict=True)]
        return self._mask_prompts([encoding.ids for encoding in encodings], self._encode(heads), masks)

    def _inputs(self, rows: list[Row]) -> tuple[list[Any], list[Any]]:
        """Prompts (none if the shape has none) and complete rows: messages, or text that ends in EOS."""
        prompts, texts = [], []
        for row in rows:
            *prompt, answer = (row[name] for name in self.shape.columns)
            if self.shape.context:
                prompt = [joined(prompt[0], row.get(self.shape.context))]
            if self.shape.name == "question-answer" and self.templated:
                prompt = [[{"role": "user", "content": prompt[0]}]]
                answer = [{"role": "assistant", "content": answer}]
            elif self.shape.name == "question-answer":
                prompt = [prompt[0] + "\n"]
            if self.templated:
                prompt, answer = list(map(as_messages, prompt)), as_messages(answer)
            elif not answer.endswith(self.tokenizer.eos_token):
                answer += self.tokenizer.eos_token
            prompts += prompt
            texts.append(prompt[0] + answer if prompt else answer)
        return prompts, texts

    def _encode(self, texts: list[str]) -> list[list[int]]:
        # a template has written the special tokens
        encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(
            texts, add_special_tokens=not self.templated
        )
        return [encoding.ids for encoding in encodings]

    def _mask_prompts(
        self,
        ids: list[list[int]],
        prompt_ids: list[list[int]],
        assistant: list[NDArray[np.bool_]] | None = None,
    ) -> MaskedRows:
        """A row is trained where it is both completion (if asked) and assistant (if asked)."""
        if assistant is not None and not all(mask.any() for mask in assistant):
            raise NoAssistantTokens
        rows = MaskedRows(ids, [None] * len(ids) if assistant is None else [*assistant])
        for row, head in enumerate(prompt_ids):
            length = common_prefix(head, ids[row])
            rows.diverged += length < len(head)
            if self.completion_only:
                mask = rows.masks[row]
                if mask is None:
                    mask = rows.masks[row] = np.ones(len(ids[row]), dtype=np.bool_)
                mask[:length] = False
        return rows

    def _by_row(self, prompts: list[Part], texts: list[Part], extra: list[TemplateArguments]) -> MaskedRows:
        """Tokenise as TRL does, row by row, for tokenizers that override how text becomes tokens."""
        from trl.data_utils import _tokenize

        def encoded(parts: list[Part], **options: bool) -> list[Any]:
            own = options if self.templated else {}
            more = [{"chat_template": self.template, **of_row, **own} for of_row in extra]
            # there may be no prompts
            return [_tokenize(self.tokenizer, part, **its) for part, its in zip(parts, more, strict=False)]

        rows = encoded(texts, return_assistant_tokens_mask=self.options.assistant_only_loss)
        heads = encoded(prompts, add_generation_prompt=True)
        ids, head_ids = ([list(each["input_ids"]) for each in every] for every in (rows, heads))
        marked = [row["assistant_masks"] for row in rows if "assistant_masks" in row]
        masks = [np.array(mask, dtype=np.bool_) for mask in marked]
        return self._mask_prompts(ids, head_ids, masks or None)

    def _tokenized(self, rows: list[Row]) -> MaskedRows:
        ids = [row["input_ids"] for row in rows]
        if "labels" in rows[0]:
            labels = [row["labels"] for row in rows]
            for own, given in zip(ids, labels, strict=True):
                if len(own) != len(given):
                    raise ValueError(f"{len(own)} input_ids and {len(given)} labels")
            return MaskedRows(ids, [np.array(row, dtype=np.int64) != IGNORED for row in labels], labels)
        completion_only = self.options.completion_only_loss
        if completion_only is None:
            completion_only = {"prompt", "completion"} <= rows[0].keys()
        names = ("completion_mask", "assistant_masks") if completion_only else ("assistant_masks",)
        given = [name for name in names if name in rows[0]]
        masks = [[np.array(row[name], dtype=np.bool_) for name in given] for row in rows]
        return MaskedRows(ids, [np.logical_and.reduce(of_row) if given else None for of_row in masks])

    def _name_row(self, rows: list[Row], first_row: int, error: Exception) -> UserError:
        """The error of the first row that cannot be encoded alone, or ``error`` of the batch."""
        where, cause = f"row {first_row + 1}", error
        for number, row in enumerate(rows, first_row + 1):
            try:
                self._masked([row])
            except Exception as found:
                where, cause = f"row {number}", found
                break
        fix = "correct the row or remove it"
        if isinstance(cause, NoAssistantTokens):
            return DataError(
                "assistant_only_loss is set, and the row has no assistant token",
                where=where,
                fix="every row needs an assistant message, and the chat template {% generation %} around it",
            )
        if not self.templated:
            return DataError(f"cannot be tokenised: {str(cause)[:300]}", where=where, fix=fix)
        return DataError(
            f"the chat template refuses the row: {str(cause)[:300]}",
            where=where,
            fix=f"{fix}, or use a chat template that takes such rows (--chat_template_path)",
        )


def _template_arguments(row: Row) -> TemplateArguments:
    """The tools of a row and the template's own arguments."""
    tools = row.get("tools")
    given = {} if tools is None else {"tools": json.loads(tools) if isinstance(tools, str) else tools}
    return given | (row.get("chat_template_kwargs") or {})


def common_prefix(head: list[int], row: list[int]) -> int:
    """Count the tokens with which both begin."""
    if row[: len(head)] == head:  # the usual case, compared in C
        return len(head)
    pairs = zip(head, row, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(head), len(row)))


class NoAssistantTokens(ValueError):
    """``assistant_only_loss``, and a row whose template marks nothing."""
