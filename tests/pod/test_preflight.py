"""Preflight by two pods: they agree on one verdict, and it names the pod that is to blame."""

from __future__ import annotations

import datetime
import json
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.gpus import H100, on_cards
from support.launch import Launcher, Podtune, free_port

from podtune.commands import preflight
from podtune.machine import facts
from podtune.machine.facts import machine_cores
from podtune.pod import compute, rendezvous
from podtune.pod.pod_info import PodInfo
from podtune.pod.preflight import AllReduce, Verdict, assess, slow
from podtune.run.distributed import why_no_cuda
from podtune.run.world import PodPlace


class Job:
    """Two pods of one process each, set up as the operator would."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self.folder, self.launcher, self.port = folder, launcher, free_port()
        (folder / "output").mkdir()

    def start(self, rank: int, command: list[str], config: str = "max_steps: 1", **more: str) -> Podtune:
        """``podtune COMMAND`` in the pod with this rank; ``{config}`` is its training YAML."""
        path = self.folder / f"config-{rank}.yaml"
        path.write_text(f"{config}\noutput_dir: {self.folder / 'output'}\n")
        env = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(self.port),
        }
        env |= {
            "PET_NODE_RANK": str(rank),
            "PODTUNE_POD_NAME": f"pod-{rank}",
            "OUTPUT_DIR": str(self.folder / "output"),
            **more,
        }
        return self.launcher.podtune(*(word.format(config=path) for word in command), **env)

    def preflight(self, rank: int, config: str = "max_steps: 1", timeout_s: int = 30, **more: str) -> Podtune:
        return self.start(
            rank, ["preflight", "--json", "--config", "{config}", "--timeout", str(timeout_s)], config, **more
        )


@pytest.fixture
def job(tmp_path: Path, launcher: Launcher) -> Job:
    return Job(tmp_path, launcher)


def verdict_of(process: Podtune) -> tuple[int, dict[str, Any]]:
    code, out, err = process.end()
    assert out, err
    return code, json.loads(out.splitlines()[-1])


def test_two_pods_that_fit_agree_and_measure_an_all_reduce(job: Job) -> None:
    (code, one), (_, other) = map(verdict_of, [job.preflight(0), job.preflight(1)])
    assert code == 0, one
    assert one == other
    assert one["measured"]["all_reduce"]["bus_gb_per_s"] > 0
    assert [facts["pod"] for facts in one["pods"]] == ["pod-0", "pod-1"]
    assert list((job.folder / "output").iterdir()) == [], "it leaves the volume as it was"


def test_another_configuration_on_one_pod_is_named_by_both(job: Job) -> None:
    started = [job.preflight(0), job.preflight(1, "max_steps: 2")]
    (code, one), (other_code, other) = map(verdict_of, started)
    assert (code, other_code) == (65, 65), one
    assert one["sentence"] == other["sentence"]
    assert any("config" in problem["text"] or "config" in problem["check"] for problem in one["problems"]), (
        one
    )


@pytest.mark.parametrize("present", [0, 1])
def test_a_pod_that_never_comes_is_missed_within_the_time(present: int, job: Job) -> None:
    started = time.monotonic()
    code, verdict = verdict_of(job.preflight(present, timeout_s=6))
    assert code == 69, verdict
    assert time.monotonic() - started < 45  # six seconds, and the import of torch on a busy machine
    assert f"rank {1 - present}" in verdict["sentence"]


def test_a_rank_that_two_pods_have_is_named_and_so_is_the_one_that_is_missing(job: Job) -> None:
    started = [job.preflight(rank, timeout_s=8, PET_NNODES="3") for rank in (0, 1, 1)]
    ends = [verdict_of(process) for process in started]
    assert {code for code, _ in ends} == {69}
    assert "rank 2 did not arrive" in ends[0][1]["sentence"]
    assert any("rank 1 is also another pod's" in verdict["sentence"] for _, verdict in ends[1:])


def test_a_master_that_is_lost_in_mid_preflight_is_said_to_be(job: Job) -> None:
    import torch.distributed as dist

    # the third never comes
    master, worker = (job.preflight(rank, timeout_s=60, PET_NNODES="3") for rank in (0, 1))
    stores: Any = dist
    store = stores.TCPStore(
        "127.0.0.1", job.port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=60)
    )
    store.wait(["facts/1"])  # the worker has arrived
    master.kill()
    code, verdict = verdict_of(worker)
    assert code == 69
    assert "the master's pod was lost" in verdict["sentence"]


def test_a_port_that_is_taken_is_named(job: Job) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        job.port = taken.getsockname()[1]
        code, verdict = verdict_of(job.preflight(0, timeout_s=10))
    assert code == 69
    assert f"port is busy at 127.0.0.1:{job.port}" in verdict["sentence"]


def test_a_volume_that_each_pod_has_for_itself_is_named(job: Job) -> None:
    started = [job.preflight(rank, OUTPUT_DIR=str(job.folder / f"own-{rank}")) for rank in (0, 1)]
    (code, one), (other_code, other) = map(verdict_of, started)
    assert (code, other_code) == (65, 65), one
    assert one == other
    assert one["sentence"].startswith("pod-0: it does not see what pod-1 wrote to")


def test_a_pod_without_its_gpu_is_named_on_all_pods(job: Job) -> None:
    started = [job.preflight(0, PODTUNE_GPUS_PER_POD="0"), job.preflight(1, PODTUNE_GPUS_PER_POD="99")]
    (code, one), (other_code, other) = map(verdict_of, started)
    assert (code, other_code) == (69, 69), one
    assert one == other
    assert one["sentence"].startswith("pod-1: 99 GPUs asked for and")


def test_a_pod_that_is_started_again_waits_for_the_end_of_the_last_attempt(job: Job) -> None:
    import torch.distributed as dist

    store: Any = dist
    # as torchrun's, on the same port
    last = store.TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False)
    worker = job.preflight(1, timeout_s=60)
    deadline = time.monotonic() + 60
    while not connected(job.port, worker.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)  # the kernel's table of connections cannot be waited on
    del last
    (code, verdict), (other_code, _) = map(verdict_of, [job.preflight(0, timeout_s=60), worker])
    assert (code, other_code) == (0, 0), verdict


def test_gpus_that_cuda_cannot_open_are_named_also_in_a_pod_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(facts, "gpu_devices", lambda: 2)
    monkeypatch.setenv("PODTUNE_GPUS_PER_POD", "2")
    verdict = preflight.run(None, 30.0)
    assert f"none of 2 GPUs can be used by CUDA: {why_no_cuda()}" in verdict.sentence
    assert verdict.exit_code == 69


def test_launch_starts_nothing_in_a_single_pod_whose_gpu_cannot_be_used(job: Job) -> None:
    process = launched(job, 0, PET_NNODES="1", PODTUNE_GPUS_PER_POD="1")
    code, out, err = process.end()
    assert code == 69, out + err
    assert "1 GPU asked for and none there: " in out
    assert "rank 0" not in out


def test_each_gpu_multiplies_and_reaches_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert list(compute.faults(["cpu", "cpu"])) == []
    on_cards(monkeypatch, H100, 2)
    monkeypatch.setattr(compute, "faults", lambda devices: [f"{devices[1]}: ECC"])
    assert compute.try_gpus() == (2, H100.name, "cuda:1: ECC")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compute.try_gpus() == (0, "", why_no_cuda())


def test_a_gpu_without_a_c_compiler_is_not_fit() -> None:
    info = PodInfo("p", 0, gpus=1, gpus_asked=1, gpus_usable=1, c_compiler="/usr/bin/gcc")
    assert assess([info]) == []
    (problem,) = assess([replace(info, c_compiler="")])
    assert (problem.check, problem.severity) == ("compiler", "error")


def test_a_verdict_arrives_as_it_was_sent_also_with_the_facts_of_another_version() -> None:
    info = PodInfo("p", 0, volume_error="/cache: read-only", versions={"torch": "2"})
    verdict = Verdict(tuple(assess([info])), (info,), AllReduce("gloo", 16, 0.5, 1.0))
    sent = json.loads(json.dumps(verdict.to_json()))
    assert Verdict.from_json(sent) == verdict
    sent["pods"][0]["new"] = 1
    assert Verdict.from_json(sent).pods == (info,)


@pytest.mark.parametrize(
    ("backend", "gb_per_s", "severity"),
    [
        ("nccl", 3.2, None),
        ("nccl", 3.0, "warning"),
        ("nccl", 1.3, "warning"),
        ("nccl", 1.2, "error"),
        ("gloo", 0.1, None),
    ],
)
def test_a_network_of_gpus_is_held_to_what_the_preset_promises(
    backend: str, gb_per_s: float, severity: str | None
) -> None:
    found = list(slow(AllReduce(backend, 16 << 20, 0.1, gb_per_s), 12.5))
    assert [each.severity for each in found] == [severity] * bool(severity)
    assert all(f"{gb_per_s} GB/s of the 12.5" in each.text and "NET/Socket" in each.fix for each in found)
    assert not list(slow(AllReduce(backend, 16 << 20, 0.1, gb_per_s), 0)), "no preset promises nothing"
    assert Verdict(tuple(found), ()).exit_code == (69 if severity == "error" else 0)


def connected(port: int, pid: int) -> bool:
    import psutil

    return any(
        one.raddr and one.raddr.port == port and one.status == "ESTABLISHED"
        for one in psutil.Process(pid).net_connections("tcp")
    )


def test_a_pod_that_is_started_again_joins_others_that_are_past_their_preflight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(rendezvous, "UNDERWAY_S", 0.2)
    port, store = free_port(), dist
    running = store.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=5)
    )  # type: ignore[attr-defined]
    with pytest.raises(rendezvous.RendezvousFailed, match="past their preflight"):
        rendezvous.Rendezvous(
            PodPlace(1, 2, 1, "127.0.0.1", port), PodInfo("pod-1", 1), wait_s=30, timeout_s=5
        )
    del running


@pytest.mark.parametrize(
    ("master", "names"),
    [
        ("run-master-0", ["run-master-0", "run-worker-0", "run-worker-1"]),
        ("run-node-0-0.run", ["run-node-0-0", "run-node-0-1", "run-node-0-2"]),
        ("10.0.0.7", ["rank 0", "rank 1", "rank 2"]),
    ],
)
def test_pods_that_are_missing_are_called_by_the_names_that_the_operator_gives(
    master: str, names: list[str]
) -> None:
    assert [rendezvous.name_of(rank, PodPlace(0, 3, 1, master, 23456)) for rank in range(3)] == names


def launched(job: Job, rank: int, **more: str) -> Podtune:
    """``podtune launch`` with the preflight before a program that says who it is."""
    program = job.folder / "program.py"
    program.write_text(
        "import os, torch.distributed as d; d.init_process_group('gloo'); d.barrier(); "
        "e = os.environ; print('rank', e['RANK'], 'with', e.get('PODTUNE_CORES'), e['GOMP_SPINCOUNT'])"
    )
    return job.start(rank, ["launch", "--preflight", "{config}", "--wait", "60", "--", str(program)], **more)


def test_launch_starts_training_on_the_same_port_once_the_pods_have_passed(job: Job) -> None:
    started = [launched(job, 0), launched(job, 1)]
    (code, first, err), (other_code, second, _) = (process.end() for process in started)
    assert (code, other_code) == (0, 0), err
    share = max(1, machine_cores() // 2)
    assert first.splitlines()[-1] == f"rank 0 with {share} 1000", "both are on this node"
    assert "preflight: ok: 2 pods agree and reach each other" in first
    assert second.splitlines() == [f"rank 1 with {share} 1000"], "one pod tells the verdict of all"


def test_launch_ends_for_good_and_starts_nothing_on_a_pod_without_its_gpu(job: Job) -> None:
    started = [launched(job, rank, PODTUNE_GPUS_PER_POD="99") for rank in (0, 1)]
    ends = [process.end() for process in started]
    assert [code for code, _, _ in ends] == [69, 69], ends
    assert all("rank" not in out.splitlines()[-1] and "99 GPUs asked for" in out for _, out, _ in ends)
