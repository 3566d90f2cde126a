"""Each profile of deploy/values: what the API servers would take, safe, linted, and fitting the hardware that
it names.
"""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from support.chart import render
from typer.testing import CliRunner

from podtune.cluster.chart.render import CHART
from podtune.cluster.lint.check import lint
from podtune.commands import bench
from podtune.sft.config import settings as config
from podtune.sft.config.keys import environment

VALUES = CHART.parents[1] / "deploy" / "values"
# Profiles that say one thing are used together with one of hardware.
COMBINED = {"kueue": ["two-node"], "openshift": ["single-gpu"], "air-gapped": ["single-gpu"]}
PROFILES = sorted(path.stem for path in VALUES.glob("*.yaml"))
WITH_GPU = [
    "a10-ethernet",
    "elastic",
    "h100-rdma",
    "mi300x",
    "pythia",
    "reference",
    "single-gpu",
    "two-node",
    "two-node-full",
]


def files(profile):
    return [VALUES / f"{name}.yaml" for name in (*COMBINED.get(profile, []), profile)]


def rendered(profile, *sets):
    return render(files(profile), list(sets), "run", engine="python")


def pod_specs(documents):
    """Every pod that the documents lead to, by the name of what holds it."""
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Pod":
            yield "Pod", spec
        elif document["kind"] == "Deployment":
            yield "Deployment", spec["template"]["spec"]
        elif document["kind"] == "PyTorchJob":
            for role, replica in spec["pytorchReplicaSpecs"].items():
                yield role, replica["template"]["spec"]


def test_the_profiles_of_real_situations_are_there():
    expected = (
        "a10-ethernet air-gapped benchmark cpu-smoke elastic h100-rdma kueue mi300x openshift pythia "
        "reference single-gpu smoke-1gpu two-node two-node-full"
    )
    assert expected.split() == PROFILES


def test_the_smoke_job_trains_what_the_demo_trains():
    smoke = yaml.safe_load(yaml.safe_load((VALUES / "cpu-smoke.yaml").read_text())["config"])
    demo = yaml.safe_load((VALUES.parent / "demo.yaml").read_text())
    assert smoke == demo | {"model_name_or_path": "/models/podtune-micro", "dataset_name": "/data/qa"}


@pytest.mark.parametrize("kind", ["PyTorchJob", "Job"])
@pytest.mark.parametrize("profile", PROFILES)
def test_lint_finds_nothing_in(profile, kind):
    if kind == "Job" and profile in ("elastic", "benchmark"):
        pytest.skip("the chart refuses it as a Job")
    verdict = lint([(profile, rendered(profile, f"api={kind.lower()}"))])
    assert verdict.jobs == [f"{kind} run"]
    assert [
        (f"{finding.code} {finding.message}") for finding in verdict.findings if finding.severity != "note"
    ] == []


@pytest.mark.parametrize("profile", PROFILES)
def test_kubernetes_takes_the_core_kinds_of(profile):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    aim = (
        []
        if profile == "benchmark"
        else [
            "aim.enabled=true",
            "aim.service.enabled=true",
            "persistence.output.accessModes={ReadWriteMany}",
        ]
    )
    checked = set()
    for document in yaml.safe_load_all(rendered(profile, *aim)):
        if document["kind"] != "PyTorchJob":
            kubernetes_validate.validate(document, "1.34", strict=True)
            checked.add(document["kind"])
    assert {"Pod", "PersistentVolumeClaim", "NetworkPolicy", "ServiceAccount"} <= checked


@pytest.mark.parametrize("profile", PROFILES)
def test_every_pod_passes_the_restricted_pod_security_profile_in(profile):
    aim = (
        []
        if profile == "benchmark"
        else ["aim.enabled=true", "persistence.output.accessModes={ReadWriteMany}"]
    )
    found = list(pod_specs(yaml.safe_load_all(rendered(profile, *aim))))
    assert {"Pod"} < {name for name, _ in found}
    for name, spec in found:
        assert restricted_violations(spec) == [], name


def restricted_violations(spec):
    """What the restricted profile of the Pod Security Standards refuses (its list of controls, read one by
    one).
    """
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    pod_context = spec.get("securityContext", {})
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for volume in spec.get("volumes", []):
        found += [f"volume {kind}" for kind in volume if kind != "name" and kind not in allowed]
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        context = {**pod_context, **container.get("securityContext", {})}
        capabilities = context.get("capabilities", {})
        checks = {
            "privileged": not context.get("privileged"),
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "runAsNonRoot": context.get("runAsNonRoot") is True and context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type")
            in ("RuntimeDefault", "Localhost"),
            "drop ALL": "ALL" in capabilities.get("drop", []),
            "capabilities": set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
            "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
            "procMount": context.get("procMount", "Default") == "Default",
        }
        found += [f"{container['name']}: {name}" for name, good in checks.items() if not good]
    return found


