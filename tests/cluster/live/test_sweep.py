"""A sweep in a cluster: each run a job of the chart, judged by what its pods write. The API server is a small
one of our own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster_api import Serving
from support.cluster_jobs import HEAD, Api, podtune, printed, record_of, train

from podtune.commands.sweep import job_name
from podtune.run.log_lines import eval_line
from podtune.sweep import runner
from podtune.sweep.trials import Trial


def test_a_sweep_makes_its_jobs_in_the_cluster_and_judges_and_compares_what_their_logs_say(
    api: Api, serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    created: list[tuple[str, str]] = []
    deleted: list[str] = []

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes] | None:
        if path.endswith("selfsubjectaccessreviews"):
            return 201, b'{"status": {"allowed": true}}'
        if method == "DELETE":
            deleted.append(path.rpartition("/")[2])
            return 200, b"{}"
        if method == "POST" and "dryRun" not in query:
            name = body["metadata"]["name"]
            created.append((name, yaml.safe_dump(body)))
            worse = len(created) == 4
            log = [*HEAD, train(5), eval_line(5, {"loss": 9.0 if worse else 3.0, "perplexity": 20.0})]
            if worse:
                api.add(name, "Running", log)
                evicted = {"reason": "Evicted", "message": "the message of a pod \x07"}
                api.pods[-1]["status"] = {"phase": "Failed", **evicted}
            else:
                api.add(name, "Succeeded", [*log, *printed(record_of(name))], phase="Succeeded")
        if method in ("POST", "PATCH"):
            return 201, json.dumps(body).encode()
        if path.count("/") == 3:  # /apis/GROUP/VERSION
            return 200, b'{"resources": [{"name": "pytorchjobs"}]}'
        return api.answer(path, query)

    serving(answer)
    file, output = tmp_path / "rates.yaml", tmp_path / "out"
    file.write_text("learning_rate: [1.0e-3, 3.0e-3, 1.0e-4, 1.0]\nstop: median\n")
    words = ["sweep", str(file), "--output", str(output), "-f", "cpu-smoke", "--at-once", "2", "--json"]
    first = podtune(*words)
    assert first.exit_code == 0, first.output
    states = json.loads((output / "sweep.json").read_text())["runs"]
    assert list(states.values()) == ["ok", "ok", "ok", "stopped"]
    assert deleted[0] == created[3][0], "the job that was worse than the median"
    assert "the message of a pod" in first.output
    assert "\x07" not in first.output
    assert [name for name, _ in created] == [re.sub("[^a-z0-9]+", "-", name) for name in states], (
        "a job is named as its run"
    )
    kept = output / next(iter(states))
    assert json.loads((kept / "run.json").read_text())["measurements"]["loss"]["eval"] == 1.2345678
    assert [entry["split"] for entry in map(json.loads, (kept / "metrics.jsonl").open())].count("eval") == 1
    page = (output / "compare.html").read_text()
    assert all((name in page) == (state == "ok") for name, state in states.items())

    (kept / "run.json").unlink()  # the sweep had been broken off: the job is there, and is looked at again
    again = podtune(*words)
    assert list(json.loads(again.stdout)["runs"].values()) == ["ok", "kept", "kept", "stopped"]
    assert len(created) == 4


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        ("seed: [1]\nprocesses: 2\n", ["-f", "cpu-smoke"], "is said by the values"),
        ("seed: [1]\noptions: {dataset_name: d}\n", ["--at-once", "2"], "for a sweep in a cluster"),
        ("learning_rat: [1]\n", ["-f", "cpu-smoke"], "did you mean 'learning_rate'"),
        ("seed: [1]\n", ["-f", "cpu-smoke", "--set", "config=[1]"], "is not a mapping of keys to values"),
    ],
)
def test_what_is_wrong_with_a_sweep_is_said_before_the_cluster_is_asked(
    tmp_path: Path, content: str, words: list[str], says: str
) -> None:
    (tmp_path / "sweep.yaml").write_text(content)
    ended = podtune("sweep", str(tmp_path / "sweep.yaml"), "--output", str(tmp_path / "out"), *words)
    assert ended.exit_code != 0
    assert says in str(ended.exception)
    assert not (tmp_path / "out").exists()


def test_every_run_has_a_name_that_kubernetes_takes() -> None:
    varied: list[dict[str, Any]] = [{}, {"learning_rate": 1e-4}, {"model_name_or_path": "Org/Model" * 9}]
    runs = [Trial(varies, {"seed": seed}, "1") for varies in varied for seed in range(30)]
    names = [job_name(run) for run in runs]
    assert len(set(names)) == len(runs)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,42}[a-z0-9])?", name) for name in names), names
