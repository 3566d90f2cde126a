"""Scores of models on the tasks of lm-evaluation-harness, the extra ``podtune[eval]``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, Unavailable, first_line, near, working
from podtune.run.record import Json, number

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Python's own random is left at the harness's seed, 0: then the default is that of its command line.
SEEDS = ("numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass(frozen=True)
class EvalSettings:
    """Settings that decide a score: scores under different ones cannot be compared."""

    limit: int | None = None  # questions of a task
    fewshot: int | None = None  # examples before a question; None: as many as the task says
    chat_template: bool = False
    seed: int = 1234

    @property
    def how(self) -> str:
        return "in the chat template" if self.chat_template else "as bare text"

    def for_record(self) -> dict[str, int | str | None]:
        """These and the harness's version, as run.json has them."""
        return asdict(self) | {"harness": f"lm-eval {version('lm-eval')}"}


def find_tasks(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Find ``names`` among the harness's tasks and those of ``folder``, before any model is loaded.

    Raises :class:`ConfigError` for one that is not there.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError("no such folder", where=f"--task-folder {folder}")
    with working("looking for the tasks"):
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        path = None if folder is None else str(folder)
        # the harness's own tasks are thousands of files, and take many seconds to read
        manager = TaskManager(include_path=path, include_defaults=path is None)
        if not set(names) <= set(manager.all_tasks):
            manager = TaskManager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            raise ConfigError(
                f"no task is called {name}{near(name, manager.all_tasks)}",
                where="--tasks",
                fix="see lm-eval ls tasks, or give --task-folder with YAML files of your own",
            )
    return manager


def score(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: Sequence[str],
    manager: TaskManager,
    settings: EvalSettings,
    batch_size: str = "8",
) -> Json:
    """Score ``model`` on the tasks ``names``; return the harness's own results. Raises :class:`UserError`."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    # simple_evaluate runs git for the commit of the current folder, which prints "fatal: not a git
    # repository" in most; it has no option against that, and the commit would be of no use here.
    evaluator.get_git_commit_hash = lambda: None
    # The harness passes the task's own limit as max_length, over which the model's max_new_tokens would win.
    model.generation_config.max_new_tokens = None
    where = f"--tasks {','.join(names)}"
    try:
        results: Json = evaluator.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(names),
            task_manager=manager,
            num_fewshot=settings.fewshot,
            limit=settings.limit,
            apply_chat_template=settings.chat_template,
            log_samples=False,
            **dict.fromkeys(SEEDS, settings.seed),
        )
    except ConnectionError as error:
        raise Unavailable(
            f"a task's data cannot be had: {first_line(error)}",
            where=where,
            fix="let this machine reach the hub, or name a task whose data is a file",
        ) from error
    except (OSError, ValueError, AssertionError) as error:  # so it refuses a task or its data
        raise ConfigError(f"{type(error).__name__}: {first_line(error)}", where=where) from error
    return results


def measurement(results: Mapping[str, Json], names: Sequence[str], settings: EvalSettings) -> Json:
    """Summarise the harness's results by column, such as ``base`` and ``tuned``, as run.json has them.

    Returns:
        ``asked``: by task its settings, and the ``models`` that were scored. ``scores``: by task, and by part
        of a group, its settings as ``asked``, ``rows``, ``of``, ``fewshot``, ``version``, and the metrics of
        each model under its column; ``NAME_stderr`` belongs to ``NAME``.
    """
    same = settings.for_record()
    first = next(iter(results.values()))
    scores = {}
    for task, row in first["results"].items():
        counted = first.get("n-samples", {}).get(task, {})
        known = {
            "rows": counted.get("effective", row.get("sample_len")),  # were asked
            "of": counted.get("original"),  # that the task has
            "fewshot": first.get("n-shot", {}).get(task),
            "version": first.get("versions", {}).get(task),
        }
        scores[task] = {"asked": same} | {key: value for key, value in known.items() if value is not None}
        scores[task] |= {column: _metrics(result["results"][task]) for column, result in results.items()}
    return {"asked": {name: {**same, "models": [*results]} for name in names}, "scores": scores}


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Read the finite metrics of a task, which the harness calls ``METRIC,FILTER``."""
    metrics = {}
    for key, value in row.items():
        metric, comma, filtered = key.partition(",")
        if comma and (finite := number(value)) is not None and math.isfinite(finite):
            metrics[metric if filtered == "none" else f"{metric} ({filtered})"] = finite
    return metrics
