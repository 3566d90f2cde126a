"""A process knows its place among the others, or says which variable contradicts which."""

import pytest

from podtune.run.distributed import World, read_world
from podtune.run.errors import UserError

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
