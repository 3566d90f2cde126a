"""Generate answers in batches: left padding, stop tokens of model and tokenizer, greedy or sampled."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from podtune.run.errors import UsageError, warn
from podtune.sft.data.shapes import Messages
from podtune.sft.model.template import prompt_ids, stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# where neither the caller nor the model's generation config says how long an answer may be
FALLBACK_NEW_TOKENS = 256


@dataclass(frozen=True)
class Sampling:
    """Sampling of tokens. None leaves it to the model's generation config; temperature 0 is greedy."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """Keyword arguments of ``model.generate``."""
        configured = model.generation_config
        sample = bool(configured.do_sample) if self.temperature is None else self.temperature > 0
        sample = sample or (self.temperature is None and self.top_p is not None)
        chosen: dict[str, Any] = {"do_sample": sample, "max_new_tokens": self.longest(model)}
        if not sample:  # the sampling values of a model's own config would only draw warnings
            return chosen | {"temperature": None, "top_p": None, "top_k": None}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return chosen | {key: value for key, value in given.items() if value is not None}

    def longest(self, model: PreTrainedModel) -> int:
        """Return the longest answer in tokens."""
        return self.max_new_tokens or model.generation_config.max_new_tokens or FALLBACK_NEW_TOKENS


Item = TypeVar("Item")


def by_length(
    items: Iterable[Item], length: Callable[[Item], int], batch_size: int, most: int | None = None
) -> Iterator[list[Item]]:
    """Yield batches of like length, which need the least padding; fixed by the items alone.

    ``most``: a batch's items times its longest length may not pass it, unless the batch is one item.
    """
    batch: list[Item] = []
    for item in sorted(items, key=length):
        if batch and (len(batch) == batch_size or (most and (len(batch) + 1) * length(item) > most)):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str | Messages],
    sampling: Sampling,
    *,
    streamer: Any = None,
) -> list[str]:
    """Generate one batch of answers, without the stop token.

    The same prompts, sampling and seed give the same answers. A prompt longer than the context less the
    answer keeps its end (see :func:`room`).
    """
    import torch

    space = room(model, sampling)
    rows = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    if cut := sum(len(row) > space for row in rows):
        warn(f"{cut} prompts are longer than {space} tokens; only their ends are read")
        rows = [row[-space:] for row in rows]
    stops = stop_token_ids(tokenizer, model.generation_config)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stops[0]
    longest = max(1, *map(len, rows))
    ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    torch.manual_seed(sampling.seed)
    training = model.training
    model.eval()
    with torch.inference_mode():
        generated = model.generate(
            input_ids=ids,
            attention_mask=mask,
            eos_token_id=stops,
            pad_token_id=padding,
            streamer=streamer,
            **sampling.arguments(model),
        )
    model.train(training)
    answers = [
        list(itertools.takewhile(lambda token: token not in stops, row))
        for row in generated[:, longest:].tolist()
    ]
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in answers]


def room(model: PreTrainedModel, sampling: Sampling) -> int:
    """Count the tokens that a prompt may have so that the longest answer fits into the context.

    Raises:
        UserError: the answer alone would fill it.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    longest = sampling.longest(model)
    if longest >= context:
        raise UsageError(
            f"{longest} new tokens leave no room for a prompt: the model's context is {context} tokens",
            where="max_new_tokens",
            fix=f"ask for at most {context // 2}",
        )
    return context - longest
