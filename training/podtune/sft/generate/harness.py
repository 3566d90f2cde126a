"""Scores on the tasks of lm-evaluation-harness (the extra ``podtune[eval]``): tasks it brings, or a folder of
one's own.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podtune.run.errors import (
    ConfigError,
    OutOfMemory,
    Unavailable,
    near,
    working,
)
from podtune.run.record import Json, mapping, number

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Asking:
    """How every task is asked; scores of other ways cannot be compared."""

    limit: int | None = None  # questions of a task
    fewshot: int | None = None  # examples before a question; None: as many as the task says
    chat_template: bool = False
    seed: int = 0


class Harness:
    """The tasks called ``names``, found before any model is read."""

    def __init__(self, names: Sequence[str], folder: Path | None, asking: Asking) -> None:
        """
        Raises:
            UserError: no such folder or task.
        """
        if folder is not None and not folder.is_dir():
            raise ConfigError("no such folder", where=f"--task-folder {folder}")
        working("looking for the tasks")
        self.names, self.asking = list(dict.fromkeys(names)), asking
        self.manager = _manager(self.names, folder)

    def score(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, batch_size: str = "8"
    ) -> dict[str, Json]:
        """Scores of ``model`` by task: of ``task``, and of those that it consists of if it is a group.

        Each has ``rows`` and ``of`` (questions asked, and there are), ``fewshot``, ``version`` and
        ``metrics``, by name the value, with its standard error as ``NAME_stderr``.

        Raises:
            UserError: the task's data cannot be had, or it cannot be asked in this way.
        """
        import torch
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM

        # it asks git for the commit of whatever folder this is, which says "fatal" where there is none
        evaluator.get_git_commit_hash = lambda: None

        # the task says how long an answer may be, and the harness how it is drawn
        model.generation_config.max_new_tokens = None
        asking = self.asking
        try:
            results = evaluator.simple_evaluate(
                HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
                tasks=[task],
                task_manager=self.manager,
                num_fewshot=asking.fewshot,
                limit=asking.limit,
                apply_chat_template=asking.chat_template,
                log_samples=False,
                random_seed=asking.seed,
                numpy_random_seed=asking.seed,
                torch_random_seed=asking.seed,
                fewshot_random_seed=asking.seed,
            )
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"out of GPU memory with batches of {batch_size}",
                where=f"task {task}",
                fix="a smaller --batch-size",
            ) from error
        except ConnectionError as error:
            raise Unavailable(
                f"its data cannot be had: {_first_line(error)}",
                where=f"task {task}",
                fix="let this machine reach the hub, or name a task whose data is a file",
            ) from error
        except (OSError, ValueError, AssertionError) as error:  # as it refuses a task or its data
            raise ConfigError(
                f"{type(error).__name__}: {_first_line(error)}", where=f"task {task}"
            ) from error
        return {name: _scores(results, name) for name in results["results"]}


def version() -> str:
    """What asked: name and version of the harness."""
    from importlib.metadata import version as of

    return f"lm-eval {of('lm-eval')}"


def evaluate(
    harness: Harness,
    models: Mapping[str, Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]]],
    kept: Mapping[str, Any] | None,
    keep: Callable[[Json], None],
    *,
    batch_size: str = "8",
) -> Json:
    """Every task asked of every model, one model in memory at a time.

    Args:
        models: by the name of the column, such as ``base`` and ``tuned``, what loads it.
        kept: what an earlier call returned: scores that were asked in the same way are not asked for again.
        keep: called with the result so far after each task, so that a killed evaluation goes on.

    Returns:
        ``asked``: by task how (:class:`Asking` and the harness), and of which models; ``scores``: by task,
        a group's parts too, how it was ``asked``, ``rows``, ``of``, ``fewshot``, ``version``, and the
        metrics of each model under its name.
    """
    way = asdict(harness.asking) | {"harness": version()}
    asked, scores = ({**mapping((kept or {}).get(key))} for key in ("asked", "scores"))
    result = {"asked": asked, "scores": scores}
    for name, load in models.items():
        left = [
            task
            for task in harness.names
            if not (_same_way(asked.get(task), way) and name in asked[task].get("models", ()))
        ]
        if not left:
            continue
        model, tokenizer = load()
        for task in left:
            working(f"{name}: {task}")
            for part, score in harness.score(model, tokenizer, task, batch_size).items():
                metrics = score.pop("metrics")
                earlier = mapping(scores.get(part))
                earlier = earlier if _same_way(earlier.get("asked"), way) else {}
                scores[part] = {**earlier, "asked": way, **score, name: metrics}
            others = asked[task].get("models", ()) if _same_way(asked.get(task), way) else ()
            asked[task] = {**way, "models": [*others, name]}
            keep(result)
        del model
        gc.collect()
    return result


def _same_way(asked: object, way: Json) -> bool:
    return {key: mapping(asked).get(key) for key in way} == way


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Reads the folder's tasks alone if they are all: the harness' own are thousands of files."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is not None:
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


def _scores(results: Json, name: str) -> Json:
    """One task's row of what the harness returns, whose metrics are called ``METRIC,FILTER``."""
    row, metrics = results["results"][name], {}
    for key, value in row.items():
        metric, comma, filtered = key.partition(",")
        if comma and (figure := number(value)) is not None and math.isfinite(figure):
            metrics[metric if filtered == "none" else f"{metric} ({filtered})"] = figure
    counted = results.get("n-samples", {}).get(name, {})
    facts = {
        "rows": counted.get("effective", row.get("sample_len")),
        "of": counted.get("original"),
        "fewshot": results.get("n-shot", {}).get(name),
        "version": results.get("versions", {}).get(name),
    }
    return {key: value for key, value in facts.items() if value is not None} | {"metrics": metrics}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
