"""Rows into token ids and labels: exactly what TRL's SFTTrainer makes of them, a batch at a time.

Rendering and masks follow ``SFTTrainer._prepare_dataset`` of TRL 1.16; a test holds the two equal token for
token and label for label. Three things make it fast: a batch is encoded in one call on all cores, the tokens
of a prompt are not looked at one by one in Python, and ids go into flat arrays. Tokenizers that are not the
plain fast ones take TRL's own way, row by row.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from podtune.run.collection import without_collection
from podtune.run.errors import DataError, UserError
from podtune.sft.data.shapes import Messages, RowShape, as_messages, cell_problem
from podtune.sft.data.tokenizer import TokenizeOptions, is_plain_fast, training_template

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_PLAIN = {"role", "content"}
IGNORED = -100  # the label of a token that is not trained
MAX_ROW_CHARACTERS = 64 * 2**20
_CUT_ABOVE_CHARACTERS = 2**20

Columns = dict[str, list[Any]]


@dataclass
class Encoded:
    """Rows of a batch, flat: row i is ``ids[offsets[i]:offsets[i + 1]]``. All arrays are int32.

    Attributes:
        kept: for each row, its index in the batch that came in.
        truncated: rows cut to ``max_length``, dropped ones included.
        cut_tokens: tokens cut off them.
        dropped: rows left without a trained token by the cut.
        diverged: rows whose prompt is not how the whole row starts.
        longest: tokens of the longest row before the cut.
    """

    ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    offsets: NDArray[np.int32]
    kept: NDArray[np.int32]
    truncated: int = 0
    cut_tokens: int = 0
    dropped: int = 0
    diverged: int = 0
    longest: int = 0


class Encoder:
    """Encodes batches of one data set: a shape, a tokenizer and options, checked once.

    Raises:
        UserError: the tokenizer lacks what the shape or the options need (see ``check_tokenizer``).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TokenizeOptions, shape: RowShape) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.asks_template = shape.conversational or (
            shape.name == "question-answer" and bool(tokenizer.chat_template)
        )
        self.shape = shape
        self.template = training_template(tokenizer, options) if self.asks_template else None
        with_completion = shape.name in ("prompt-completion", "question-answer")
        self.completion_only = (
            with_completion if options.completion_only_loss is None else options.completion_only_loss
        )
        self.fast = is_plain_fast(tokenizer)
        if self.fast:
            self.backend = tokenizer.backend_tokenizer
            longest_token = max(map(len, tokenizer.get_vocab()), default=1)
            self._cut_at = None
            if options.max_length and options.truncation_mode == "keep_start":
                self._cut_at = max(_CUT_ABOVE_CHARACTERS, 2 * longest_token * options.max_length)
            self.backend.encode_special_tokens = tokenizer.split_special_tokens

    def __call__(self, columns: Columns, first_row: int = 0) -> Encoded:
        """Encode a batch; ``first_row`` counts the rows before it and is for messages.

        Raises:
            UserError: a row that cannot be encoded, by its number (from 1).
        """
        self._check_cells(columns, first_row)
        try:
            with without_collection():  # a batch is millions of objects
                ids, masks, diverged = self._masked(columns)
        except UserError:
            raise
        except Exception as error:  # a template may raise anything; find the row
            raise self._name_row(columns, first_row, error) from error
        given = columns.get("labels") if self.shape.name == "tokenized" else None
        return self._finish(ids, masks, diverged, given)

    # ---- rows to ids and masks (1: trained) ----
    def _masked(self, columns: Columns) -> tuple[list[list[int]], list[NDArray[np.bool_] | None], int]:
        if self.shape.name == "tokenized":
            return self._tokenized(columns)
        prompts, wholes = self._inputs(columns)
        if not self.fast:
            return self._by_row(columns, prompts, wholes)
        if not self.asks_template:
            return self._mask_prompts(
                self._encode(wholes, True), self._encode(prompts, True) if prompts is not None else None, None
            )
        extra = self._template_arguments(columns, len(wholes))
        texts, spans = self._render(
            wholes, extra, generation_prompt=False, spans=self.options.assistant_only_loss
        )
        heads = (
            self._render(prompts, extra, generation_prompt=True, spans=False)[0]
            if prompts is not None
            else None
        )
        encodings = None
        if spans is not None:
            encodings = self._encode_with_offsets(texts)
            ids = [encoding.ids for encoding in encodings]
        else:
            ids = self._encode(texts, False)
        assistant = (
            None
            if encodings is None or spans is None
            else [span_mask(e, s) for e, s in zip(encodings, spans, strict=True)]
        )
        return self._mask_prompts(ids, self._encode(heads, False) if heads is not None else None, assistant)

    def _inputs(self, columns: Columns) -> tuple[list[Any] | None, list[Any]]:
        """Prompts (None if the shape has none) and whole rows, each text or messages. EOS is added to plain
        text, as TRL does.
        """
        names = self.shape.columns
        if self.shape.name == "messages":
            return None, [as_messages(value) for value in columns[names[0]]]
        if self.shape.name == "text":
            return None, [self._with_eos(text) for text in columns[names[0]]]
        prompts, completions = columns[names[0]], columns[names[1]]
        if self.shape.name == "question-answer":
            if self.asks_template:
                prompts = [[{"role": "user", "content": text}] for text in prompts]
                completions = [[{"role": "assistant", "content": text}] for text in completions]
            else:
                prompts = [text + "\n" for text in prompts]
        if self.asks_template:
            prompts, completions = (
                [as_messages(value) for value in prompts],
                [as_messages(value) for value in completions],
            )
        else:
            completions = [self._with_eos(text) for text in completions]
        return prompts, [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]

    def _with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        return text if text.endswith(eos) else text + eos

    def _template_arguments(self, columns: Columns, rows: int) -> list[dict[str, Any]] | None:
        """Per row: the tools and the template's own arguments; None if no row has any."""
        if "tools" not in columns and "chat_template_kwargs" not in columns:
            return None
        arguments = []
        for tools, more in itertools.islice(
            zip(
                columns.get("tools") or itertools.repeat(None),
                columns.get("chat_template_kwargs") or itertools.repeat(None),
                strict=False,
            ),
            rows,
        ):
            arguments.append(
                {"tools": json.loads(tools) if isinstance(tools, str) else tools, **(more or {})}
            )
        return arguments

    def _render(
        self,
        chats: list[Messages],
        extra: list[dict[str, Any]] | None,
        *,
        generation_prompt: bool,
        spans: bool,
    ) -> tuple[list[str], list[list[tuple[int, int]]] | None]:
        """Texts, and for each the spans (start, end in characters) that the template marks as generated."""
        chats = [
            [{key: value for key, value in message.items() if value is not None} for message in chat]
            for chat in chats
        ]

        def render(
            some: list[Messages], tools: Any = None, **more: Any
        ) -> tuple[list[str], list[list[tuple[int, int]]]]:
            template = more.pop("chat_template", None) or self.tokenizer.get_chat_template(
                self.template, tools
            )
            return rendered(
                some, template, tools, generation_prompt, spans, {**self.tokenizer.special_tokens_map, **more}
            )

        if extra is None:
            texts, marked = render(chats)
        else:
            each = [render([chat], **arguments) for chat, arguments in zip(chats, extra, strict=True)]
            texts = [text for rendered, _ in each for text in rendered]
            marked = [spans_of_row for _, indices in each for spans_of_row in indices]
        return texts, marked if spans else None

    def _texts_for_backend(self, texts: list[str]) -> list[str]:
        # A tokenizer.json may carry truncation and padding; transformers switches both off for each call.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = self.tokenizer.split_special_tokens
        if self._cut_at is not None:
            # What lies far beyond max_length cannot matter, and encoding it takes a hundred bytes a token.
            texts = [text if len(text) <= self._cut_at else text[: self._cut_at] for text in texts]
        return texts

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int]]:
        texts = self._texts_for_backend(texts)
        return [
            encoding.ids
            for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=special_tokens)
        ]

    def _encode_with_offsets(self, texts: list[str]) -> list[Any]:
        return list(self.backend.encode_batch(self._texts_for_backend(texts), add_special_tokens=False))

    def _mask_prompts(
        self,
        ids: list[list[int]],
        prompt_ids: list[list[int]] | None,
        assistant: list[NDArray[np.bool_]] | None,
    ) -> tuple[list[list[int]], list[NDArray[np.bool_] | None], int]:
        """A row is trained where it is both completion (if asked) and assistant (if asked)."""
        masks: list[NDArray[np.bool_] | None] = (
            list(assistant) if assistant is not None else [None] * len(ids)
        )
        diverged = 0
        unmarked = next((row for row, mask in enumerate(assistant or []) if not mask.any()), None)
        if unmarked is not None:
            raise NoAssistantTokens(unmarked)
        if prompt_ids is not None:
            for row, (head, whole) in enumerate(zip(prompt_ids, ids, strict=True)):
                length = len(head)
                if whole[:length] != head:
                    length = next(
                        (at for at, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b),
                        min(len(head), len(whole)),
                    )
                    diverged += 1
                if self.completion_only:
                    mask = masks[row]
                    if mask is None:
                        mask = masks[row] = np.ones(len(whole), dtype=np.bool_)
                    mask[:length] = False
        return ids, masks, diverged

    def _by_row(
        self, columns: Columns, prompts: list[Any] | None, wholes: list[Any]
    ) -> tuple[list[list[int]], list[NDArray[np.bool_] | None], int]:
        """Tokenise as TRL does, row by row, for tokenizers that override how text becomes tokens."""
        from trl.data_utils import _tokenize

        extra = self._template_arguments(columns, len(wholes)) or [{}] * len(wholes)
        ids, heads, assistant = [], [], []
        for row, whole in enumerate(wholes):
            arguments = {"chat_template": self.template, **extra[row]}
            if not self.asks_template:
                arguments = {"chat_template": self.template}
            asked = (
                {"return_assistant_tokens_mask": self.options.assistant_only_loss}
                if self.asks_template
                else {}
            )
            processed = _tokenize(self.tokenizer, whole, **arguments, **asked)
            ids.append(list(processed["input_ids"]))
            if "assistant_masks" in processed:
                assistant.append(np.array(processed["assistant_masks"], dtype=np.bool_))
            if prompts is not None:
                generation = {"add_generation_prompt": True} if self.asks_template else {}
                heads.append(
                    list(_tokenize(self.tokenizer, prompts[row], **arguments, **generation)["input_ids"])
                )
        return self._mask_prompts(ids, heads if prompts is not None else None, assistant or None)

    def _tokenized(self, columns: Columns) -> tuple[list[list[int]], list[NDArray[np.bool_] | None], int]:
        ids = columns["input_ids"]
        if "labels" in columns:
            for own, labels in zip(ids, columns["labels"], strict=True):
                if len(own) != len(labels):
                    raise ValueError(f"{len(own)} input_ids and {len(labels)} labels")
            masks: list[NDArray[np.bool_] | None] = [
                np.array(row, dtype=np.int64) != IGNORED for row in columns["labels"]
            ]
        else:
            asked = self.options.completion_only_loss
            with_completion = {"prompt", "completion"} <= set(columns) if asked is None else asked
            masks = [None] * len(ids)
            for name in (*(("completion_mask",) if with_completion else ()), "assistant_masks"):
                if name not in columns:
                    continue
                for row, values in enumerate(columns[name]):
                    mask = np.array(values, dtype=np.bool_)
                    before = masks[row]
                    masks[row] = mask if before is None else before & mask
        return ids, masks, 0

    # ---- cut, drop, flatten ----
    def _finish(
        self,
        ids: list[list[int]],
        masks: list[NDArray[np.bool_] | None],
        diverged: int,
        given: list[list[int]] | None,
    ) -> Encoded:
        """``given`` are labels that came with the rows; else a trained token is its own label."""
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(lengths.sum()))
        trained = np.concatenate(
            [np.ones(n, np.bool_) if mask is None else mask for mask, n in zip(masks, lengths, strict=True)]
            or [np.ones(0, np.bool_)]
        )
        targets = flat
        if given is not None:
            targets = np.fromiter(itertools.chain.from_iterable(given), dtype=np.int32, count=len(flat))
        longest = int(lengths.max(initial=0))
        limit = self.options.max_length
        truncated = cut = dropped = 0
        kept = np.arange(len(ids), dtype=np.int32)
        if limit is not None:
            starts = np.cumsum(lengths) - lengths
            place = np.arange(len(flat)) - np.repeat(starts, lengths)
            keep = place < limit
            if self.options.truncation_mode == "keep_end":
                keep = place >= np.repeat(lengths - limit, lengths)
            truncated, cut = int((lengths > limit).sum()), int((~keep).sum())
            row_of = np.repeat(kept, lengths)
            alive = np.bincount(row_of, weights=trained & keep, minlength=len(ids)) > 0
            keep &= alive[row_of]
            flat, targets, trained = flat[keep], targets[keep], trained[keep]
            lengths, kept = np.minimum(lengths, limit)[alive], kept[alive]
            dropped = len(alive) - len(kept)
        offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        labels = np.where(trained, targets, np.int32(IGNORED))
        return Encoded(flat, labels, offsets, kept, truncated, cut, dropped, diverged, longest)

    # ---- what is wrong ----
    def _check_cells(self, columns: Columns, first_row: int) -> None:
        for name in self.shape.columns:
            for row, value in enumerate(columns[name]):
                problem = cell_problem(value, self.shape.cell)
                if problem is None and isinstance(value, str) and len(value) > MAX_ROW_CHARACTERS:
                    problem = (
                        f"holds {len(value) / 2**20:.0f} Mi characters; the most is "
                        f"{MAX_ROW_CHARACTERS // 2**20} Mi"
                    )
                if problem:
                    raise DataError(
                        f"column '{name}' {problem}",
                        where=f"row {first_row + row + 1}",
                        fix="correct the row or remove it",
                    )

    def _name_row(self, columns: Columns, first_row: int, error: Exception) -> UserError:
        rows = len(columns[self.shape.columns[0]])
        row, cause = 0, error
        if isinstance(error, NoAssistantTokens):
            row = error.row
        else:
            for row in range(rows):
                try:
                    self._masked({name: values[row : row + 1] for name, values in columns.items()})
                except Exception as found:
                    cause = found
                    break
        if isinstance(cause, NoAssistantTokens):
            return DataError(
                "assistant_only_loss is set, and the row has no assistant token",
                where=f"row {first_row + row + 1}",
                fix="every row needs an assistant message, and the chat template {% generation %} around it",
            )
        return DataError(
            (f"the chat template refuses the row: {str(cause)[:300]}")
            if self.asks_template
            else f"cannot be tokenised: {str(cause)[:300]}",
            where=f"row {first_row + row + 1}",
            fix="correct the row or remove it"
            + (
                (", or use a chat template that takes such rows (--chat_template_path)")
                if self.asks_template
                else ""
            ),
        )


def rendered(
    chats: list[Messages],
    template: str,
    tools: Any,
    generation_prompt: bool,
    spans: bool,
    variables: dict[str, Any],
) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Render ``chats`` as transformers does: the texts, and the spans that the template marks as generated.

    Messages of plain text skip its conversions, which take longer than the template.
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
    texts, marked = library.render_jinja_template(
        conversations=chats,
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=spans,
        add_generation_prompt=generation_prompt,
        **variables,
    )
    return texts, marked


def span_mask(encoding: Any, spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """A mask of the tokens within character spans, as ``apply_chat_template`` of transformers makes it."""
    mask = np.zeros(len(encoding.ids), dtype=np.bool_)
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None:  # beyond the cut
            break
        mask[first : last + 1 if last else None] = True
    return mask


class NoAssistantTokens(ValueError):
    """``assistant_only_loss``, and a row whose template marks nothing."""

    def __init__(self, row: int) -> None:
        super().__init__("no assistant token")
        self.row = row
