"""A dry run starts the pods' real commands and concludes what Kubernetes would have concluded, leaving
nothing behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from podtune.cluster.dry_run import dry_run
from podtune.cluster.dry_run.container import marked
from podtune.cluster.dry_run.dry_run import Result, parse_kill
from podtune.cluster.dry_run.sandbox import rewrite
from podtune.cluster.dry_run.shrink import Adaptation, devices
from podtune.cluster.job.pytorchjob import pods
from podtune.run.errors import UserError

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]

# Counts steps up to STEPS, remembering them in a file on the shared volume as a checkpoint would.
COUNT = """
import os, pathlib, sys, time
state = pathlib.Path("/shared") / os.environ["RANK"]
step = int(state.read_text()) if state.exists() else 0
while step < int(sys.argv[1]):
    step += 1
    state.with_suffix(".new").write_text(str(step))  # a kill in mid-write leaves the old one whole
    state.with_suffix(".new").rename(state)
    print("step", step, flush=True)
    time.sleep(0.02)
"""
WAIT = "import signal, time; print('step 1', flush=True); time.sleep(600)"


def job(
    master: list[str],
    worker: list[str] | None = None,
    *,
    policy: str = "OnFailure",
    inits: list[Json] | None = None,
    **run_policy: Any,
) -> Json:
    def replica(command: list[str]) -> Json:
        container = {"name": "pytorch", "image": "i:1", "command": command}
        container["volumeMounts"] = [
            {"name": "shared", "mountPath": "/shared"},
            {"name": "own", "mountPath": "/own"},
            {"name": "config", "mountPath": "/etc/run"},
        ]
        volumes: list[Json] = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "claim"}},
            {"name": "own", "emptyDir": {}},
        ]
        volumes.append({"name": "config", "configMap": {"name": "config"}})
        started = [{**one, "image": "i:1", "volumeMounts": container["volumeMounts"]} for one in inits or []]
        spec = {
            "containers": [container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": 1,
            "initContainers": started,
        }
        return {"replicas": 1, "restartPolicy": policy, "template": {"spec": spec}}

    replicas = {"Master": replica(master)} | ({"Worker": replica(worker)} if worker else {})
    spec = {
        "nprocPerNode": "1",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3, **run_policy},
        "pytorchReplicaSpecs": replicas,
    }
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "run"}, "spec": spec}


CONFIG = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "config"},
    "data": {"config.yaml": "data: /shared/qa\nmax_steps: 500\ntf32: true\npublish: s3://bucket/runs\n"},
}


def run(manifest: Json, tmp_path: Path, **options: Any) -> tuple[Result, list[str]]:
    lines: list[str] = []
    result = dry_run.run(
        [CONFIG, manifest],
        folder=tmp_path,
        emit=lambda pod, line: lines.append(f"{pod}: {line}"),
        timeout_s=options.pop("timeout_s", 30),
        **options,
    )
    for pod in result.pods:
        starts = (f"{tmp_path.resolve()}:{pod.name}:{start}" for start in range(2))
        assert not any(list(marked(start)) for start in starts), "a process outlived its dry run"
    return result, lines


def codes(result: Result) -> dict[str, list[int]]:
    return {pod.name: [one.code for one in pod.exits] for pod in result.pods}


def python(script: str, *words: str) -> list[str]:
    return ["python", "-c", script, *words]


def test_two_pods_that_end_well_are_a_job_that_succeeded(tmp_path: Path) -> None:
    result, lines = run(job(python(COUNT, "3"), python(COUNT, "3")), tmp_path)
    assert (result.condition, result.exit_code) == ("Succeeded", 0)
    assert codes(result) == {"run-master-0": [0], "run-worker-0": [0]}
    assert {"run-master-0: step 3", "run-worker-0: step 3"} <= set(lines)
    assert sorted(path.name for path in (tmp_path / "volumes/claim").iterdir()) == ["0", "1"]


def test_claims_are_shared_emptydirs_are_not_and_the_config_has_local_paths(tmp_path: Path) -> None:
    script = (
        "import os, pathlib; pathlib.Path('/own/me').write_text(os.environ['RANK']); "
        "print(open('/etc/run/config.yaml').read())"
    )
    result, lines = run(
        job(python(script), python(script)),
        tmp_path,
        adaptation=Adaptation(config={"max_steps": 5, "tf32": None}),
    )
    assert (tmp_path / "pods/run-master-0/own/me").read_text() == "0"
    assert (tmp_path / "pods/run-worker-0/own/me").read_text() == "1"
    assert f"run-worker-0: data: {tmp_path.resolve()}/volumes/claim/qa" in lines
    assert "run-master-0: max_steps: 5" in lines
    assert any("max_steps: 5, no tf32" in note for note in result.notes)
    assert f"run-worker-0: publish: file://{tmp_path.resolve()}/published" in lines, "nothing leaves here"


def test_init_containers_run_first_and_in_order_without_the_rendezvous_environment(tmp_path: Path) -> None:
    first = {"name": "a", "command": ["sh", "-c", "echo rank=$RANK > /own/log"]}
    second = {"name": "b", "command": ["sh", "-c", "echo second >> /own/log"]}
    _, lines = run(
        job(["sh", "-c", ("echo main rank=$RANK >> /own/log; cat /own/log")], inits=[first, second]), tmp_path
    )
    told = [line.removeprefix("run-master-0: ") for line in lines if "init container" not in line]
    assert told == ["rank=", "second", "main rank=0"]


def test_a_worker_waits_until_the_master_s_pod_runs(tmp_path: Path) -> None:
    slow = {
        "name": "prepare",
        "command": ["sh", "-c", ('case "$(pwd)" in *master*) sleep 0.5; touch /shared/ready;; esac')],
    }
    result, _ = run(job(["true"], ["test", "-e", "/shared/ready"], inits=[slow]), tmp_path)
    assert codes(result)["run-worker-0"] == [0, 0]


def test_a_failing_pod_is_made_again_once_and_its_peer_is_deleted(tmp_path: Path) -> None:
    result, _ = run(job(python(WAIT), ["false"]), tmp_path)
    assert (result.condition, result.exit_code) == ("Failed", 1)
    assert "ended with exit code 1, after 1 restart" in result.reason
    assert codes(result)["run-worker-0"] == [1, 1]
    assert [pod.phase for pod in result.pods] == ["Deleted", "Failed"]


def test_exit_code_recreates_a_pod_for_128_and_above_and_keeps_the_volume(tmp_path: Path) -> None:
    script = "test -e /shared/again || { touch /shared/again /own/first; exit 143; }; test ! -e /own/first"
    result, _ = run(job(["sh", "-c", script], policy="ExitCode"), tmp_path)
    assert (result.condition, codes(result)["run-master-0"], result.pods[0].restarts) == (
        "Succeeded",
        [143, 0],
        1,
    )


@pytest.mark.parametrize(("code", "condition", "exits"), [(143, "Succeeded", [143, 0]), (65, "Failed", [65])])
def test_an_indexed_jobs_pods_meet_by_their_index_and_end_by_the_policy(
    code: int, condition: str, exits: list[int], tmp_path: Path
) -> None:
    script = f"""
