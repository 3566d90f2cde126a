"""Lint neither lags behind the API server and the operator's webhook nor invents: the same manifests through
both.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from podtune.cluster.lint.check import lint
from podtune.cluster.lint.explain import example, examples
from podtune.cluster.lint.rules import RULES

# What the API server or the webhook refuses at once (server-side dry run with strict field validation).
REFUSED = {
    "PT002",
    "PT003",
    "PT004",
    "PT006",
    "PT007",
    "PT010",
    "PT012",
    "PT013",
    "PT014",
    "PT015",
    "PT016",
    "PT017",
    "PT018",
    "PT019",
}
# Refused for some values, taken for others.
PARTLY = {"PT005", "PT011"}
CODES = [rule.code for rule in RULES if not rule.code.startswith("PT5")]


def verdict(api: Any, namespace: str, manifest: dict[str, Any]) -> str:
    """ "" if the API server would create the job, else its reason. Nothing is created."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    try:
        api.CustomObjectsApi().create_namespaced_custom_object(
            group, version, namespace, "pytorchjobs", manifest, dry_run="All", field_validation="Strict"
        )
    except api.ApiException as error:
        try:
            return str(json.loads(error.body)["message"])
        except (ValueError, TypeError, KeyError):
            return f"{error.status} {error.reason}"
    return ""


def job_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one for one in yaml.safe_load_all(text) if str(one.get("kind")).lower() == "pytorchjob"
    )
    return found


@pytest.mark.parametrize("code", CODES)
def test_the_cluster_takes_every_good_example(code: str, api: Any, namespace: str) -> None:
    assert verdict(api, namespace, job_of(example(code, "good"))) == ""


@pytest.mark.parametrize("code", [code for code in CODES if code not in PARTLY])
def test_the_cluster_refuses_exactly_the_bad_examples_of_the_rules_that_say_so(
    code: str, api: Any, namespace: str
) -> None:
    reason = verdict(api, namespace, job_of(example(code, "bad")))
    assert bool(reason) == (code in REFUSED), (
        reason or f"{code} says that the cluster refuses this, and it takes it"
    )


CHANGES = {
    "a number for nprocPerNode": 'nprocPerNode: "2" -> nprocPerNode: 2',
    "a quantity with a space": "sizeLimit: 8Gi -> sizeLimit: 8 GB",
    "a fraction of a GPU written as a number": "limits: {nvidia.com/gpu: 2} -> limits: {nvidia.com/gpu: 0.5}",
    "a whole number with a point": "backoffLimit: 3 -> backoffLimit: 3.0",
    "a boolean label": (
        'labels: {sidecar.istio.io/inject: "false"} -> labels: {sidecar.istio.io/inject: false}'
    ),
    "an empty field": "backoffLimit: 3 -> backoffLimit:",
    "an unknown restart policy": "restartPolicy: OnFailure -> restartPolicy: Sometimes",
    "a master without a number": "replicas: 1\n      restartPolicy -> restartPolicy",
    "a lower-case role": "Worker: -> worker:",
    "no master": "Master: -> Worker2:",
    "a name of 60 characters": f"name: run -> name: {'r' * 60}",
    "a name of 64 characters": f"name: run -> name: {'r' * 64}",
    "a name with a dot": "name: run -> name: run.1",
    "a name that begins with a digit": "name: run -> name: 1run",
    "an image left empty": 'image: registry.example/train:1.0 -> image: ""',
    "a misspelt mount": "mountPath: /output -> mountpath: /output",
    "a variable given twice": (
        "resources: -> env: [{name: A, value: x}, {name: A, value: y}]\n            resources:"
    ),
    "an unknown top-level field": "kind: PyTorchJob -> kind: PyTorchJob\nsepc: {}",
}
# Taken by the cluster, and then no pod ever starts: lint calls these errors, the API server cannot.
LATE = {"an unknown restart policy", "a name of 60 characters"}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_lint_and_cluster_agree_on_manifests_that_lint_has_no_example_of(
    change: str, api: Any, namespace: str, request: Any
) -> None:
    old, _, new = change.partition(" -> ")
    text = examples()["base"]
    assert old in text, "the change no longer fits the base job"
    text = text.replace(old, new, 1)
    admission = [
        one for one in lint([("job.yaml", text)]).findings if one.code < "PT1" and one.severity == "error"
    ]
    name = request.node.callspec.id
    reason = verdict(api, namespace, yaml.safe_load(text))
    assert bool(admission) == bool(reason) or name in LATE, (
        f"lint: {admission}; cluster: {reason or 'takes it'}"
    )
    if name in LATE:
        assert admission
        assert not reason


def test_the_schema_is_that_of_the_cluster_s_crd(api: Any) -> None:
    path = Path(__file__).parents[3] / "scripts/build_crd_schema.py"
    spec = importlib.util.spec_from_file_location("build_crd_schema", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    crd = api.ApiextensionsV1Api().read_custom_resource_definition(
        "pytorchjobs.kubeflow.org", _preload_content=False
    )
    assert module.schema_of(json.loads(crd.data)) == json.loads(module.TARGET.read_text())
