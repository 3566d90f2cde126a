"""Several sets to evaluate on, by name: each as if it were the only one, in every view of the run."""

from __future__ import annotations

import json
from pathlib import Path

from support.launch import Launcher, metrics

from podtune.report.runs.runs import load_run
from podtune.report.runs.watch import facts


def test_each_set_is_evaluated_under_its_name_as_if_it_were_alone(
    micro_model: Path, qa_data: Path, launcher: Launcher, tmp_path: Path
) -> None:
    sets = {name: str(qa_data / f"{file}.parquet") for name, file in (("seen", "train"), ("new", "eval"))}
    words = ["--model_name_or_path", micro_model, "--dataset_name", qa_data / "train.parquet"]
    words += ["--bf16", "false", "--max_steps", 4, "--save_steps", 2, "--eval_strategy", "steps"]
    words += ["--eval_steps", 2, "--max_eval_rows", 9, "--load_best_model_at_end"]
    launcher.run(*words, "--eval_dataset_name", sets["new"], "--output_dir", tmp_path / "alone")

    words += ["--output_dir", tmp_path / "run", "--eval_dataset_name", json.dumps(sets)]
    assert "name the set, too: eval_seen_loss" in launcher.run(*words, codes=[78])
    output = launcher.run(*words, "--metric_for_best_model", "eval_new_loss")
    assert "eval at step 4" in output

    run = tmp_path / "run"
    assert metrics(run, "eval_new") == metrics(tmp_path / "alone", "eval")
    assert list(metrics(run, "eval_seen", "perplexity")) == [2, 4]
    assert json.loads((run / "run.json").read_text())["data"]["eval_rows"] == 18
    state = json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_metric"] == min(metrics(run, "eval_new").values())  # by TRL's own names
    assert any("eval_seen_loss" in entry for entry in state["log_history"])

    shown = dict(facts(load_run(run)))
    assert shown["evaluation new"].startswith("at step 4: loss ")
    code, compared, said = launcher.podtune("compare", run, tmp_path / "alone", "--json").end()
    assert code == 0, said
    assert json.loads(compared)["final"][0]["eval_seen loss"] == metrics(run, "eval_seen")[4]
    code, _, said = launcher.podtune("compare", run, tmp_path / "alone", "--html", run / "page.html").end()
    assert code == 0, said
    assert "Evaluation loss: seen" in (run / "page.html").read_text()
