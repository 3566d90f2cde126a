"""One namespace of a real cluster: releases of the chart in it, their pods, logs and volumes."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from podtune.cluster.chart.render import CHART
from podtune.cluster.live.client import Cluster as Client
from podtune.cluster.live.follow import log_of

VALUES = CHART.parents[1] / "deploy" / "values"
VOLUMES = ("models", "data", "output")
# One thread a pod: two pods with two threads each on two busy cores wait for each other most of the time.
SMALL = {"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": "6Gi"}}


def config(**changed: Any) -> str:
    """The smoke profile's training YAML, shorter and with a model that is not so quick, with ``changed``
    keys.
    """
    values = yaml.safe_load((VALUES / "cpu-smoke.yaml").read_text())
    smoke = {"model_name_or_path": "/models/podtune-tiny", "per_device_train_batch_size": 8}
    smoke |= {"max_steps": 60, "eval_steps": 60, "save_steps": 30, "logging_steps": 5, "max_eval_rows": 64}
    unused = {"global_batch_size", "answer_rows", "answer_max_new_tokens", "eval_on_start"}
    smoke = yaml.safe_load(values["config"]) | smoke | changed
    return yaml.safe_dump({key: value for key, value in smoke.items() if key not in unused})


# Steps and saves enough for a pod to be taken away between two.
LONG = {
    "max_steps": 40,
    "eval_strategy": "no",
    "save_steps": 5,
    "logging_steps": 1,
    "per_device_train_batch_size": 2,
}


class Cluster:
    """One namespace with three shared volumes; releases of the chart in it."""

    def __init__(self, api: Any, namespace: str, image: str, folder: Path) -> None:
        self.api, self.core, self.custom = api, api.CoreV1Api(), api.CustomObjectsApi()
        self.namespace, self.image, self.folder = namespace, image, folder
        self.client = Client(namespace)  # podtune's own: it finds jobs of every kind, and their pods

    def helm(self, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["helm", "--namespace", self.namespace, *words], capture_output=True, text=True, timeout=300
        )
        assert not ok or done.returncode == 0, done.stderr
        return done

    def values(self, **changed: Any) -> str:
        """A values file on the shared volumes; ``changed`` are top-level values."""
        repository, _, tag = self.image.rpartition(":")
        values = {
            "image": {"repository": repository, "tag": tag},
            "persistence": {volume: {"existingClaim": f"first-{volume}"} for volume in VOLUMES},
            "resources": SMALL,
            "prepare": {"build": "tiny"},  # steps take long enough for a pod to be taken away between two
            "config": config(),
            **changed,
        }
        path = self.folder / f"{len(list(self.folder.iterdir()))}.yaml"
        path.write_text(yaml.safe_dump(values))
        return str(path)

    def install(self, name: str, **changed: Any) -> None:
        self.helm(
            "install",
            name,
            str(CHART),
            "--values",
            str(VALUES / "cpu-smoke.yaml"),
            "--values",
            self.values(**changed),
        )

    def job(self, name: str) -> dict[str, Any]:
        return self.client.job(name)

    def conditions(self, name: str) -> list[str]:
        """Those that are true; Complete is how a TrainJob and a Job succeed."""
        listed = self.job(name).get("status", {}).get("conditions", [])
        found = [condition["type"] for condition in listed if condition["status"] == "True"]
        return ["Succeeded" if each == "Complete" else each for each in found]

    def losses(self, name: str) -> dict[int, float]:
        """The training loss of each step that was logged, from the output volume."""
        lines = map(json.loads, self.run_pod("read", "cat", f"/output/{name}/metrics.jsonl").splitlines())
        return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}

    def pods(self, name: str) -> list[Any]:
        labels = f"training.kubeflow.org/job-name={name}"
        return list(self.core.list_namespaced_pod(self.namespace, label_selector=labels).items)

    def log(self, pod: str, container: str = "pytorch") -> str:
        try:
            answer = self.core.read_namespaced_pod_log(
                pod, self.namespace, container=container, _preload_content=False
            )
            # the client's own decoding gives the text of a bytes literal
            return str(answer.data.decode(errors="replace"))
        except self.api.ApiException:
            return ""

    def until(self, what: str, check: Callable[[], Any], seconds: float = 300) -> Any:
        """The first true answer of ``check``; on time-out the failure shows the pods and their last lines."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := check():
                return found
            time.sleep(1)  # the API is asked again; nothing here can be waited on
        pytest.fail(f"{what} took more than {seconds:.0f} s\n{self.story()}")

    def ended(self, name: str, condition: str = "Succeeded", seconds: float = 300) -> None:
        end = ("Succeeded", "Failed")
        found = self.until(
            f"{name} to end", lambda: [one for one in self.conditions(name) if one in end], seconds
        )
        assert found == [condition], self.story()

    def story(self) -> str:
        """State and last lines of every pod, for a failed test."""
        lines = []
        for pod in self.core.list_namespaced_pod(self.namespace).items:
            lines.append(f"== {pod.metadata.name} {pod.status.phase}")
            for container in ("prepare", "pytorch", "node"):
                lines += [
                    f"  {container}: {line}"
                    for line in self.log(pod.metadata.name, container).splitlines()[-12:]
                ]
        return "\n".join(lines)

    def run_pod(self, name: str, *command: str, user: int = 1000) -> str:
        """Run ``command`` with the volumes mounted and return what it printed."""
        mounts = [{"name": volume, "mountPath": f"/{volume}"} for volume in VOLUMES]
        claims = [
            {"name": volume, "persistentVolumeClaim": {"claimName": f"first-{volume}"}} for volume in VOLUMES
        ]
        container = {"name": "pytorch", "image": self.image, "command": list(command), "volumeMounts": mounts}
        spec = {
            "containers": [container],
            "volumes": claims,
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": user},
        }
        self.core.create_namespaced_pod(self.namespace, {"metadata": {"name": name}, "spec": spec})
        done = ("Succeeded", "Failed")
        phase = self.until(
            f"pod {name}", lambda: self.core.read_namespaced_pod(name, self.namespace).status.phase, 5
        )
        phase = self.until(
            f"pod {name}",
            lambda: (
                (found := self.core.read_namespaced_pod(name, self.namespace).status.phase) in done and found
            ),
            120,
        )
        text = self.log(name)
        self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        assert phase == "Succeeded", text
        return text

    def read(self, path: str) -> dict[str, Any]:
        """A JSON file of the output volume."""
        found: dict[str, Any] = json.loads(self.run_pod("read", "cat", f"/output/{path}"))
        return found

    def started(self, name: str, step: int = 6) -> None:
        """Wait until the run has passed ``step``, so that there is a checkpoint to come back to."""
        pattern = re.compile(rf"^step +{step}/", re.MULTILINE)

        def begun() -> bool:
            job = self.job(name)
            pods = self.client.pods(job)[:1]
            lines = [line for pod in pods for line in log_of(self.client, job, pod["metadata"]["name"])]
            return bool(pattern.search("\n".join(lines)))

        self.until(f"{name} to train", begun)

    def claims(self, *phases: str) -> list[str]:
        """The namespace's claims in these phases, or all."""
        listed = self.core.list_namespaced_persistent_volume_claim(self.namespace).items
        found = [claim for claim in listed if not phases or claim.status.phase in phases]
        return sorted(claim.metadata.name for claim in found)

    def need_trainer(self) -> None:
        """Skip the test where there are no TrainJobs."""
        try:
            self.custom.get_cluster_custom_object(
                "trainer.kubeflow.org", "v1alpha1", "clustertrainingruntimes", "torch-distributed"
            )
        except self.api.ApiException:
            pytest.skip("Kubeflow Trainer v2 with its runtime torch-distributed is not installed")
