"""A sweep in a cluster: each run a job of the chart, judged by what its pods write. The API server is a small
one of our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cluster_api import Serving
from support.cluster_jobs import HEAD, Api, podtune, printed, record_of, train

from podtune.bench.case.record import case_record
from podtune.commands.manifests import job_name
from podtune.run.record import end_record
from podtune.sweep import cases, runner
from podtune.sweep.trials import Trial


class Made:
    """The jobs that a command creates and deletes in :class:`Api`; ``finish(index, name)`` adds each."""

    def __init__(self, api: Api, finish: Callable[[int, str], None]) -> None:
        self.api, self.finish = api, finish
        self.names: list[str] = []
        self.deleted: list[str] = []
        self.config_maps: dict[str, dict[str, str]] = {}

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, bytes] | None:
        if path.endswith("selfsubjectaccessreviews"):
            return 201, b'{"status": {"allowed": true}}'
        if method == "DELETE":
            self.deleted.append(path.rpartition("/")[2])
            return 200, b"{}"
        created = body["metadata"]["name"] if method in ("POST", "PATCH") and "dryRun" not in query else ""
        if created and body["kind"] == "ConfigMap":
            self.config_maps[created] = body["data"]
        if created and body["kind"] == "PyTorchJob":
            self.names.append(created)
            self.finish(len(self.names), created)
        if method in ("POST", "PATCH"):
            return 201, json.dumps(body).encode()
        if path.count("/") == 3:  # /apis/GROUP/VERSION
            return 200, b'{"resources": [{"name": "pytorchjobs"}]}'
        return self.api.answer(path, query)


def test_a_sweep_makes_its_jobs_in_the_cluster_and_judges_and_compares_what_their_logs_say(
    api: Api, serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.02)

    def finish(index: int, name: str) -> None:
        log = [*HEAD, train(5)]
        if index == 4:
            api.add(name, "Failed", log)
            evicted = {"reason": "Evicted", "message": "the message of a pod \x07"}
            api.pods[-1]["status"] = {"phase": "Failed", **evicted}
        else:
            api.add(name, "Succeeded", [*log, *printed(record_of(name))], phase="Succeeded")

    made = Made(api, finish)
    serving(made.answer)
    file, output = tmp_path / "rates.yaml", tmp_path / "out"
    file.write_text("learning_rate: [1.0e-3, 3.0e-3, 1.0e-4, 1.0]\n")
    words = ["sweep", str(file), "--output", str(output), "-f", "cpu-smoke", "--at-once", "2", "--json"]
    first = podtune(*words)
    assert first.exit_code == 70, first.output
    states = json.loads((output / "sweep.json").read_text())["runs"]
    assert list(states.values()) == ["ok", "ok", "ok", "failed"]
    assert "the message of a pod" in first.output
    assert "\x07" not in first.output
    assert made.names == [re.sub("[^a-z0-9]+", "-", name) for name in states], "a job is named as its run"
    kept = output / next(iter(states))
    assert json.loads((kept / "run.json").read_text())["measurements"]["loss"]["eval"] == 1.2345678
    assert "ok, eval loss 1.2346" in first.output
    page = (output / "compare.html").read_text()
    assert all((name in page) == (state == "ok") for name, state in states.items())

    (kept / "run.json").unlink()  # the sweep had been broken off: the job is there, and is looked at again
    again = podtune(*words)
    assert list(json.loads(again.stdout)["runs"].values()) == ["ok", "kept", "kept", "failed"]
    assert len(made.names) == 4


def test_each_case_of_the_benchmark_is_a_job_of_as_many_pods_as_it_needs(
    api: Api, serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.02)
    pods: dict[str, int] = {}

    def finish(index: int, name: str) -> None:
        sweep = tmp_path / f"{name}.yaml"
        sweep.write_text(made.config_maps[name]["sweep.yaml"])
        (case,) = cases.expand(cases.read_sweep(sweep), nodes=2, nproc_per_node=1).cases
        pods[case.name] = case.world.nnodes
        record = case_record(case.options, case.name) | {"world_size": case.world.world_size}
        record = end_record(record, "error" if index == 2 else "ok", 70 if index == 2 else 0, "")
        api.add(name, "Succeeded", printed(record), phase="Succeeded")

    made = Made(api, finish)
    serving(made.answer)
    file, output = tmp_path / "cases.yaml", tmp_path / "out"
    file.write_text(
        "models: [tinygpt-test]\nstrategies: [single, ddp]\nworld_sizes: [1, 2, 4]\nlaunch: fork\n"
        "options: {steps: 2, cpu: true}\nper_model: {tinygpt-test: {global_batch_size: 4}}\n"
        "compile: [false]\nskip_impossible: true\n"
    )
    words = ["bench", "run", "--sweep", str(file), "--output", str(output), "-f", "cpu-smoke"]
    shared = [f"persistence.{volume}.accessModes={{ReadWriteMany}}" for volume in ("models", "output")]
    words += [word for each in ("distributed.nodes=2", *shared) for word in ("--set", each)] + ["--json"]
    first = podtune(*words)
    assert first.exit_code == 70, first.output
    said = json.loads(first.stdout)
    assert list(said["cells"].values()) == ["ok", "error", "ok"]
    assert "4 processes do not fit 2 pods of 1" in str(said["impossible"])
    assert list(pods.items()) == [(name, 2 if ".w2." in name else 1) for name in said["cells"]]
    assert [name for name in made.deleted if name in made.names] == made.names
    record = json.loads((output / "cells" / next(iter(pods)) / "run.json").read_text())
    assert (record["name"], record["status"]) == (next(iter(pods)), "ok")

    api.jobs.clear()
    again = podtune(*words)
    assert list(json.loads(again.stdout)["cells"].values()) == ["kept", "ok", "kept"]
    other = podtune(*words, "--set", "image.tag=2")
    assert "kept" not in json.loads(other.stdout)["cells"].values(), "another image is another benchmark"


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
    names = [job_name(run.name) for run in runs]
    assert len(set(names)) == len(runs)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]{0,42}[a-z0-9])?", name) for name in names), names
