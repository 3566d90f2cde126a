"""From the configuration to the token rows that are trained and evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.run.errors import CONFIG, USAGE, UserError
from training.sft import data

if TYPE_CHECKING:
    import datasets

    from training.sft.build import Arguments


@dataclass(frozen=True)
class Inputs:
    """Token rows (``input_ids``, ``labels``) to train and evaluate on, the raw eval rows, and facts for the record."""

    train: datasets.Dataset
    eval: datasets.Dataset | None
    eval_rows: datasets.Dataset | None
    facts: dict[str, Any]


def training_source(values: dict[str, Any]) -> data.Source:
    """The training set that the settings or the parsed arguments name."""
    return data.Source(
        name=values.get("dataset_name"),
        config=values.get("dataset_config"),
        split=values.get("dataset_train_split") or "train",
        streaming=bool(values.get("dataset_streaming") or values.get("streaming")),
        mixture=tuple(values.get("datasets") or ()),
        text_field=values.get("dataset_text_field") or "text",
    )


def eval_source(values: dict[str, Any]) -> data.Source | None:
    """The set to evaluate on: the one named, else the split that lies beside the training split, else None."""
    if named := values.get("eval_dataset_name"):
        return data.Source(name=named, split=values.get("dataset_test_split") or "test", text_field=values.get("dataset_text_field") or "text")
    return data.find_eval_split(training_source(values), prefer=values.get("dataset_test_split") or "test")


def check_sources(values: dict[str, Any]) -> None:
    """Both sets, before torch is imported. Raises :class:`UserError`."""
    data.check_source(training_source(values))
    other = eval_source(values)
    if other is not None:
        data.check_source(other)


def prepare(arguments: Arguments, tokenizer: Any) -> Inputs:
    """Load, tokenise and (if asked) pack. The result is the same on every rank; the first one fills the cache.

    Raises:
        UserError: no row would be trained, or there is nothing to evaluate on although evaluation is asked for.
    """
    training, run = arguments.training, arguments.run
    values = arguments.resolved() | {"datasets": [vars(part) for part in arguments.mixture.datasets]}
    raw = data.load_split(training_source(values))
    other = eval_source(values)
    raw_eval = data.load_split(other) if other is not None else None
    if raw_eval is None and (size := run.eval_split_size or arguments.mixture.test_split_size):
        parts = raw.train_test_split(test_size=int(size) if size >= 1 else size, seed=training.seed)
        raw, raw_eval = parts["train"], parts["test"]
    if raw_eval is None and (training.eval_strategy != "no" or run.answer_rows):
        raise UserError(
            "evaluation is asked for and there is no eval split",
            where="eval_strategy" if training.eval_strategy != "no" else "answer_rows",
            fix="--eval_dataset_name FILE, or --eval_split_size 0.05 to hold rows out",
            code=USAGE,
        )
    if raw_eval is not None and run.max_eval_rows:
        raw_eval = raw_eval.select(range(min(run.max_eval_rows, len(raw_eval))))
    options = data.TokenizeOptions(
        max_length=training.max_length if not training.packing else None,
        truncation_mode=training.truncation_mode,
        completion_only_loss=training.completion_only_loss,
        assistant_only_loss=training.assistant_only_loss,
        dataset_text_field=training.dataset_text_field,
    )
    train = data.tokenize(raw, tokenizer, options, cache_dir=run.tokenized_cache)
    evaluation = None if raw_eval is None else data.tokenize(raw_eval, tokenizer, options, cache_dir=run.tokenized_cache)
    if len(train) == 0:
        raise UserError(
            f"none of the {len(raw)} rows has a token to train", where="dataset_name", fix="look at them: podtune data inspect", code=CONFIG
        )
    facts = {
        "path": values.get("dataset_name") or [part["path"] for part in values["datasets"]],
        "rows": len(train),
        "rows_read": len(raw),
        "fingerprint": data.fingerprint(train),
        "tokens": data.token_count(train),
    }
    if evaluation is not None:
        facts |= {"eval_rows": len(evaluation), "eval_fingerprint": data.fingerprint(evaluation)}
    if training.shuffle_dataset:
        train = train.shuffle(seed=training.seed)
    if training.packing:
        train = data.pack(train, training.max_length, training.packing_strategy, training.seed)
        if evaluation is not None and training.eval_packing is not False:
            evaluation = data.pack(evaluation, training.max_length, training.packing_strategy, training.seed)
    return Inputs(train, evaluation, raw_eval, facts)
