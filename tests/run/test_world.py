"""A process knows its place among the others, or says which variable contradicts which."""

import os
import time
from collections.abc import Callable

import pytest
from support.launch import Launcher, free_port

from podtune.run import distributed
from podtune.run.distributed import setup_distributed, why_no_cuda
from podtune.run.errors import UserError
from podtune.run.world import World, read_world

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
}  # fmt: skip


def test_torchruns_environment_is_a_world() -> None:
    assert read_world(TORCHRUN) == World(3, 1, 4, 2, 1, 2, "cpu", "", "job-master-0:23456")


def test_no_environment_is_one_process() -> None:
    assert read_world({}).is_main


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "m"}, "LOCAL_RANK is not set"),
        ({"PET_NNODES": "2"}, "started by plain python"),
        ({"PET_NNODES": "2:4"}, "started by plain python"),
        (TORCHRUN | {"RANK": "4"}, "ranks go from 0 to 3"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "contradict each other"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "not a number"),
        ({"LOCAL_RANK": "0", "RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_a_contradiction_is_named(env: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        read_world(env)
    assert 64 <= caught.value.code <= 78


@pytest.mark.parametrize("promised", ["1", "8"])
def test_gpus_that_were_promised_and_cannot_be_used_are_an_error_with_torchs_reason(
    promised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("PODTUNE_GPUS_PER_POD", promised)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = "CUDA driver initialization failed, error 802: system not yet initialized"

    def init() -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(UserError, match=f"{promised} GPUs? promised.*CUDA can use none: {error}") as caught:
        setup_distributed()
    assert caught.value.code == 69
    assert setup_distributed(use_cpu=True).device_type == "cpu", "asked for, the CPU is used"


def test_fewer_usable_gpus_than_promised_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("PODTUNE_GPUS_PER_POD", "8")
    for name, value in (("is_available", True), ("device_count", 7), ("init", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with pytest.raises(UserError, match=r"8 GPUs promised.* CUDA can use 7"):
        setup_distributed()


def hangs_while_meeting() -> None:
    import torch.distributed as dist

    os.environ.update(TORCHRUN)
    dist.init_process_group = lambda *_, **__: time.sleep(60)
    distributed.SLACK_S = 0.2
    setup_distributed(0.1, use_cpu=True)


def hangs_while_closing() -> None:
    import torch.distributed as dist

    for name in ("is_initialized", "barrier"):
        setattr(dist, name, lambda: True)
    dist.destroy_process_group = lambda: time.sleep(60)
    distributed.SLACK_S = 0.2
    distributed.cleanup_distributed()


@pytest.mark.parametrize("hangs", [hangs_while_meeting, hangs_while_closing])
def test_what_nccl_does_without_a_bound_ends_as_a_lost_peer(
    hangs: Callable[[], None], launcher: Launcher
) -> None:
    process = launcher.process(hangs)
    process.join(50)
    assert process.exitcode == 170


def opens_a_group_of_its_own() -> None:
    import torch
    import torch.distributed as dist

    alone = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    os.environ.update(TORCHRUN | alone | {"GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = str(free_port())
    setup_distributed(47, use_cpu=True)
    group = dist.new_group([0])  # as a device mesh does, for hsdp's groups
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 47


def test_groups_that_others_open_later_are_bounded_too(launcher: Launcher) -> None:
    """torch's own bound is 30 minutes: a node that vanishes inside of a shard group would go unnoticed."""
    process = launcher.process(opens_a_group_of_its_own)
    process.join(50)
    assert process.exitcode == 0


def test_a_driver_that_refuses_growing_segments_gets_plain_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    settings = ["expandable_segments:True"]
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings[0])
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)

    def empty(*_: object, device: torch.device) -> None:
        if settings[-1].endswith("True"):
            raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(torch, "empty", empty)
    distributed._allocate_first(0)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    assert "refuses memory in segments that grow" in capsys.readouterr().err


def test_torchs_own_reason_is_told() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "NVIDIA" in why_no_cuda() or "CUDA" in why_no_cuda()
