"""podtune eval: the scores are the model's, base beside tuned, and stand where runs are compared."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from click.testing import CliRunner

from podtune.cli import load
from podtune.commands import generate
from podtune.report.compare.figures import final_figures
from podtune.report.runs.runs import load_run
from podtune.run.aim.sync import sync
from podtune.run.errors import UserError
from podtune.run.record import RUN_FILE, end_record, new_record, write_json
from podtune.sft.generate import harness

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness' own dependencies
RIGHT = [
    0,
    1,
    1,
    2,
    2,
    2,
    3,
    3,
    3,
    3,
    3,
    3,
]  # so that a model which always says the same has a score of its own
CHOICES = ["a capital letter", "a small letter", "a number", "a mark"]


@pytest.fixture(scope="module")
def tasks(qa_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of twelve held-out questions: the likeliest of four answers, and an answer written out."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = pq.read_table(qa_data / "eval.parquet").to_pylist()[:12]
    (folder / "rows.json").write_text(
        "".join(
            json.dumps({"question": row["question"], "right": right}) + "\n"
            for row, right in zip(rows, RIGHT, strict=True)
        )
    )
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "metadata": {"version": 2.0},
    }
    choice = common | {
        "task": "choose",
        "output_type": "multiple_choice",
        "doc_to_choice": CHOICES,
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    written = common | {
        "task": "write",
        "output_type": "generate_until",
        "doc_to_target": "{{right}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (choice, written):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.fixture
def run_dir(micro_model: Path, tmp_path: Path) -> Path:
    """A finished run whose final model is another than its base."""
    folder = tmp_path / "run"
    folder.mkdir()
    model, tokenizer = generate.load(str(micro_model), False)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder / "final")
    tokenizer.save_pretrained(folder / "final")
    config = {"model_name_or_path": str(micro_model)}
    record = new_record(mode="sft", name="tuned", config=config, world_size=1, nproc_per_node=1)
    write_json(folder / RUN_FILE, end_record(record, "ok", 0))
    return folder


def asked(*words: object) -> Any:
    return CliRunner().invoke(load("eval"), [str(word) for word in words])


def likeliest_share(folder: Path, tasks: Path) -> float:
    """The share of rows whose right choice has the highest sum of log probabilities, token by token."""
    model, tokenizer = generate.load(str(folder), False)
    rows = [json.loads(line) for line in (tasks / "rows.json").read_text().splitlines()]
    hits = 0
    for row in rows:
        sums = []
        for choice in CHOICES:
            before = len(tokenizer.encode(row["question"]))
            ids = torch.tensor([tokenizer.encode(f"{row['question']} {choice}")])
            with torch.no_grad():
                chances = model(ids).logits[0, :-1].log_softmax(-1)
            taken = chances.gather(1, ids[0, 1:, None])[before - 1 :]
            sums.append(float(taken.sum()))
        hits += sums.index(max(sums)) == row["right"]
    return hits / len(rows)


def test_scores_are_those_of_base_and_tuned_model_and_stand_in_record_comparison_and_aim(
    run_dir: Path, micro_model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = str(tmp_path / "aim")
    sync(run_dir, repo, follow=False, as_json=True)
    sync(run_dir, str(tmp_path / "other"), follow=False, as_json=True)
    monkeypatch.setenv("AIM_REPO", repo)
    ended = asked(run_dir, "--tasks", "choose,write", "--task-folder", tasks, "--batch-size", 4, "--bare")
    assert ended.exit_code == 0, ended.output
    kept = json.loads((run_dir / RUN_FILE).read_text())["measurements"]["tasks"]
    choose = kept["scores"]["choose"]
    assert (choose["rows"], choose["of"], choose["version"], choose["fewshot"]) == (12, 12, 2.0, 0)
    assert choose["base"]["acc"] == pytest.approx(likeliest_share(micro_model, tasks))
    assert choose["tuned"]["acc"] == pytest.approx(likeliest_share(run_dir / "final", tasks))
    assert choose["base"]["acc"] != choose["tuned"]["acc"], "or this shows nothing"
    assert choose["asked"]["harness"] == harness.EvalSettings().for_record()["harness"]
    assert set(kept["scores"]["write"]["tuned"]) == {"exact_match", "exact_match_stderr"}
    assert final_figures(load_run(run_dir))["choose acc"] == choose["tuned"]["acc"]
    assert "choose  acc" in ended.output
    for column in ("base", "tuned"):
        own = json.loads((run_dir / f"lm_eval_{column}.json").read_text())
        assert own["results"]["choose"]["acc,none"] == choose[column]["acc"]

    from aim import Repo

    (run,) = Repo(repo).iter_runs()
    assert run["measurements"]["tasks"]["scores"]["choose"]["tuned"]["acc"] == choose["tuned"]["acc"]
    (other,) = Repo(str(tmp_path / "other")).iter_runs()  # named by aim.json alone, which others may write
    assert "tasks" not in (other.get("measurements") or {})


def test_scores_of_other_tasks_stay_and_name_their_settings(run_dir: Path, tasks: Path) -> None:
    words = (run_dir, "--task-folder", tasks, "--no-base", "--bare", "--limit")
    ended = asked(*words, 4, "--tasks", "choose,write", "--json")
    assert ended.exit_code == 0, ended.output
    assert set(json.loads(ended.stdout)["scores"]) == {"choose", "write"}
    assert asked(*words, 5, "--tasks", "choose").exit_code == 0
    kept = json.loads((run_dir / RUN_FILE).read_text())["measurements"]["tasks"]
    assert (kept["scores"]["choose"]["rows"], kept["scores"]["write"]["rows"]) == (5, 4)
    assert kept["asked"]["choose"]["models"] == ["tuned"]
    assert final_figures(load_run(run_dir))["choose acc, limit 5"] == kept["scores"]["choose"]["tuned"]["acc"]
    assert asked(*words, 5, "--tasks", "choose", "--fewshot", 0).exit_code == 0
    assert "choose acc, limit 5, fewshot 0" in final_figures(load_run(run_dir))


def test_scores_that_somebody_damaged_are_replaced(run_dir: Path, tasks: Path) -> None:
    record = json.loads((run_dir / RUN_FILE).read_text())
    record["measurements"]["tasks"] = {"asked": {"choose": 7}, "scores": {"choose": ["acc"]}}
    write_json(run_dir / RUN_FILE, record)
    assert final_figures(load_run(run_dir))["steps"] is None
    words = ["--tasks", "choose", "--task-folder", tasks, "--limit", 2, "--no-base", "--bare"]
    ended = asked(run_dir, *words)
    assert ended.exit_code == 0, ended.output
    assert final_figures(load_run(run_dir))["choose acc, limit 2"] is not None


def test_a_task_says_how_long_an_answer_may_be(micro_model: Path, tasks: Path) -> None:
    model, tokenizer = generate.load(str(micro_model), False)
    model.generation_config.max_new_tokens, lengths = 50, []
    drawn = model.generate

    def generated(**arguments: Any) -> Any:
        ids = drawn(**arguments)
        lengths.append(ids.shape[1] - arguments["input_ids"].shape[1])
        return ids

    model.generate = generated
    manager = harness.find_tasks(["write"], tasks)
    harness.score(model, tokenizer, ["write"], manager, harness.EvalSettings(limit=2))
    assert max(lengths) <= 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tasks", ","], "there is no name in it"),
        (["--tasks", "choose", "--task-folder", "/nowhere"], "no such folder"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_read(run_dir: Path, words: list[str], says: str) -> None:
    ended = asked(run_dir, *words)
    assert isinstance(ended.exception, UserError)
    assert says in str(ended.exception)


def test_a_run_that_goes_on_is_not_asked(run_dir: Path, tasks: Path) -> None:
    record = json.loads((run_dir / RUN_FILE).read_text())
    write_json(run_dir / RUN_FILE, record | {"status": "running"})
    ended = asked(run_dir, "--tasks", "choose", "--task-folder", tasks)
    assert "has not ended" in str(ended.exception)


def test_examples_are_drawn_by_the_seeds_of_the_harness_s_command_line() -> None:
    from lm_eval.evaluator import simple_evaluate

    drawn = inspect.signature(simple_evaluate).parameters
    assert {drawn[name].default for name in harness.SEEDS} == {harness.EvalSettings().seed}


@pytest.fixture
def echo_task(tmp_path: Path) -> Path:
    """A task whose right answer is what a model says in its chat template, and not as bare text."""
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "rows.json").write_text('{"question": "what?"}\n')
    task = {
        "task": "echo",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "right",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "echo.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.parametrize(
    ("trained", "words", "how"),
    [
        (True, [], "in the chat template"),
        (None, [], "in the chat template"),
        (False, [], "as bare text"),
        (True, ["--bare"], "as bare text"),
        (False, ["--chat-template"], "in the chat template"),
    ],
)
def test_a_run_is_asked_as_it_was_trained_and_says_how(
    run_dir: Path,
    echo_task: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: bool | None,
    words: list[str],
    how: str,
) -> None:
    def answer(self: Any, requests: list[Any], **_: Any) -> list[str]:
        texts = [request.args[0] for request in requests]
        return ["right" if "<|im_start|>user" in text else "wrong" for text in texts]

    monkeypatch.setattr("lm_eval.models.huggingface.HFLM.generate_until", answer)
    record = json.loads((run_dir / RUN_FILE).read_text())
    write_json(run_dir / RUN_FILE, record | {"data": {} if trained is None else {"chat_template": trained}})
    ended = asked(run_dir, "--tasks", "echo", "--task-folder", echo_task, "--no-base", *words)
    assert f"asked {how}" in ended.stdout
    score = json.loads((run_dir / RUN_FILE).read_text())["measurements"]["tasks"]["scores"]["echo"]
    templated = how == "in the chat template"
    assert score["asked"]["chat_template"] is templated
    assert score["tuned"]["exact_match"] == templated
    name = "echo exact_match, in chat template" if templated else "echo exact_match"
    assert final_figures(load_run(run_dir))[name] == templated
    assert ("echo: 0 for every model as bare text; --chat-template asks the other way" in ended.stderr) != (
        templated
    )
