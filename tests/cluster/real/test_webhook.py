"""Lint neither lags behind the API server and the operator's webhook nor invents: the same manifests through
both.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.lint_examples import example
from support.lint_faults import FAULTS, HARMLESS, SHAPES, changed

from podtune.cluster.job.pytorchjob import pods
from podtune.cluster.lint.check import lint
from podtune.cluster.lint.explain import examples
from podtune.cluster.lint.rules import RULES
from podtune.cluster.lint.schema import schema
from podtune.cluster.lint.targets import parse

Json = dict[str, Any]

# Rules whose example is a PyTorchJob, and what lint says of it.
OURS = {
    rule.code: rule
    for rule in RULES
    if "PT001" < rule.code < "PT5" and "changes" not in examples()[rule.code]
}
# Refused for some values, taken for others; a variable that is left is refused, and lint only warns.
PARTLY = {"PT005", "PT008", "PT011"}
AT_ONCE = ("api", "webhook")
# The operator's Services are refused, not its pods.
OF_SERVICES = {"PT011", "PT407"}


def verdict(api: Any, namespace: str, manifest: Json) -> str:
    """ "" if the API server would create the job, else its reason. Nothing is created."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    plural = f"{manifest['kind'].lower().removesuffix('s')}s"
    try:
        api.CustomObjectsApi().create_namespaced_custom_object(
            group, version, namespace, plural, manifest, dry_run="All", field_validation="Strict"
        )
    except api.ApiException as error:
        return reason_of(error)
    return ""


def reason_of(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        return f"{error.status} {error.reason}"


def pods_refused(api: Any, namespace: str, manifest: Json) -> str:
    """ "" if the API server would create every pod that the operator makes of the job, else its reason."""
    for pod in pods(manifest):
        spec = {key: value for key, value in pod.spec.items() if key not in CLUSTERS_OWN}
        metadata = {"name": pod.name, "labels": dict(pod.labels), "annotations": dict(pod.annotations)}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        try:
            api.CoreV1Api().create_namespaced_pod(namespace, body, dry_run="All")
        except api.ApiException as error:
            return reason_of(error)
    return ""


# Names of objects that this cluster does not have.
CLUSTERS_OWN = {"priorityClassName", "runtimeClassName"}


def job_of(text: str) -> Json:
    job: Json = next(one for one in yaml.safe_load_all(text) if str(one.get("kind")).lower() == "pytorchjob")
    return job


@pytest.mark.parametrize("code", OURS)
def test_the_cluster_takes_every_good_example(code: str, api: Any, namespace: str) -> None:
    job = job_of(example(code, "good"))
    assert verdict(api, namespace, job) == ""
    assert pods_refused(api, namespace, job) == ""


@pytest.mark.parametrize("code", [code for code in OURS if code not in PARTLY])
def test_the_cluster_refuses_exactly_the_bad_examples_of_the_rules_that_say_so(
    code: str, api: Any, namespace: str
) -> None:
    job = job_of(example(code, "bad"))
    reason = verdict(api, namespace, job)
    assert bool(reason) == (OURS[code].by in AT_ONCE), (
        reason or f"{code} says that the cluster refuses this, and it takes it"
    )
    if not reason:
        pods_too = OURS[code].by == "operator" and code not in OF_SERVICES
        assert bool(pods_refused(api, namespace, job)) == pods_too


# The kubelet, not the API server, refuses these, or Services rather than pods.
LATER = {"a medium in lower case", "an unknown restart policy", "an unknown cleanPodPolicy"}
# A number in a file is a text again in the manifest that the API client sends.
PLANTED = [
    name
    for name, (_, where, *_) in FAULTS.items()
    if not where.startswith(("trainjob", "runtime")) and "YAML" not in name
]


@pytest.mark.parametrize("name", PLANTED)
def test_cluster_and_lint_agree_on_planted_faults(name: str, api: Any, namespace: str) -> None:
    job = changed(*FAULTS[name][1:3])
    findings = lint([("job.yaml", yaml.safe_dump(job, sort_keys=False))]).findings
    errors = {finding.by for finding in findings if finding.severity == "error"}
    try:
        reason = verdict(api, namespace, job)
    except api.ApiException:
        reason = "no such kind"
    assert bool(reason) == bool(errors & set(AT_ONCE)), reason or findings
    if not reason and name not in LATER:
        refused = pods_refused(api, namespace, job)
        named = [one for one in findings if one.by == "operator" and one.code not in OF_SERVICES]
        assert bool(refused) == bool(named), refused or named


@pytest.mark.parametrize(
    "name", [name for name, (where, _) in HARMLESS.items() if "-" in where or where in "pod"]
)
def test_the_cluster_takes_what_only_looks_wrong(name: str, api: Any, namespace: str) -> None:
    if not HARMLESS[name][0].startswith(("trainjob", "runtime")):
        job = changed(*HARMLESS[name])
        assert verdict(api, namespace, job) == ""
        assert pods_refused(api, namespace, job) == ""


@pytest.mark.parametrize("name", SHAPES)
def test_the_cluster_takes_the_jobs_that_run(name: str, api: Any, namespace: str) -> None:
    for job in yaml.safe_load_all(SHAPES[name]):
        if job["kind"] == "PyTorchJob" and "$" not in job["metadata"].get("name", ""):
            job["metadata"].pop("namespace", None)
            assert verdict(api, namespace, job) == ""
            if "name" in job["metadata"]:
                assert pods_refused(api, namespace, job) == ""


TRAINJOBS = [name for name, (_, where, *_) in FAULTS.items() if where.startswith("trainjob")]


@pytest.mark.parametrize("name", TRAINJOBS)
def test_trainer_and_lint_agree_on_planted_faults(name: str, api: Any, namespace: str) -> None:
    """The version of Trainer is that of TRAINER_VERSION, else 2.3."""
    job = changed(*FAULTS[name][1:3])
    served = {group.name for group in api.ApisApi().get_api_versions().groups}
    if "trainer.kubeflow.org" not in served:
        pytest.skip("this cluster has no Kubeflow Trainer")
    target = parse(f"trainer={os.environ.get('TRAINER_VERSION', '2.3')}")
    findings = lint([("job.yaml", yaml.safe_dump(job, sort_keys=False))], target=target).findings
    job["metadata"].pop("namespace", None)
    reason = verdict(api, namespace, job)
    if "not found" in reason:
        pytest.skip(f"the runtime is not installed: {reason}")
    errors = {finding.by for finding in findings if finding.severity == "error"}
    assert bool(reason) == bool(errors & set(AT_ONCE)), reason or findings


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
    assert module.schema_of(json.loads(crd.data)) == schema("pytorchjob-1.9")
