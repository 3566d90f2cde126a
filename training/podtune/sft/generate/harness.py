"""Scores of models on the tasks of lm-evaluation-harness, the extra ``podtune[eval]``."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import ConfigError, OutOfMemory, Unavailable, near, out_of_memory, working
from podtune.run.record import Json, mapping, number

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    LoadModel = Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]


@dataclass(frozen=True)
class EvalSettings:
    """Settings that decide a score: scores under different ones cannot be compared."""

    limit: int | None = None  # questions of a task
    fewshot: int | None = None  # examples before a question; None: as many as the task says
    chat_template: bool = False
    seed: int = 0

    def for_record(self) -> Json:
        """These and the harness's version, as run.json has them."""
        return asdict(self) | {"harness": f"lm-eval {version('lm-eval')}"}


@dataclass(frozen=True)
class TaskScore:
    """Score on a task, of whose ``of`` questions ``rows`` were asked; ``NAME_stderr`` belongs to ``NAME``."""

    rows: int | None
    of: int | None
    fewshot: int | None
    version: Any  # a number or a text, as the task has it
    metrics: dict[str, float]

    def for_record(self) -> Json:
        """What is known beside the metrics."""
        return {key: value for key, value in vars(self).items() if value is not None and key != "metrics"}


def find_tasks(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Find all of ``names`` among the harness's tasks and those of ``folder``, before any model is loaded.

    Raises:
        ConfigError: no such folder or task.
    """
    if folder is not None and not folder.is_dir():
        raise ConfigError("no such folder", where=f"--task-folder {folder}")
    working("looking for the tasks")
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None:
        # the harness's own tasks are thousands of files, and take many seconds to read
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=None if folder is None else str(folder))
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
    task: str,
    manager: TaskManager,
    settings: EvalSettings,
    batch_size: str = "8",
) -> dict[str, TaskScore]:
    """Score ``model`` on ``task``, and on each part of it if it is a group; return the scores by task.

    Raises:
        UserError: the task's data cannot be had, the task does not fit the settings, or memory is full.
    """
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    # simple_evaluate runs git for the commit of the current folder, which prints "fatal: not a git
    # repository" in most; it has no option against that, and the commit would be of no use here.
    evaluator.get_git_commit_hash = lambda: None
    # The harness passes the task's own limit as max_length, over which the model's max_new_tokens would win.
    model.generation_config.max_new_tokens = None
    seeds = dict.fromkeys(
        ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed"), settings.seed
    )
    try:
        results = evaluator.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=[task],
            task_manager=manager,
            num_fewshot=settings.fewshot,
            limit=settings.limit,
            apply_chat_template=settings.chat_template,
            log_samples=False,
            **seeds,
        )
    except ConnectionError as error:
        raise Unavailable(
            f"its data cannot be had: {_first_line(error)}",
            where=f"task {task}",
            fix="let this machine reach the hub, or name a task whose data is a file",
        ) from error
    except (OSError, ValueError, AssertionError) as error:  # so it refuses a task or its data
        raise ConfigError(f"{type(error).__name__}: {_first_line(error)}", where=f"task {task}") from error
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of GPU memory with batches of {batch_size}",
            where=f"task {task}",
            fix="a smaller --batch-size",
        ) from error
    return {name: _score_of(results, name) for name in results["results"]}


def evaluate(
    names: Sequence[str],
    models: Mapping[str, LoadModel],
    score_task: Callable[[PreTrainedModel, PreTrainedTokenizerBase, str], dict[str, TaskScore]],
    settings: EvalSettings,
    *,
    earlier: Json | None,
    save: Callable[[Json], None],
) -> Json:
    """Score every model on every task, with one model in memory at a time.

    Args:
        names: the tasks.
        models: by column, such as ``base`` and ``tuned``, the function that loads the model.
        score_task: :func:`score` for a model, its tokenizer and a task.
        earlier: the result of an earlier call: its scores under the same settings are not computed again.
        save: called with the result so far after each task, so that a killed evaluation resumes there.

    Returns:
        As run.json has it. ``asked``: by task its settings, and the ``models`` that were scored. ``scores``:
        by task, and by part of a group, its settings as ``asked``, ``rows``, ``of``, ``fewshot``,
        ``version``, and the metrics of each model under its column.
    """
    same = settings.for_record()
    asked, scores = ({**mapping((earlier or {}).get(key))} for key in ("asked", "scores"))
    result = {"asked": asked, "scores": scores}
    for column, load in models.items():
        todo = [task for task in names if column not in _models_of(asked.get(task), same)]
        if not todo:
            continue
        model, tokenizer = load()
        for task in todo:
            working(f"{column}: {task}")
            for part, scored in score_task(model, tokenizer, task).items():
                others = mapping(scores.get(part))
                if mapping(others.get("asked")) != same:
                    others = {}
                scores[part] = {**others, "asked": same, **scored.for_record(), column: scored.metrics}
            asked[task] = {**same, "models": [*_models_of(asked.get(task), same), column]}
            save(result)
        del model
        gc.collect()
    return result


def _models_of(asked: object, same: Json) -> list[str]:
    """Columns that were scored under the ``same`` settings."""
    entry = mapping(asked)
    return [*entry.get("models", ())] if entry.items() >= same.items() else []


def _score_of(results: Mapping[str, Any], name: str) -> TaskScore:
    """Read one task's score from the harness's results, in which metrics are called ``METRIC,FILTER``."""
    row, metrics = results["results"][name], {}
    for key, value in row.items():
        metric, comma, filtered = key.partition(",")
        if comma and (finite := number(value)) is not None and math.isfinite(finite):
            metrics[metric if filtered == "none" else f"{metric} ({filtered})"] = finite
    counted = results.get("n-samples", {}).get(name, {})
    return TaskScore(
        rows=counted.get("effective", row.get("sample_len")),
        of=counted.get("original"),
        fewshot=results.get("n-shot", {}).get(name),
        version=results.get("versions", {}).get(name),
        metrics=metrics,
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
