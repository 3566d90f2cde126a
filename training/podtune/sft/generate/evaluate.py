"""Comparison of a tuned model with its base on held-out rows: answers, exact match, perplexity."""

from __future__ import annotations

import gc
import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.record import Json
from podtune.sft.data.shapes import Messages
from podtune.sft.generate.answers import Sampling, answer, by_length
from podtune.sft.model.load import load_model
from podtune.sft.model.template import prompt_and_answer, scored_ids
from podtune.sft.source.model import Origin, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS_PER_BATCH = 4096  # with a vocabulary of 128k that is 2 GiB of fp32 logits
SAMPLES = 20
MOST_KINDS = 20  # more values than that are not kinds of questions

Row = dict[str, Any]


@dataclass(frozen=True)
class Loss:
    """Mean cross-entropy over the answers' ``tokens``, and its exponential; None where nothing was scored."""

    loss: float | None
    perplexity: float | None
    tokens: int | None
    rows: int


@dataclass(frozen=True)
class Score:
    """One model's result; ``exact_match`` is None where no row has a prompt and a reference."""

    exact_match: float | None
    loss: Loss

    def to_json(self) -> Json:
        """Make the object in run.json, without what was not measured."""
        figures = {"exact_match": self.exact_match, **vars(self.loss)}
        return {key: value for key, value in figures.items() if value is not None}


@dataclass(frozen=True)
class Sample:
    """One held-out row with its reference and the answers of both models."""

    prompt: str
    reference: str | None
    base: str
    tuned: str


@dataclass(frozen=True)
class Kinds:
    """Exact match by the rows' column ``kind``, and the score of each kind's most frequent reference."""

    most_frequent_answer: float
    by_kind: dict[str, dict[str, float]] | None  # rows, base and tuned of each; None of a single kind


@dataclass(frozen=True)
class Comparison:
    """Base and tuned model on the same rows; ``kinds`` is None if there are none, or too many."""

    rows: int
    base: Score
    tuned: Score
    kinds: Kinds | None
    samples: list[Sample]

    def to_json(self) -> Json:
        """Make ``measurements.answers`` of run.json."""
        record: Json = {"rows": self.rows, "base": self.base.to_json(), "tuned": self.tuned.to_json()}
        if self.kinds:
            record |= {key: value for key, value in vars(self.kinds).items() if value is not None}
        return record | {"samples": [vars(sample) for sample in self.samples]}


def compare_with_base(
    base: Origin,
    tuned: Path,
    tokenizer: PreTrainedTokenizerBase,
    eval_rows: Sequence[Row],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 32,
    trust_remote_code: bool = False,
) -> Comparison:
    """Score both models on the same rows, one after the other so that only one is in memory."""
    scores: dict[str, Score] = {}
    answers: dict[str, list[str]] = {}
    for which, origin in (("base", base), ("tuned", locate_model(tuned))):
        model = on_device(load_model(origin, trust_remote_code=trust_remote_code))
        answers[which] = answers_to(
            model, tokenizer, eval_rows, batch_size=batch_size, max_new_tokens=max_new_tokens
        )
        scores[which] = Score(
            exact_match(answers[which], eval_rows),
            loss_of(model, tokenizer, eval_rows, batch_size=batch_size),
        )
        del model
        gc.collect()
    samples = [
        Sample(as_text(prompt), reference, answers["base"][index], answers["tuned"][index])
        for index, (prompt, reference) in enumerate(map(prompt_and_answer, eval_rows[:SAMPLES]))
        if prompt
    ]
    return Comparison(len(eval_rows), scores["base"], scores["tuned"], by_kind(answers, eval_rows), samples)


def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[str | Messages],
    max_new_tokens: int = 64,
) -> list[str]:
    """Answer ``conversations`` greedily as one batch, in their order."""
    return answer(model, tokenizer, conversations, Sampling(max_new_tokens=max_new_tokens, temperature=0.0))