def test_the_check_of_pod_security_sees_what_is_insecure():
    spec = {"hostNetwork": True, "volumes": [{"name": "h", "hostPath": {}}], "containers": [{"name": "c"}]}
    assert len(restricted_violations(spec)) == 6


def training_config(profile):
    """The profile's training YAML, read as training.py reads it."""
    values = {}
    for file in files(profile):
        values |= yaml.safe_load(file.read_text())
    return values


@pytest.mark.parametrize("profile", [name for name in PROFILES if name != "benchmark"])
def test_training_understands_the_configuration_of(profile, tmp_path):
    values = training_config(profile)
    file = tmp_path / "config.yaml"
    file.write_text(values["config"])
    strategy = values["distributed"].get("strategy")
    words = ["--config", str(file), *(["--strategy", strategy] if strategy else []), *values.get("args", [])]
    settings = config.read(words, {"OUTPUT_DIR": "/outputs/run"})
    assert settings.values["model_name_or_path"]


@pytest.mark.parametrize("profile", WITH_GPU)
def test_the_memory_estimate_says_that_it_fits(profile):
    """From the values alone; and the command and the figure in the profile's head are those."""
    values = training_config(profile)
    named = environment()
    variables = {named[one["name"]]: one["value"] for one in values.get("env", []) if one["name"] in named}
    settings = yaml.safe_load(values["config"]) | variables
    pods = values["distributed"].get("elastic", {}).get("minNodes") or values["distributed"]["nodes"]
    ranks = pods * values["distributed"]["nprocPerNode"]
    accumulation = settings.get("gradient_accumulation_steps", 1)
    # without it the estimate at the start takes the least that fits
    chosen = settings.get("activation_checkpointing")
    every = settings.get("activation_checkpointing_kwargs", {}).get("every_n_layers", 1)
    wanted = {
        "model": settings["model_name_or_path"].rpartition("/")[2],
        "strategy": values["distributed"]["strategy"],
        "world-size": str(ranks),
        "precision": "bf16" if settings["dtype"] == "bfloat16" else "bf16-autocast",
        "batch-size": str(int(settings["per_device_train_batch_size"]) * ranks * accumulation),
        "sequence-length": str(settings["max_length"]),
        "activation-checkpointing": {1: "full", 2: "every-second"}[every] if chosen else "none",
        "hardware": re.search(r"NVIDIA-([A-Z0-9]+)|(MI300X)", str(values["nodeSelector"]))[0].removeprefix(
            "NVIDIA-"
        ),
        "fused-head": "",
    }
    if accumulation > 1:
        wanted["accumulation"] = str(accumulation)
    if settings.get("use_peft"):
        wanted["lora-r"] = str(settings["lora_r"])
        assert settings["lora_dropout"] == 0, "the plan is without dropout's copies and masks"
    head = " ".join(
        line.lstrip("# ")
        for line in (VALUES / f"{profile}.yaml").read_text().splitlines()
        if line.startswith("#")
    )
    quoted = re.search(r"`podtune bench plan ([^`]+)`: (\d+) of (\d+) GiB", head)
    assert quoted, "the head quotes the estimate and its command"
    words = [option.partition(" ") for option in quoted[1].removeprefix("--").split(" --")]
    assert {name: value for name, _, value in words} == wanted

    given = run_plan(quoted[1])
    assert given["fits"]
    assert (round(given["total_gib"]), round(given["memory_gib"])) == (int(quoted[2]), int(quoted[3]))
    if chosen:
        assert given["total_gib"] < 0.9 * given["memory_gib"], "room for the allocator's fragments"


def run_plan(options):
    """What the quoted command says."""
    result = CliRunner().invoke(bench.app, ["plan", *shlex.split(options), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_pods_of_an_amd_node_are_held_to_its_gpus():
    (job,) = (one for one in yaml.safe_load_all(rendered("mi300x")) if one["kind"] == "PyTorchJob")
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "PODTUNE_GPUS_PER_POD", "value": "8"} in container["env"]
    assert container["resources"]["requests"]["amd.com/gpu"] == 8


def test_the_reference_case_is_what_was_asked_for_in_every_pod():
    jobs = [one for one in yaml.safe_load_all(rendered("reference")) if one["kind"] == "PyTorchJob"]
    for role in ("Master", "Worker"):
        replica = jobs[0]["spec"]["pytorchReplicaSpecs"][role]
        (container,) = replica["template"]["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        wanted = {"EPOCHS": "4", "BATCH_SIZE": "28", "LEARNING_RATE": "5e-5", "AIM_REPO": "/aim"}
        assert {name: env[name] for name in wanted} == wanted
        assert (replica["replicas"], env["NCCL_DEBUG"], env["OUTPUT_DIR"]) == (1, "INFO", "/outputs/run")
        assert [port["containerPort"] for port in container["ports"]] == [23456]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert {"name": "aim-runs", "mountPath": "/aim"} in container["volumeMounts"]
