"""podtune why names the planted cause, and says so where it cannot know."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cluster_jobs import Api, podtune

from podtune.cluster.why.answer import Answer, explain
from podtune.cluster.why.scene import from_files
from podtune.run.library_environment import set_library_environment
from podtune.run.lock import LOCK_FILE

Json = dict[str, Any]


def job(condition: str = "Failed", message: str = "", kind: str = "PyTorchJob", **more: Any) -> Json:
    conditions = [{"type": condition, "status": "True", "message": message, **more}] if condition else []
    return {"kind": kind, "metadata": {"name": "run"}, "spec": {}, "status": {"conditions": conditions}}


def pod(name: str = "run-master-0", phase: str = "Failed", **status: Any) -> Json:
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str, name: str = "run-master-0") -> Json:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(name, "Pending", containerStatuses=[{"name": "pytorch", "image": "x:1", "state": state}])


def ended(
    code: int, message: str = "", name: str = "run-master-0", container: str = "pytorch", **more: Any
) -> Json:
    how = {"exitCode": code, "message": message} | {"finishedAt": "2026-01-01T00:00:09Z"} | more
    key = "containerStatuses" if container == "pytorch" else "initContainerStatuses"
    return pod(name, **{key: [{"name": container, "state": {"terminated": how}}]})


def restarted(code: int, **how: Any) -> Json:
    last = {"terminated": {"exitCode": code, **how}}
    state = {
        "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}
    }
    status = {"name": "pytorch", "restartCount": 7, "state": state, "lastState": last}
    return pod(phase="Running", containerStatuses=[status])


def unscheduled(message: str) -> Json:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(phase="Pending", conditions=[condition])


def disrupted(reason: str, message: str) -> Json:
    gone = ended(143)
    gone["status"]["conditions"] = [{"type": "DisruptionTarget", "reason": reason, "message": message}]
    return gone


def event(name: str, reason: str, message: str) -> Json:
    about = {"name": name}
    return {
        "kind": "Event",
        "metadata": {"name": reason.lower()},
        "type": "Warning",
        "involvedObject": about,
    } | {
        "reason": reason,
        "message": message,
    }


def claim() -> Json:
    return {"kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "status": {"phase": "Pending"}}


def queued() -> list[Json]:
    held = job("Suspended")
    held["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    said = "couldn't assign flavors: insufficient unused quota for nvidia.com/gpu"
    condition = {"type": "QuotaReserved", "status": "False", "message": said}
    return [held, {"kind": "Workload", "metadata": {"name": "w"}, "status": {"conditions": [condition]}}]


WATCHDOG = (
    "[rank{0}]:[E101 00:10:00 ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=8, Timeout(ms)=600000) ran for 600012 "
    "milliseconds before timing out."
)
TRACEBACK = "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\n"
DEADLINE = "PyTorchJob run has failed because it was active longer than specified deadline"
BACKOFF = "PyTorchJob run has failed because it has reached the specified backoff limit"
QUOTA = 'pods "run-master-0" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8'
WEBHOOK = 'admission webhook "policy.example.com" denied the request: images come from registry.example alone'
SECURITY = 'pods "run-master-0" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'
UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
ONE = ended(1)  # a pod whose code says nothing

#: (the reason, words of the sentence, objects, logs by pod): the cause is to be named, and with confidence
CAUSES: dict[str, tuple[str, str, list[Json], dict[str, str]]] = {
    "image pull": (
        "ImagePullBackOff",
        "x:1",
        [job("Created"), waiting("ImagePullBackOff", 'Back-off pulling image "x:1"')],
        {},
    ),
    "image name": (
        "InvalidImageName",
        "does not start",
        [job("Created"), waiting("InvalidImageName", "bad")],
        {},
    ),
    "config error": (
        *("CreateContainerConfigError", 'secret "hf" not found'),
        *([job("Created"), waiting("CreateContainerConfigError", 'secret "hf" not found')], {}),
    ),
    "no GPU free": (
        *("Unschedulable", "Insufficient nvidia.com/gpu"),
        *([job("Created"), unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")], {}),
    ),
    "a taint": (
        "Unschedulable",
        "taint",
        [job("Created"), unscheduled("0/3: 3 node(s) had untolerated taint")],
        {},
    ),
    "claim of no class": (
        *("ClaimPending", 'storageclass "fast" not found'),
        *([job("Created"), unscheduled(UNBOUND), claim()], {}),
    ),
    "mount": (
        *("FailedMount", 'configmap "run" not found'),
        [
            job("Created"),
            pod(phase="Pending"),
            event("run-master-0", "FailedMount", 'configmap "run" not found'),
        ],
        {},
    ),
    "quota": (
        "QuotaExceeded",
        "exceeded quota",
        [job("Created"), event("run", "FailedCreatePod", QUOTA)],
        {},
    ),
    "webhook": (
        "Refused",
        "registry.example alone",
        [job("Created"), event("run", "FailedCreate", WEBHOOK)],
        {},
    ),
    "pod security": (
        "PodSecurity",
        "runAsNonRoot",
        [job("Created"), event("run", "FailedCreate", SECURITY)],
        {},
    ),
    "service account": (
        *("NoServiceAccount", "trainer", [job("Created")]),
        {},
    ),
    "Kueue": ("Queued", "insufficient unused quota", queued(), {}),
    "suspended": ("Suspended", "names no queue", [{**job(""), "spec": {"runPolicy": {"suspend": True}}}], {}),
    "memory limit": ("OOMKilled", "more memory than its limit", [job(), ended(137, reason="OOMKilled")], {}),
    "memory limit in a loop": (
        "OOMKilled",
        "does not run well",
        [job("Running"), restarted(137, reason="OOMKilled")],
        {},
    ),
    "memory limit of one, the other lost it": (
        *("OOMKilled", "run-worker-0"),
        *(
            [
                job(),
                ended(170, "exit 170: a peer is gone"),
                ended(137, name="run-worker-0", reason="OOMKilled"),
            ],
            {},
        ),
    ),
    "user's config": ("Error", "learning_rate is -1", [job(), ended(78, "exit 78: learning_rate is -1")], {}),
    "user's data": ("Error", "no column 'text'", [job(), ended(65, "exit 65: no column 'text'")], {}),
    "prepare": (
        "Error",
        "prepare ended",
        [job(), ended(69, "exit 69: the hub is away", container="prepare")],
        {},
    ),
    "evicted": (
        *("Evicted", "ephemeral-storage"),
        *([job(), pod(reason="Evicted", message="The node was low on resource: ephemeral-storage.")], {}),
    ),
    "preempted": (
        *("PreemptionByScheduler", "higher priority"),
        *([job("Restarting"), disrupted("PreemptionByScheduler", "preempted by pod x")], {}),
    ),
    "drained": (
        "EvictionByEvictionAPI",
        "drained",
        [job("Restarting"), disrupted("EvictionByEvictionAPI", "x")],
        {},
    ),
    "liveness": (
        *("LivenessProbe", "liveness probe"),
        [
            *(job("Running"), restarted(137, reason="Error")),
            event("run-master-0", "Killing", "Container pytorch failed liveness probe, will be restarted"),
        ],
        {},
    ),
    "deadline": ("DeadlineExceeded", "deadline", [job(message=DEADLINE), ended(143)], {}),
    "no such program": (
        *("StartError", "torchrn"),
        *(
            [job(), ended(128, 'exec: "torchrn": executable file not found in $PATH', reason="StartError")],
            {},
        ),
    ),
    "GPU memory on one rank": (
        *("GpuOutOfMemory", "run-worker-0"),
        [job(), ended(1), ended(1, name="run-worker-0")],
        {
            "run-master-0": "[rank0]: torch.distributed.DistBackendError: NCCL error: ncclRemoteError",
            "run-worker-0": "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        },
    ),
    "disk full": (
        "DiskFull",
        "a volume is full",
        [job(), ONE],
        {"run-master-0": "OSError: [Errno 28] No space left on device"},
    ),
    "shared memory": (
        *("SharedMemory", "/dev/shm", [job(), ONE]),
        {"run-master-0": "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error."},
    ),
    "package": (
        "PackageMissing",
        "peft",
        [job(), ONE],
        {"run-master-0": TRACEBACK + "ModuleNotFoundError: No module named 'peft'"},
    ),
    "script": (
        *("ProgramMissing", "/app/tain.py", [job(), ended(2)]),
        {"run-master-0": "python: can't open file '/app/tain.py': [Errno 2] No such file or directory"},
    ),
    "gated model": (
        *("HubRefused", "refuses", [job(), ONE]),
        {
            "run-master-0": TRACEBACK
            + "huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model a/b"
        },
    ),
    "driver": (
        *("GpuDriver", "driver", [job(), ONE]),
        {"run-master-0": "RuntimeError: The NVIDIA driver on your system is too old (found version 11040)."},
    ),
    "processes": (
        *("TooManyProcesses", "more processes", [job(), ONE]),
        {"run-master-0": "[rank3]: torch.AcceleratorError: CUDA error: invalid device ordinal"},
    ),
    "permission": (
        *("NoPermission", "/output/run", [job(), ONE]),
        {"run-master-0": "PermissionError: [Errno 13] Permission denied: '/output/run'"},
    ),
    "an exception of the script": (
        *("Exception", "batch is empty", [job(), ONE]),
        {
            "run-master-0": TRACEBACK
            + "ValueError: batch is empty\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
        },
    ),
    "termination message of a foreign image": (
        *(
            "PackageMissing",
            "trl",
            [job(), ended(1, TRACEBACK + "ModuleNotFoundError: No module named 'trl'")],
            {},
        ),
    ),
    "one rank of four is silent": (
        *("RankMissing", "rank 2 did not come to ALLREDUCE", [job(), ONE]),
        {
            "run-master-0": "\n".join(
                [WATCHDOG.format(rank) for rank in (0, 1, 3)] + ["[rank2]: loading shard 7"]
            )
        },
    ),
    "of a TrainJob": (
        *("OOMKilled", "TrainJob run failed"),
        *([job(kind="TrainJob"), ended(137, name="run-node-0-0-abc", reason="OOMKilled")], {}),
    ),
    "of a Job without a message": (
        *("GpuOutOfMemory", "Job run failed: run-0-x1"),
        [job(kind="Job", reason="BackoffLimitExceeded"), ended(1, name="run-0-x1")],
        {"run-0-x1": "torch.OutOfMemoryError: CUDA out of memory."},
    ),
    "a log alone": (
        "DiskFull",
        "a volume is full",
        [],
        {"saved": "OSError: [Errno 28] No space left on device"},
    ),
    "our own words in a log": (
        *("Podtune", "max_length has to be 1 or more", []),
        {"saved": "podtune: error: config.yaml: max_length has to be 1 or more\n  fix: 512"},
    ),
}
CAUSES["service account"][2].append(
    event(
        "run",
        "FailedCreate",
        'pods "run-master-0" is forbidden: serviceaccount "trainer" not found',
    )
)
CAUSES["claim of no class"][2].append(event("data", "ProvisioningFailed", 'storageclass "fast" not found'))

#: what is there does not hold the cause: it may be told, and has to be hedged
SURVIVED: dict[str, tuple[str, list[Json], dict[str, str]]] = {
    "a refusal before there were all pods": (
        "DiskFull",
        [job(), ONE, event("run", "FailedCreatePod", QUOTA)],
        {"run-master-0": "OSError: [Errno 28] No space left on device"},
    ),
    "an out of memory that was caught": (
        "PackageMissing",
        [job(), ONE],
        {"run-master-0": "CUDA out of memory, half of it\nModuleNotFoundError: No module named 'x'"},
    ),
    "a cache that cannot be written": (
        "Exception",
        [job(), ONE],
        {"run-master-0": "matplotlib: [Errno 13] Permission denied: '/.config'\nValueError: no rows"},
    ),
    "a deadline of a job that failed all the time": (
        "Exception",
        [job(message=DEADLINE), ONE],
        {"run-master-0": "ValueError: no rows"},
    ),
    "the later of two pods": (
        "DiskFull",
        [job(), ended(1, finishedAt="2026-01-01T00:00:30Z"), ended(1, name="run-worker-0")],
        {
            "run-master-0": "ModuleNotFoundError: No module named 'x'",
            "run-worker-0": "OSError: [Errno 28] No space left on device",
        },
    ),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_what_was_survived_or_followed_is_not_the_cause(name: str, tmp_path: Path) -> None:
    reason, objects, logs = SURVIVED[name]
    found = answer(tmp_path, objects, logs)
    assert found.cause is not None
    assert found.cause.reason == reason, found


UNKNOWN: dict[str, tuple[list[Json], dict[str, str]]] = {
    "an exit code alone": ([job(), ONE], {}),
    "killed without a reason": ([job(), ended(137)], {}),
    "a lost peer alone": ([job(), ended(170, "exit 170: a collective failed")], {}),
    "terminated": ([job("Restarting"), ended(143)], {}),
    "backoff alone": ([job(message=BACKOFF)], {}),
    "a collective timed out on all ranks": (
        [job(), ONE],
        {"run-master-0": "\n".join(map(WATCHDOG.format, (0, 1)))},
    ),
    "a name does not resolve": (
        [job(), ONE],
        {"run-master-0": "socket.gaierror: [Errno -2] Name or service not known"},
    ),
    "a connection was reset": ([job(), ONE], {"run-master-0": "RuntimeError: Connection reset by peer"}),
    "a log that says nothing": ([], {"saved": "step 1 loss 2.0\nstep 2 loss 1.9"}),
}


def answer(folder: Path, objects: list[Json], logs: dict[str, str]) -> Answer:
    items = [{"apiVersion": "v1", **each} for each in objects]
    (folder / "objects.yaml").write_text(yaml.safe_dump({"kind": "List", "apiVersion": "v1", "items": items}))
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(text)
    return explain(from_files(folder))


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_named(name: str, tmp_path: Path) -> None:
    reason, words, objects, logs = CAUSES[name]
    found = answer(tmp_path, objects, logs)
    assert found.cause is not None
    assert (found.cause.reason, found.certain, words in found.sentence) == (reason, True, True), found


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_claimed(name: str, tmp_path: Path) -> None:
    found = answer(tmp_path, *UNKNOWN[name])
    assert not found.certain, found
    assert "no certain cause" in found.sentence or "nothing here says why" in found.sentence


def test_a_job_that_runs_or_has_succeeded_has_no_cause(tmp_path: Path) -> None:
    noisy = {"run-master-0": "ValueError: caught, and tried again"}
    running = answer(tmp_path, [job("Running"), pod(phase="Running")], noisy)
    assert (running.cause, running.sentence) == (
        None,
        "PyTorchJob run runs, and nothing is wrong with its pods",
    )
    done = answer(tmp_path, [job("Succeeded"), pod(phase="Succeeded")], noisy)
    assert (done.cause, done.sentence) == (None, "PyTorchJob run succeeded")


def test_each_of_several_jobs_that_were_saved_gets_its_own_answer(tmp_path: Path) -> None:
    other = {**job("Running"), "metadata": {"name": "run-2"}}
    items = [job(), ended(137, reason="OOMKilled"), other, pod("run-2-master-0", "Running")]
    text = yaml.safe_dump_all([{"apiVersion": "v1", **each} for each in items])
    (tmp_path / "all.yaml").write_text(text)
    shown = podtune("why", str(tmp_path / "all.yaml")).stdout.splitlines()
    assert shown[0].startswith("PyTorchJob run failed: run-master-0: pytorch was killed")
    assert shown[-1] == "PyTorchJob run-2 runs, and nothing is wrong with its pods"


def run_folder(folder: Path, **record: Any) -> Path:
    (folder / "run.json").write_text(json.dumps({"schema": "podtune.run/1", "status": "error", **record}))
    return folder


def test_a_run_s_folder_says_how_it_ended(tmp_path: Path) -> None:
    found = explain(from_files(run_folder(tmp_path, exit_code=65, reason="data.jsonl has no rows")))
    assert found.sentence == f"{tmp_path} failed: data.jsonl has no rows"
    assert found.certain
    assert "exit code 65" in found.evidence[0]
    assert explain(from_files(run_folder(tmp_path, status="ok"))).sentence == f"{tmp_path} succeeded"
    beat = {"time": 1.0, "step": 41, "step_at": 1.0, "pid": 2**22 + 1, "host": "gone", "started": 1.0}
    beat |= {"job": ""}
    (tmp_path / LOCK_FILE).write_text(json.dumps(beat))
    died = explain(from_files(run_folder(tmp_path, status="running")))
    assert "no sign of life from gone" in died.sentence
    assert not died.certain


def dump(rank: int, sequence: int, operation: str = "nccl:all_reduce", *, done: bool = False) -> bytes:
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": sequence, "profiling_name": operation}
    entry |= {"input_sizes": [[8]], "state": "completed" if done else "scheduled", "retired": done}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": [{**entry, "is_p2p": False}]}, 2)


@pytest.mark.parametrize(
    ("dumps", "words"),
    [
        ({0: dump(0, 42), 1: dump(1, 42), 2: dump(2, 41, done=True)}, "rank 2 never came to it"),
        ({0: dump(0, 42), 1: dump(1, 42)}, "rank 2 left no dump"),
        ({0: dump(0, 42), 1: dump(1, 42, "nccl:all_gather"), 2: dump(2, 42)}, "in different operations"),
    ],
)
def test_a_flight_recorder_s_dumps_name_the_rank(dumps: dict[int, bytes], words: str, tmp_path: Path) -> None:
    for rank, content in dumps.items():
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(content)
    found = explain(from_files(tmp_path))
    assert words in found.sentence
    assert found.certain


def test_a_run_has_its_dumps_written_where_why_looks_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_library_environment(1, str(tmp_path / "nccl_trace_rank_"))
    Path(f"{os.environ['TORCH_FR_DUMP_TEMP_FILE']}0").write_bytes(dump(0, 42))
    assert "rank 0 waits in collective 42" in explain(from_files(tmp_path)).sentence
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine"})
    set_library_environment(1, "/output/x")
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_a_dump_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": Planted()}))
    assert not explain(from_files(tmp_path)).certain
    assert "executed" not in capsys.readouterr().out


def test_logs_of_several_pods_in_one_file_are_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "all.log").write_text(
        "[pod/run-master-0/pytorch] RuntimeError: Connection reset by peer\n"
        "[pod/run-worker-1/pytorch] 2026-01-01T00:00:00.5Z OSError: [Errno 28] No space left on device\n"
        "run-worker-2 | fine\n"
    )
    assert "run-worker-1: a volume is full" in explain(from_files(tmp_path / "all.log")).sentence


def test_the_command_reads_a_job_of_the_cluster_and_the_newest_one(api: Api) -> None:
    api.add("run", "Failed", [], phase="Failed")
    api.pods[0]["status"] = ended(1)["status"]
    api.logs["run-master-0"] = ["2026-01-01T00:00:00Z OSError: [Errno 28] No space left on device"]
    for words in (("why", "run"), ("why",)):
        shown = podtune(*words).stdout.splitlines()
        assert shown[0] == "PyTorchJob run failed: run-master-0: a volume is full"
        assert "  | OSError: [Errno 28] No space left on device" in shown
    content = json.loads(podtune("why", "run", "--json").stdout)
    assert (content["schema"], content["certain"], content["cause"]["reason"]) == (
        "podtune.why/1",
        True,
        "DiskFull",
    )
    assert "there is no job 'nothing'" in str(podtune("why", "nothing").exception)
    assert "no such file" in str(podtune("why", "gone.yaml").exception)