def answers_to(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    batch_size: int,
    max_new_tokens: int,
) -> list[str]:
    """Answer each row greedily, empty without a prompt. Prompts of like length share a batch."""
    prompts = {index: prompt for index, row in enumerate(rows) if (prompt := prompt_and_answer(row)[0])}
    answers = [""] * len(rows)
    for batch in by_length(prompts, lambda index: len(as_text(prompts[index])), batch_size):
        for index, text in zip(
            batch, sample_answers(model, tokenizer, [prompts[i] for i in batch], max_new_tokens), strict=True
        ):
            answers[index] = text
    return answers


def exact_match(answers: Sequence[str], rows: Sequence[Row]) -> float | None:
    """Compute the share of answers that equal the reference after :func:`normalised`.

    None if no row has a prompt and a reference.
    """
    pairs = [
        (text, reference)
        for text, (prompt, reference) in zip(answers, map(prompt_and_answer, rows), strict=True)
        if prompt and reference
    ]
    if not pairs:
        return None
    return sum(normalised(text) == normalised(reference) for text, reference in pairs) / len(pairs)


def by_kind(answers: dict[str, list[str]], rows: Sequence[Row]) -> Kinds | None:
    """Score the answers of each model by kind; rows without a kind are one."""
    kinds: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        prompt, reference = prompt_and_answer(row)
        if prompt and reference:
            kinds.setdefault(str(row.get("kind", "")), []).append(index)
    if not kinds or len(kinds) > MOST_KINDS:
        return None
    references = [normalised(prompt_and_answer(row)[1] or "") for row in rows]
    frequent = sum(Counter(references[i] for i in of_kind).most_common(1)[0][1] for of_kind in kinds.values())
    matches = {
        kind: {"rows": len(of_kind)}
        | {
            which: sum(normalised(texts[i]) == references[i] for i in of_kind) / len(of_kind)
            for which, texts in answers.items()
        }
        for kind, of_kind in sorted(kinds.items())
    }
    return Kinds(frequent / sum(map(len, kinds.values())), matches if len(kinds) > 1 else None)


def normalised(text: str) -> str:
    """Drop case, punctuation, articles and repeated space, as SQuAD does (Rajpurkar et al. 2016, 6.1)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def loss_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], *, batch_size: int = 32
) -> Loss:
    """Compute the mean cross-entropy over the answers' tokens, and its exponential.

    Where there is no prompt, the whole text is scored.
    """
    import torch

    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    encoded = []
    for row in rows:
        prompt, reference = prompt_and_answer(row)
        if reference:
            row_ids, scored = scored_ids(tokenizer, prompt, reference)
            encoded.append((row_ids[:context], scored[:context]))
    total, tokens = 0.0, 0
    training = model.training
    model.eval()
    with torch.inference_mode():
        for batch in by_length(encoded, lambda row: len(row[0]), batch_size, TOKENS_PER_BATCH):
            longest = max(len(row) for row, _ in batch)
            ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in batch], device=model.device)
            mask = torch.tensor(
                [[1] * len(row) + [0] * (longest - len(row)) for row, _ in batch], device=model.device
            )
            answers = torch.tensor(
                [mark + [False] * (longest - len(mark)) for _, mark in batch], device=model.device
            )[:, 1:]
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            total += float(
                torch.nn.functional.cross_entropy(
                    logits[answers].float(), ids[:, 1:][answers], reduction="sum"
                )
            )
            tokens += int(answers.sum())
    model.train(training)
    if not tokens:
        return Loss(None, None, None, len(rows))
    loss = total / tokens
    return Loss(loss, math.exp(min(loss, 700.0)), tokens, len(rows))


def as_text(prompt: str | Messages) -> str:
    """Show a prompt: the last message's content, or the text."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move ``model`` to the GPU if there is one and it is not there (or quantized) yet."""
    import torch

    if torch.cuda.is_available() and model.device.type == "cpu":
        return model.to("cuda")
    return model
