"""podtune's own arguments of a fine-tune, beside TRL's. Needs no torch.

A field has its help, and in its type choices, bounds and environment variable. After a change: ``python
scripts/config_keys.py`` and ``python scripts/config_docs.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from podtune.run.distributed import DEFAULT_TIMEOUT_S

T = TypeVar("T")
STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad-op", "hsdp")


def _key(default: T, help: str) -> T:
    return field(default=default, metadata={"help": help})


@dataclass
class RunArguments:
    """The arguments of a run beyond TRL's script, SFT, model and mixture arguments."""

    strategy: Annotated[str, {"choices": ["auto", *STRATEGIES]}] = _key(
        "auto",
        "how the work is distributed: auto (single for one process, ddp for more) or " + " ".join(STRATEGIES),
    )
    num_processes: Annotated[int | None, {"at_least": 1}] = _key(
        None, "processes that the run is made for; another number is refused"
    )
    global_batch_size: Annotated[int | None, {"at_least": 1}] = _key(
        None,
        "rows of one optimizer step over all processes; gradient_accumulation_steps is solved for the world",
    )
    eval_dataset_name: str | None = _key(
        None,
        "file, folder or hub name to evaluate on, or several by name, {name: file}; "
        "default: the eval, test or validation split found",
    )
    eval_split_size: Annotated[float | None, {"above": 0}] = _key(
        None, "share (below 1) or number of rows held out of the training set when there is no eval split"
    )
    columns: dict[str, str] | None = _key(  # noqa: RUF009 - a field, as the others
        None, "new names of columns, name: new name, such as {instruction: prompt, output: completion}"
    )
    drop_incomplete: bool = _key(
        False, "leave out rows that lack a value; otherwise they are counted, named and refused"
    )
    max_eval_rows: Annotated[int | None, {"at_least": 1}] = _key(
        None, "evaluate on the first N rows of the eval split"
    )
    early_stopping_patience: Annotated[int | None, {"at_least": 1}] = _key(
        None, "stop after this many evaluations in a row without a better metric_for_best_model (eval_loss)"
    )
    early_stopping_threshold: Annotated[float, {"at_least": 0}] = _key(
        0.0, "how much an evaluation must improve to count as better"
    )
    answer_rows: Annotated[int, {"at_least": 0}] = _key(
        0,
        "rows to answer with the base and the tuned model at the end: sample answers, exact match, "
        "perplexity",
    )
    answer_max_new_tokens: Annotated[int, {"at_least": 1}] = _key(64, "longest answer of those, in tokens")
    auto_resume: bool = _key(
        True, "continue from the newest complete checkpoint in output_dir, if there is one"
    )
    publish: str | None = _key(
        None,
        "URL (s3://, gs://, ...) below which RUN_NAME/ gets checkpoints, final/, run.json and metrics.jsonl; "
        "a run without a checkpoint in output_dir resumes from the newest there",
    )
    allow_resume_change: bool = _key(
        False, "resume although the world size, batch, schedule, data or model changed since the checkpoint"
    )
    aim_repo: Annotated[str | None, {"env": "AIM_REPO"}] = _key(
        None, "Aim repository (folder, or aim://host:port) to mirror the metrics to"
    )
    async_save: bool = _key(
        True, "write checkpoints beside the next steps, from a copy in /dev/shm where one has room"
    )
    timeout_s: Annotated[float, {"above": 0}] = _key(
        DEFAULT_TIMEOUT_S, "longest wait for another rank, in the rendezvous and in a collective"
    )
    memory_check: bool = _key(
        True, "stop before weights are read if the training is estimated not to fit the GPU"
    )
    loss: Annotated[str, {"choices": ["lean", "trl"]}] = _key(
        "lean", "lean (podtune's, the same value for less work) or trl (TRL's own)"
    )
    tokenized_cache: str | None = _key(
        None, "folder for tokenised data; default: the Hugging Face cache (HF_HOME)"
    )


@dataclass(frozen=True)
class ResumeOptions:
    """The checkpoint to resume from: the one at ``path``, else the ``newest`` complete one, else none."""

    path: Path | None = None
    newest: bool = True
    expected: bool = False  # say so if there is none
    allow_change: bool = False  # resume although world, batch, schedule, data or model have changed

    @classmethod
    def of(cls, named: str | None, run: RunArguments) -> ResumeOptions:
        """Read transformers' resume_from_checkpoint, a path or a truth value, beside our own keys."""
        word = str(named).lower()
        path = Path(named) if named and word not in ("true", "false") else None
        newest = run.auto_resume and word != "false"
        return cls(path, newest, word == "true", run.allow_resume_change)


def limits() -> dict[str, dict[str, Any]]:
    """Return by key its help, and where there are any ``choices``, ``at_least``, ``above`` and ``env``."""
    hints = get_type_hints(RunArguments, include_extras=True)
    extras: dict[str, dict[str, Any]] = {
        name: getattr(hint, "__metadata__", ({},))[0] for name, hint in hints.items()
    }
    return {item.name: {"help": item.metadata["help"], **extras[item.name]} for item in fields(RunArguments)}
