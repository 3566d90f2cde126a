"""From the configuration to the token rows that are trained and evaluated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import DATA, USAGE, UserError
from podtune.sft.data import source
from podtune.sft.data.cache import default_folder_if_usable

if TYPE_CHECKING:
    import datasets

    from podtune.sft.config.resolve import Arguments


@dataclass(frozen=True)
class Inputs:
    """Token rows (``input_ids``, ``labels``) to train and evaluate on, the raw eval rows, and facts for the
    record.
    """

    train: datasets.Dataset
    eval: datasets.Dataset | None
    eval_rows: datasets.Dataset | None
    facts: dict[str, Any]
    warnings: tuple[str, ...]


def check_sources(values: dict[str, Any]) -> None:
    """Training and evaluation set, before torch is imported. Raises :class:`UserError`."""
    streaming = next((key for key in ("dataset_streaming", "streaming") if values.get(key)), None)
    if streaming and (values.get("datasets") or source.local_path(str(values.get("dataset_name"))) is None):
        raise UserError(
            "a streamed set cannot be trained: rows are tokenised and counted before the model is loaded",
            where=streaming,
            fix="leave it off; a slice, such as dataset_train_split: train[:100000], keeps a large set small",
        )
    for each in source.sources(values):
        source.check_source(each, text_field=values.get("dataset_text_field") or "text")


def prepare(arguments: Arguments, tokenizer: Any, vocabulary: int) -> Inputs:
    """Load, tokenise and (if asked) pack. The result is the same on every rank; the first one fills the
    cache.

    ``vocabulary`` is the number of rows of the model's embedding.

    Raises:
        UserError: no row would be trained, or there is nothing to evaluate on although evaluation is asked
        for.
    """
    from podtune.sft.data import rows as data

    training, run = arguments.training, arguments.run
    values = arguments.resolved()
    named = source.sources(values)
    raw, raw_eval = (*(source.load_split(each) for each in named), None)[:2]
    if raw_eval is None and (size := run.eval_split_size):
        parts = split_off(raw, size, training.seed)
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
        max_length=None if training.packing else training.max_length,
        truncation_mode=training.truncation_mode,
        completion_only_loss=training.completion_only_loss,
        assistant_only_loss=training.assistant_only_loss,
        dataset_text_field=training.dataset_text_field,
    )
    shape = data.shape_of(raw, options.dataset_text_field)
    warnings = data.check_tokenizer(tokenizer, vocabulary, options, shape) + data.unknown_roles(
        raw, tokenizer, shape
    )
    cache = Path(run.tokenized_cache) if run.tokenized_cache else default_folder_if_usable()
    with data.naming(named[0]):
        train = data.prepare(raw, tokenizer, options, cache_dir=cache)
    warnings += train.stats.warnings(options)
    if len(train.dataset) == 0:
        raise UserError(
            (f"none of the {len(raw)} rows has a token to train"),
            where="dataset_name",
            fix="podtune data inspect shows why",
            code=DATA,
        )
    facts: dict[str, Any] = {
        "path": values["dataset_name"] or [part["path"] for part in values["datasets"]],
        "rows": len(train.dataset),
        "fingerprint": train.stats.fingerprint,
        "tokens": train.stats.tokens,
        "trained_tokens": train.stats.trained_tokens,
        "truncated_rows": train.stats.rows_truncated,
        "tokenizer": data.tokenizer_hash(tokenizer)[:12],  # vocabulary, rules, special tokens, chat template
    }
    rows = train.dataset
    evaluation = None
    if raw_eval is not None:
        with data.naming(named[-1]):
            held_out = data.prepare(raw_eval, tokenizer, options, cache_dir=cache)
        evaluation = held_out.dataset
        facts |= {
            "eval_rows": len(evaluation),
            "eval_fingerprint": held_out.stats.fingerprint,
            "eval_tokens": held_out.stats.tokens,
        }
    if training.packing:
        warnings += data.cut_by_packing(rows, training.max_length, training.packing_strategy)
        rows = data.pack(
            rows,
            training.max_length,
            training.packing_strategy,
            training.seed if training.shuffle_dataset else None,
        )
        facts |= data.packed_tokens(rows)  # bfd cuts long rows
        if evaluation is not None and training.eval_packing is not False:
            evaluation = data.pack(evaluation, training.max_length, training.packing_strategy, None)
    if training.shuffle_dataset:
        rows = rows.shuffle(seed=training.seed)
    if evaluation is not None:
        evaluation = filled(evaluation, training.per_device_eval_batch_size * training.world_size)
    return Inputs(rows, evaluation, raw_eval, facts, tuple(warnings))


def split_off(rows: datasets.Dataset, size: float, seed: int) -> Any:
    """``rows`` as train and test, with a share or number of rows in the latter.

    Raises:
        UserError: one of the two would be empty.
    """
    try:
        return rows.train_test_split(test_size=int(size) if size >= 1 else size, seed=seed)
    except ValueError:
        raise UserError(
            f"eval_split_size is {size:g}, and the set has {len(rows)} rows: one part would be empty",
            where="eval_split_size",
            fix="hold fewer rows out, or give --eval_dataset_name",
        ) from None


def filled(rows: datasets.Dataset, multiple: int) -> datasets.Dataset:
    """``rows`` and as many unscored copies of the first one as make the count a multiple of ``multiple``.

    Otherwise accelerate evens out the ranks' batches with scored rows, and the evaluation depends on the
    world's size.
    """
    import datasets

    missing = -len(rows) % multiple
    if not missing:
        return rows
    first = rows[0]
    unscored = datasets.Dataset.from_list(
        [first | {"labels": [-100] * len(first["input_ids"])}] * missing, features=rows.features
    )
    return datasets.concatenate_datasets([rows, unscored])
