"""Rows into token ids and labels: exactly what TRL's SFTTrainer makes of them, a batch at a time.

Rendering and masks follow ``SFTTrainer._prepare_dataset`` of TRL 1.16; a test holds the two equal token for
token and label for label. Three things make it fast: a batch is encoded in one call on all cores, the tokens
of a prompt are not looked at one by one in Python, and ids go into flat arrays. Tokenizers that are not the
plain fast ones take TRL's own way, row by row.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from podtune.run.errors import DataError, UserError
from podtune.run.garbage import gc_paused
from podtune.sft.data.chat import ChatRenderer, TemplateArguments, span_mask
from podtune.sft.data.shapes import RowShape, as_messages, bad_row, check_cells, joined
from podtune.sft.data.token_batch import IGNORED, MaskedRows, TokenBatch
from podtune.sft.data.tokenizer import (
    TokenizeOptions,
    check_tokenizer,
    is_plain_fast,
    training_template,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

MAX_ROW_CHARACTERS = 64 * 2**20
_CUT_ABOVE_CHARACTERS = 2**20

Columns = dict[str, list[Any]]


class Encoder:
    """Encodes batches of one data set: a shape, a tokenizer and options, checked once.

    Raises:
        UserError: the tokenizer lacks what the shape or the options need (see ``check_tokenizer``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: RowShape) -> None:
        self.tokenizer, self.options, self.shape = tokenizer, options, shape
        self.warnings = check_tokenizer(tokenizer, options, shape)
        self.templated = shape.templated(tokenizer.chat_template)
        self.template = training_template(tokenizer, options) if self.templated else None
        self.chat = ChatRenderer(tokenizer, self.template)
        with_completion = shape.name in ("prompt-completion", "question-answer")
        self.completion_only = (
            with_completion if options.completion_only_loss is None else options.completion_only_loss
        )
        self.fast = is_plain_fast(tokenizer)
        self._cut_at = None
        if self.fast and options.max_length and options.truncation_mode == "keep_start":
            longest_token = max(map(len, tokenizer.get_vocab()), default=1)
            self._cut_at = max(_CUT_ABOVE_CHARACTERS, 2 * longest_token * options.max_length)

    def __call__(self, columns: Columns, first_row: int = 0) -> TokenBatch:
        """Encode a batch; ``first_row`` counts the rows before it and is for messages.

        Raises:
            UserError: a row that cannot be encoded, by its number (from 1).
        """
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        for number, row in enumerate(rows, first_row + 1):
            self._check_row(row, f"row {number}")
        try:
            with gc_paused():  # a batch is millions of objects
                masked = self._masked(columns)
        except Exception as error:  # a template may raise anything; find the row
            raise self._name_row(columns, first_row, error) from error
        batch = TokenBatch.of(masked, self.options.max_length, self.options.truncation_mode)
        return dataclasses.replace(batch, blank=sum(map(self.shape.answers_nothing, rows)))

    def _masked(self, columns: Columns) -> MaskedRows:
        if self.shape.name == "tokenized":
            return self._tokenized(columns)
        prompts, rows = self._inputs(columns)
        if not self.fast:
            return self._by_row(columns, prompts, rows)
        if not self.templated:
            heads = None if prompts is None else self._encode(prompts, True)
            return self._mask_prompts(self._encode(rows, True), heads)
        arguments = self._template_arguments(columns)
        texts, spans = self.chat.render(rows, arguments, spans=self.options.assistant_only_loss)
        heads = None
        if prompts is not None:
            heads = self._encode(self.chat.render(prompts, arguments, generation_prompt=True)[0], False)
        if spans is None:
            return self._mask_prompts(self._encode(texts, False), heads)
        texts = self._texts_for_backend(texts)
        # unlike encode_batch_fast, it keeps the characters that each token comes from
        encodings = self.tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        masks = [span_mask(encoding, marked) for encoding, marked in zip(encodings, spans, strict=True)]
        return self._mask_prompts([encoding.ids for encoding in encodings], heads, masks)

    def _inputs(self, columns: Columns) -> tuple[list[Any] | None, list[Any]]:
        """Prompts (None if the shape has none) and complete rows: messages, or text that ends in EOS."""
        names = self.shape.columns
        if self.shape.name == "messages":
            return None, [as_messages(value) for value in columns[names[0]]]
        if self.shape.name == "text":
            return None, [self._with_eos(text) for text in columns[names[0]]]
        prompts, completions = columns[names[0]], columns[names[1]]
        if self.shape.context in columns:
            prompts = list(map(joined, prompts, columns[self.shape.context]))
        if self.shape.name == "question-answer" and self.templated:
            prompts = [[{"role": "user", "content": text}] for text in prompts]
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        elif self.shape.name == "question-answer":
            prompts = [text + "\n" for text in prompts]
        if self.templated:
            prompts = [as_messages(value) for value in prompts]
            completions = [as_messages(value) for value in completions]
        else:
            completions = [self._with_eos(text) for text in completions]
        return prompts, [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]

    def _with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        return text if text.endswith(eos) else text + eos

    def _template_arguments(self, columns: Columns) -> list[TemplateArguments] | None:
        """The tools of each row and the template's own arguments; None if no row has any."""
        if "tools" not in columns and "chat_template_kwargs" not in columns:
            return None
        none = [None] * len(columns[self.shape.columns[0]])
        return [
            {"tools": json.loads(tools) if isinstance(tools, str) else tools, **(more or {})}
            for tools, more in zip(
                columns.get("tools") or none, columns.get("chat_template_kwargs") or none, strict=True
            )
        ]

    def _texts_for_backend(self, texts: list[str]) -> list[str]:
        backend = self.tokenizer.backend_tokenizer
        # A tokenizer.json may carry truncation and padding; transformers switches both off for each call.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self.tokenizer.split_special_tokens
        if self._cut_at is not None:
            # What lies far beyond max_length cannot matter, and encoding it takes a hundred bytes a token.
            texts = [text[: self._cut_at] for text in texts]
        return texts

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        texts = self._texts_for_backend(texts)
        backend = self.tokenizer.backend_tokenizer
        return [
            encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
        ]

    def _mask_prompts(
        self,
        ids: list[list[int]],
        prompt_ids: list[list[int]] | None,
        assistant: list[NDArray[np.bool_]] | None = None,
    ) -> MaskedRows:
        """A row is trained where it is both completion (if asked) and assistant (if asked)."""
        if assistant is not None and not all(mask.any() for mask in assistant):
            raise NoAssistantTokens
        rows = MaskedRows(ids, list(assistant) if assistant is not None else [None] * len(ids))
        for row, head in enumerate(prompt_ids or ()):
            length = _common_prefix(head, ids[row])
            rows.diverged += length < len(head)
            if self.completion_only:
                mask = rows.masks[row]
                if mask is None:
                    mask = rows.masks[row] = np.ones(len(ids[row]), dtype=np.bool_)
                mask[:length] = False
        return rows

    def _by_row(self, columns: Columns, prompts: list[Any] | None, rows: list[Any]) -> MaskedRows:
        """Tokenise as TRL does, row by row, for tokenizers that override how text becomes tokens."""
        from trl.data_utils import _tokenize

        templated = self.templated
        of_rows = {"return_assistant_tokens_mask": self.options.assistant_only_loss} if templated else {}
        of_prompts = {"add_generation_prompt": True} if templated else {}
        extra = (self._template_arguments(columns) if templated else None) or [{}] * len(rows)
        ids, heads, assistant = [], [], []
        for number, (row, more) in enumerate(zip(rows, extra, strict=True)):
            arguments = {"chat_template": self.template, **more}
            processed = _tokenize(self.tokenizer, row, **arguments, **of_rows)
            ids.append(list(processed["input_ids"]))
            if "assistant_masks" in processed:
                assistant.append(np.array(processed["assistant_masks"], dtype=np.bool_))
            if prompts is not None:
                head = _tokenize(self.tokenizer, prompts[number], **arguments, **of_prompts)
                heads.append(list(head["input_ids"]))
        return self._mask_prompts(ids, heads if prompts is not None else None, assistant or None)

    def _tokenized(self, columns: Columns) -> MaskedRows:
        ids = columns["input_ids"]
        if "labels" in columns:
            labels = columns["labels"]
            for own, given in zip(ids, labels, strict=True):
                if len(own) != len(given):
                    raise ValueError(f"{len(own)} input_ids and {len(given)} labels")
            return MaskedRows(ids, [np.array(row, dtype=np.int64) != IGNORED for row in labels], labels)
        completion_only = self.options.completion_only_loss
        if completion_only is None:
            completion_only = {"prompt", "completion"} <= set(columns)
        names = ("completion_mask", "assistant_masks") if completion_only else ("assistant_masks",)
        rows = MaskedRows(ids, [None] * len(ids))
        for name in names:
            for row, values in enumerate(columns.get(name, ())):
                mask, before = np.array(values, dtype=np.bool_), rows.masks[row]
                rows.masks[row] = mask if before is None else before & mask
        return rows

    def _check_row(self, row: dict[str, Any], where: str) -> None:
        check_cells(row, self.shape, where)
        for name in self.shape.columns:
            if isinstance(row[name], str) and len(row[name]) > MAX_ROW_CHARACTERS:
                size, most = len(row[name]) // 2**20, MAX_ROW_CHARACTERS // 2**20
                raise bad_row(where, f"column '{name}' holds {size} Mi characters; the most is {most} Mi")

    def _name_row(self, columns: Columns, first_row: int, error: Exception) -> UserError:
        """The error of the first row that cannot be encoded alone, or ``error`` of the batch."""
        row, cause = 0, error
        for row in range(len(columns[self.shape.columns[0]])):
            try:
                self._masked({name: values[row : row + 1] for name, values in columns.items()})
            except Exception as found:
                cause = found
                break
        where = f"row {first_row + row + 1}"
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


def _common_prefix(head: list[int], row: list[int]) -> int:
    """The number of tokens with which both begin."""
    if row[: len(head)] == head:  # the usual case, compared in C
        return len(head)
    pairs = zip(head, row, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(head), len(row)))


class NoAssistantTokens(ValueError):
    """``assistant_only_loss``, and a row whose template marks nothing."""
