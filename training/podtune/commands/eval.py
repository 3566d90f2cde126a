"""podtune eval: scores of a run, or of any model, on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from podtune.commands.generate import load, resolve_run
from podtune.commands.options import AsJson, TrustRemoteCode
from podtune.report.draw.tables import Column, Table
from podtune.run.aim.sync import sync
from podtune.run.errors import NotFound, UsageError, UserError, creating, printable, warn
from podtune.run.follow import read_record, state
from podtune.run.record import RUN_FILE, Json, mapping, now, write_json
from podtune.sft.generate import harness
from podtune.sft.source import copies
from podtune.sft.source.model import Origin, locate_model


def eval(
    model: Annotated[str, typer.Argument(help="Folder of a run, model or adapter folder, or hub id.")],
    tasks: Annotated[str, typer.Option(help="Names of tasks or groups, with commas.", metavar="A,B,...")],
    task_folder: Annotated[
        Path | None,
        typer.Option(help="YAML files of tasks of your own; what they call in Python is run."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions a task, for a quick look.")] = None,
    fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question; default: the task's.")
    ] = None,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--bare",
            help="The form of the questions; default: as a run was trained, bare of any other model.",
        ),
    ] = None,
    base: Annotated[bool, typer.Option(help="Ask the model that a run started from, too.")] = True,
    batch_size: Annotated[str, typer.Option(help="Questions at once, or auto.")] = "8",
    seed: Annotated[int, typer.Option(help="Seed of the examples' choice and of the sampling.")] = 1234,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model the tasks of lm-evaluation-harness (pip install 'podtune[eval]').

    Of a run its final model is asked, and beside it the one that it started from, both as the run was
    trained: in its chat template, unless its rows were bare text. The scores are kept in its run.json, so
    podtune compare has them, and the run's page in the Aim repository that AIM_REPO names; the harness's own
    results are beside it in lm_eval_base.json and lm_eval_tuned.json.

    \b
    Examples:
      podtune eval runs/demo --tasks arc_easy,hellaswag --limit 200
      podtune eval runs/demo --tasks my_questions --task-folder tasks
      podtune eval runs/demo --tasks lambada_openai --bare
      podtune eval HuggingFaceTB/SmolLM3-3B --tasks gsm8k --chat-template --json
    """
    names = list(dict.fromkeys(name for name in map(str.strip, tasks.split(",")) if name))
    if not names:
        raise UsageError("there is no name in it", where="--tasks", fix="--tasks arc_easy")
    run_dir = Path(model).expanduser()
    record = read_record(run_dir)
    if record is not None and state(run_dir, record)[0] == "running":  # its end would overwrite the record
        raise NotFound(
            "the run has not ended",
            where=str(run_dir),
            fix=f"wait for it, or ask a checkpoint: podtune eval {run_dir}/checkpoint-N",
        )
    origins = {"tuned" if record else "model": locate_model(resolve_run(model))}
    if record and base:
        origins = {"base": _base(record, run_dir)} | origins
    manager = harness.find_tasks(names, task_folder)
    results, template = {}, None
    for column, origin in reversed(origins.items()):  # the tuned one first: it has the template
        asked, tokenizer = load(origin, trust_remote_code)
        template = tokenizer.chat_template = tokenizer.chat_template or template
        if chat_template is None:  # of a record that does not say how its rows were, as the model can
            trained = mapping(record.get("data")).get("chat_template", template) if record else False
            chat_template = bool(trained)
        settings = harness.EvalSettings(limit, fewshot, chat_template, seed)
        results[column] = harness.score(asked, tokenizer, names, manager, settings, batch_size=batch_size)
    results = {column: results[column] for column in origins}
    result = harness.measurement(results, names, settings)
    if record is not None:
        _save(run_dir, result, results)
    models = list(origins)
    typer.echo(json.dumps(result, indent=2) if as_json else printable(table(result, models, settings.how)))
    for task, score in result["scores"].items():
        metrics = [value for model in models for value in score[model].values()]
        if metrics and not any(metrics):  # more often the way of asking than the models
            other = "--bare" if settings.chat_template else "--chat-template"
            warn(f"{task}: 0 for every model {settings.how}; {other} asks the other way")
    if record is not None and (repo := os.environ.get("AIM_REPO")):
        _show_in_aim(run_dir, repo)


def _base(record: Json, run_dir: Path) -> Origin:
    config = mapping(record.get("config"))
    name = config.get("model_name_or_path")
    if not isinstance(name, str):
        raise NotFound("does not say what the run started from", where=str(run_dir), fix="give --no-base")
    try:
        return locate_model(copies.known(name, str(run_dir / "run.json")), config.get("model_revision"))
    except UserError as error:
        error.fix = f"{error.fix}, or give --no-base" if error.fix else "give --no-base"
        raise


def _save(run_dir: Path, result: Json, results: dict[str, Json]) -> None:
    """Add ``result`` to the scores in run.json as it is by now; write the harness's results beside it."""
    from lm_eval.utils import handle_non_serializable

    record = read_record(run_dir) or {}
    measured = mapping(record.get("measurements"))
    earlier = mapping(measured.get("tasks"))
    tasks = {key: mapping(earlier.get(key)) | added for key, added in result.items()}
    with creating(run_dir):
        for column, scored in results.items():
            text = json.dumps(scored, indent=2, default=handle_non_serializable, ensure_ascii=False)
            (run_dir / f"lm_eval_{column}.json").write_text(text, encoding="utf-8")
        write_json(
            run_dir / RUN_FILE, record | {"measurements": measured | {"tasks": tasks}, "evaluated_at": now()}
        )


def _show_in_aim(run_dir: Path, repo: str) -> None:
    """Update the run in ``repo``; those that its aim.json names may be anybody's choice."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            sync(run_dir, repo, follow=False, as_json=False)
    except UserError as error:
        warn(f"Aim: {error.what}; later: podtune aim-sync {run_dir} --repo {repo}")


def table(result: Json, models: list[str], how: str) -> str:
    """Format the scores: a row for each metric of a task, or part of a group, a column for each model."""
    rows = [
        [task, metric, *(_cell(score, model, metric) for model in models), score.get("rows")]
        for task, score in result["scores"].items()
        for metric in score[models[-1]]
        if not metric.endswith("_stderr")
    ]
    columns = [Column("task"), Column("metric"), *map(Column, models), Column("rows")]
    return Table(columns, rows, notes=[f"asked {how}"]).text()


def _cell(score: Json, model: str, metric: str) -> str | None:
    metrics = score[model]
    if metric not in metrics:
        return None
    error = metrics.get(f"{metric}_stderr")
    return f"{metrics[metric]:.4f}" + ("" if error is None else f" ± {error:.4f}")