import os, pathlib, sys, time
index, met, first = os.environ["PET_NODE_RANK"], pathlib.Path("/shared/met"), pathlib.Path("/shared/first")
print(os.environ["JOB_COMPLETION_INDEX"], os.environ["PET_MASTER_ADDR"], flush=True)
if index == "0":
    first.touch()
while not first.exists():
    time.sleep(0.01)
if index == "1" and not met.exists():
    met.touch()
    sys.exit({code})
"""
    manifest = job(python(script))
    template = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    template["spec"]["containers"][0]["env"] = [
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": "run-0.run"},
    ]
    template["spec"]["restartPolicy"] = "Never"
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [65]}}]
    spec = {"completionMode": "Indexed", "completions": 2, "template": template}
    manifest |= {"kind": "Job", "spec": spec | {"podFailurePolicy": {"rules": rules}}}
    result, lines = run(manifest, tmp_path)
    assert (result.condition, codes(result)["run-1"]) == (condition, exits)
    assert {"run-0: 0 127.0.0.1", "run-1: 1 127.0.0.1"} <= set(lines)


def test_exit_code_is_final_below_128_and_a_user_s_error_is_passed_on(tmp_path: Path) -> None:
    result, _ = run(job(["sh", "-c", "exit 65"], python(WAIT), policy="ExitCode"), tmp_path)
    assert (result.condition, result.exit_code) == ("Failed", 65)
    assert "final" in result.reason


def test_never_fails_the_job_at_once(tmp_path: Path) -> None:
    result, _ = run(job(python(WAIT), ["false"], policy="Never"), tmp_path)
    assert (result.condition, codes(result)["run-worker-0"]) == ("Failed", [1])


def test_a_job_that_does_not_end_in_time_counts_as_running(tmp_path: Path) -> None:
    result, _ = run(job(python(WAIT)), tmp_path, timeout_s=1)
    assert (result.condition, result.exit_code) == ("Running", 1)
    assert "still running after 1 s (--timeout)" in result.reason


def test_a_killed_pod_is_restarted_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    result, lines = run(job(python(COUNT, "60"), python(COUNT, "60")), tmp_path, kill=("run-worker-0", 20))
    assert (result.condition, codes(result)["run-worker-0"]) == ("Succeeded", [137, 0])
    assert lines.count("run-worker-0: step 1") == 1


def test_a_process_that_left_its_group_ends_with_its_pod(tmp_path: Path) -> None:
    result, _ = run(job(["sh", "-c", "setsid sleep 600 & echo step 1; exit 0"]), tmp_path)
    assert result.condition == "Succeeded"


def test_a_command_that_is_not_here_is_named_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-program"):
        run(job(["no-such-program"]), tmp_path)


def test_an_elastic_job_succeeds_with_its_first_worker(tmp_path: Path) -> None:
    manifest = job(["true"], ["sh", "-c", "echo $PET_RDZV_ENDPOINT; sleep $JOB_SLEEP"])
    specs = manifest["spec"]["pytorchReplicaSpecs"]
    del specs["Master"]
    specs["Worker"]["replicas"] = 2
    manifest["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 2}
    specs["Worker"]["template"]["spec"]["containers"][0]["command"] = [
        "sh",
        "-c",
        'echo $PET_RDZV_ENDPOINT; case "$(pwd)" in *-1) sleep 600;; esac',
    ]
    result, lines = run(manifest, tmp_path)
    assert (result.condition, "enough for an elastic job" in result.reason) == ("Succeeded", True)
    assert any(line.startswith("run-worker-0: 127.0.0.1:") for line in lines)


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("/data", "/L"),
        ("--dataset=/data/qa", "--dataset=/L/qa"),
        ("a: /data\nb: '/data/x'", "a: /L\nb: '/L/x'"),
        ("/my/data", "/my/data"),
        ("/database", "/database"),
        ("/data.v2", "/data.v2"),
        ("/data/deep/x", "/D/x"),
    ],
)
def test_only_whole_paths_are_rewritten_and_the_longest_wins(text: str, local: str) -> None:
    assert rewrite(text, {"/data": Path("/L"), "/data/deep": Path("/D")}) == local


def test_a_kill_names_a_pod_and_a_step() -> None:
    found = pods(job(["true"], ["true"]))
    assert parse_kill("worker-0@7", found) == ("run-worker-0", 7)
    for text in ("worker-0", "wroker-0@7", "0@7"):
        with pytest.raises(UserError, match="POD@STEP"):
            parse_kill(text, found)


def test_a_gpu_job_on_a_machine_without_gpus_trains_on_the_cpu_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    manifest = job(["true"], ["true"])
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    adaptation = devices(pods(manifest))
    assert adaptation.config["use_cpu"] is True
    assert adaptation.variables["run-worker-0"]["PODTUNE_GPUS_PER_POD"] == ""
    assert adaptation.variables["run-worker-0"]["CUDA_VISIBLE_DEVICES"] == ""
    assert "asks for 4 GPUs" in adaptation.notes[0]


def dry_run_of(tmp_path: Path, script: str, *words: str) -> list[str]:
    """The command with the smoke profile, whose first container here is ``script``."""
    first = {"name": "first", "image": "i:1", "command": ["sh", "-c", script]}
    values = {"prepare": {"enabled": False}, "extraInitContainers": [first]}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    files = ["-f", "cpu-smoke", "-f", str(tmp_path / "values.yaml")]
    return [sys.executable, "-m", "podtune.cli", "dry-run", *files, *words]


def test_the_command_ends_with_the_verdict_as_text_or_json(tmp_path: Path) -> None:
    def ended(*words: str) -> subprocess.CompletedProcess[str]:
        command = dry_run_of(tmp_path, "echo hello; exit 65", *words)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)

    text = ended()
    assert "dry-run-master-0 | hello" in text.stdout
    assert text.stdout.splitlines()[-1].startswith("PyTorchJob dry-run: Failed after")
    found = ended("--json")
    verdict = json.loads(found.stdout)
    assert (found.returncode, "dry-run-master-0 | hello" in found.stderr) == (65, True)
    assert (verdict["schema"], verdict["condition"]) == ("podtune.dry-run/1", "Failed")
    assert verdict["pods"][0]["exits"] == [{"container": "first", "code": 65}]
    printed = json.loads(ended("--print-env", "--json").stdout)
    assert printed["dry-run-master-0"]["pytorch"]["MASTER_ADDR"] == "dry-run-master-0"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_dry_run_takes_its_processes_with_it(number: signal.Signals, tmp_path: Path) -> None:
    command = dry_run_of(tmp_path, "echo step 1; exec sleep 600", "--output", str(tmp_path / "out"))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as started:
        assert started.stdout is not None
        assert next(line for line in started.stdout if "| step 1" in line)
        started.send_signal(number)
        started.communicate(timeout=30)
    assert started.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert list(marked(f"{(tmp_path / 'out').resolve()}:dry-run-master-0:0")) == []
