"""Jobs that a small API server of our own knows of, and what their pods wrote."""

from __future__ import annotations

import datetime
import io
import json
from typing import Any

from typer.testing import CliRunner, Result

from podtune.cli import app
from podtune.run.collect import emit_record
from podtune.run.log_lines import head_line, start_line, train_line
from podtune.run.record import Json, end_record, new_record

START = datetime.datetime.now(datetime.UTC).replace(microsecond=0) - datetime.timedelta(minutes=30)


def stamp(second: int) -> str:
    return (START + datetime.timedelta(seconds=second)).strftime("%Y-%m-%dT%H:%M:%S.000000001Z")


def train(step: int, last: int = 60, **changed: Any) -> str:
    figures = {
        "loss": 8.0 - step / 10,
        "learning_rate": 1e-3,
        "tokens_per_s": 1500.0,
        "eta_s": float(last - step),
        **changed,
    }
    return train_line(step, last, figures, {"rss_gib": 1.5, "per_rank": {"rss_gib": [1.5, 1.25]}})


HEAD = [head_line("run", "ddp", 2, "cpu", 2, 7_000_000, 8000, 90_000), start_line(0, 60)]


def printed(record: Json) -> list[str]:
    stream = io.StringIO()
    emit_record(record, stream)
    return stream.getvalue().splitlines()


def record_of(name: str, status: Any = "ok", code: int = 0) -> Json:
    record = new_record(
        mode="sft", name=name, config={"learning_rate": 1e-3}, strategy="ddp", model="m", world_size=2
    )
    record["measurements"] = {
        "steps": 60,
        "tokens": 90_000,
        "tokens_per_s": 1234.5678,
        "loss": {"last": 2.0, "eval": 1.2345678},
    }
    return end_record(record, status, code, "" if status == "ok" else "out of memory on rank 1")


class Api:
    """The part of Kubernetes' API that is read here: jobs, pods and logs, with the server's own rules for
    sinceTime and limits.
    """

    def __init__(self) -> None:
        self.jobs: list[Json] = []
        self.pods: list[Json] = []
        self.logs: dict[str, list[str]] = {}
        self.refused: dict[str, int] = {}  # part of a path -> status
        self.asked: list[str] = []

    def add(
        self,
        name: str,
        condition: str,
        log: list[str],
        *,
        pods: tuple[str, ...] = ("master-0", "worker-0"),
        phase: str = "Running",
    ) -> None:
        command = ["podtune", "launch", "--", "-m", "podtune.training"]
        template = {"spec": {"containers": [{"name": "pytorch", "command": command}]}}
        replicas = {"Master": {"replicas": 1, "template": template}, "Worker": {"replicas": 1}}
        status = {
            "conditions": [{"type": condition, "status": "True", "message": "said the operator"}],
            "startTime": stamp(0),
        }
        spec = {"nprocPerNode": "1", "pytorchReplicaSpecs": replicas}
        self.jobs.append(
            {"metadata": {"name": name, "creationTimestamp": stamp(0)}, "spec": spec, "status": status}
        )
        for pod in ("master-0", "worker-0"):
            metadata = {
                "name": f"{name}-{pod}",
                "uid": f"{name}-{pod}-1",
                "labels": {"training.kubeflow.org/job-name": name},
            }
            self.pods.append({"metadata": metadata, "status": {"phase": phase}})
        self.logs[f"{name}-master-0"] = [f"{stamp(second)} {line}" for second, line in enumerate(log)]

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, bytes]:
        for part, status in self.refused.items():
            if part in path:
                return status, json.dumps({"message": f"not you: {part}"}).encode()
        if path.endswith("/log"):
            return self._log(path.split("/")[-2], query)
        if path == "/version":
            return 200, b'{"gitVersion": "v1"}'
        name = path.rpartition("pytorchjobs/")[2]
        if path.endswith("/pytorchjobs"):
            return 200, json.dumps({"items": self.jobs}).encode()
        if "/pytorchjobs/" in path and any(job["metadata"]["name"] == name for job in self.jobs):
            return 200, json.dumps(next(job for job in self.jobs if job["metadata"]["name"] == name)).encode()
        if path.endswith("/pods"):
            label, _, value = query["labelSelector"].partition("=")
            found = [
                pod
                for pod in self.pods
                if label in pod["metadata"]["labels"] and value in ("", pod["metadata"]["labels"][label])
            ]
            return 200, json.dumps({"items": found}).encode()
        return (200, b'{"items": []}') if path.endswith("/events") else (404, b'{"message": "not found"}')

    def _log(self, pod: str, query: dict[str, str]) -> tuple[int, bytes]:
        if pod not in self.logs:
            return 400, b'{"message": "container is waiting to start"}'
        self.asked.append(query.get("sinceTime", ""))
        lines = [line for line in self.logs[pod] if line[:19] >= query.get("sinceTime", "")[:19]]
        text = "".join(f"{line}\n" for line in lines[-int(query.get("tailLines", "1000000")) :]).encode()
        return 200, text[: int(query.get("limitBytes", "100000000"))]


def podtune(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), catch_exceptions=True)
