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
from typing import TYPE_CHECKING, TypedDict

from podtune.sft.data.shapes import Messages, Row
from podtune.sft.generate.answers import Sampling, answer, by_length
from podtune.sft.model.load import load_model
from podtune.sft.model.template import prompt_and_answer, scored_ids
from podtune.sft.source.model import Origin, locate_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOKENS_PER_BATCH = 4096  # with a vocabulary of 128k that is 2 GiB of fp32 logits
SAMPLES = 20
MOST_KINDS = 20  # more values than that are not kinds of questions


@dataclass(frozen=True)
class Question:
    """A held-out row. Of plain text the prompt is empty and the text the reference."""

    prompt: str | Messages
    reference: str | None
    kind: str

    @classmethod
    def of(cls, row: Row) -> Question:
        """Split a row of any shape."""
        return cls(*prompt_and_answer(row), str(row.get("kind", "")))

    @property
    def text(self) -> str:
        """The last message of the prompt, or its text."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])


class Score(TypedDict, total=False):
    """One model's result, without what could not be measured; the loss is over the answers' ``tokens``."""

    exact_match: float
    loss: float
    perplexity: float
    tokens: int
    rows: int


@dataclass(frozen=True)
class Comparison:
    """Base and tuned model on the same rows; its fields are ``measurements.answers`` of run.json."""

    rows: int
    base: Score
    tuned: Score
    most_frequent_answer: float | None  # what the most frequent reference of each kind would score
    by_kind: dict[str, dict[str, float]] | None  # the rows and both exact matches of each
    samples: list[dict[str, str | None]]

    def to_json(self) -> dict[str, object]:
        """Leave out what is None."""
        return {key: value for key, value in vars(self).items() if value is not None}


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
    questions = [Question.of(row) for row in eval_rows]
    asked = [at for at, question in enumerate(questions) if question.prompt and question.reference]
    scores: dict[str, Score] = {}
    answers: dict[str, list[str]] = {}
    for which, origin in (("base", base), ("tuned", locate_model(tuned))):
        model = on_device(load_model(origin, trust_remote_code=trust_remote_code))
        texts = answers[which] = answers_to(model, tokenizer, questions, batch_size, max_new_tokens)
        match: Score = {"exact_match": _share(questions, texts, asked)} if asked else {}
        scores[which] = match | loss_of(model, tokenizer, questions, batch_size)
        # the second model must not find the first one in memory
        del model
        gc.collect()
    kinds: dict[str, list[int]] = {}
    for at in asked:
        kinds.setdefault(questions[at].kind, []).append(at)
    frequent = by_kind = None
    if 0 < len(kinds) <= MOST_KINDS:
        references = [
            Counter(normalised(questions[at].reference or "") for at in kind) for kind in kinds.values()
        ]
        frequent = sum(count.most_common(1)[0][1] for count in references) / len(asked)
    if 1 < len(kinds) <= MOST_KINDS:
        by_kind = {
            name: {"rows": len(kind)}
            | {which: _share(questions, texts, kind) for which, texts in answers.items()}
            for name, kind in sorted(kinds.items())
        }
    samples: list[dict[str, str | None]] = [
        {
            "prompt": question.text,
            "reference": question.reference,
            **{which: texts[at] for which, texts in answers.items()},
        }
        for at, question in enumerate(questions[:SAMPLES])
        if question.prompt
    ]
    return Comparison(len(questions), scores["base"], scores["tuned"], frequent, by_kind, samples)


def _share(questions: Sequence[Question], texts: Sequence[str], chosen: Sequence[int]) -> float:
    pairs = ((texts[at], questions[at].reference or "") for at in chosen)
    return sum(normalised(text) == normalised(reference) for text, reference in pairs) / len(chosen)


def answers_to(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    batch_size: int,
    max_new_tokens: int,
) -> list[str]:
    """Answer each question greedily, empty without a prompt. Prompts of like length share a batch."""
    greedy = Sampling(max_new_tokens=max_new_tokens, temperature=0.0)
    answers = [""] * len(questions)
    asked = [at for at, question in enumerate(questions) if question.prompt]
    for batch in by_length(asked, lambda at: len(questions[at].text), batch_size):
        texts = answer(model, tokenizer, [questions[at].prompt for at in batch], greedy)
        for at, text in zip(batch, texts, strict=True):
            answers[at] = text
    return answers


def normalised(text: str) -> str:
    """Drop case, punctuation, articles and repeated space, as SQuAD does (Rajpurkar et al. 2016, 6.1)."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def loss_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question], batch_size: int
) -> Score:
    """Compute ``loss``, the mean cross-entropy over the answers' ``tokens``, and its ``perplexity``.

    Where there is no prompt, the whole text is scored; where nothing is, there are the ``rows`` alone.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.utils.rnn import pad_sequence

    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    encoded = [scored_ids(tokenizer, each.prompt, each.reference) for each in questions if each.reference]
    encoded = [(ids[:context], scored[:context]) for ids, scored in encoded]
    total, tokens = 0.0, 0
    training = model.training
    model.eval()
    with torch.inference_mode():
        for batch in by_length(encoded, lambda row: len(row[0]), batch_size, TOKENS_PER_BATCH):
            rows = [(ids, scored, [True] * len(ids)) for ids, scored in batch]
            ids, scored, mask = (
                pad_sequence([torch.tensor(row) for row in column], batch_first=True).to(model.device)
                for column in zip(*rows, strict=True)
            )
            logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
            scored = scored[:, 1:]
            total += float(cross_entropy(logits[scored].float(), ids[:, 1:][scored], reduction="sum"))
            tokens += int(scored.sum())
    model.train(training)
    if not tokens:
        return {"rows": len(questions)}
    loss = total / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens, "rows": len(questions)}


def on_device(model: PreTrainedModel) -> PreTrainedModel:
    """Move ``model`` to the GPU if there is one and it is not there (or quantized) yet."""
    import torch

    if torch.cuda.is_available() and model.device.type == "cpu":
        return model.to("cuda")
    return model
