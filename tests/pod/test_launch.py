"""``podtune launch`` ends with the code of the rank that failed. The real launcher on a program of a few
lines.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from click.testing import CliRunner

from podtune.cli import load
from podtune.pod.launch import _failed, _Killed, exit_code_of, rendezvous_s
from podtune.run.errors import Unavailable

# Rank 0 does what it is told, the others wait: for the launcher to end them.
PROGRAM = """
import os, signal, sys
what, rank = sys.argv[1], int(os.environ["RANK"])
if what == "ok":
    sys.exit(0)
if what == "wait":  # end as training does after saving
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("ready", rank, flush=True)
elif rank == 0:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(what))
signal.pause()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("launch") / "program.py"
    path.write_text(PROGRAM)
    return path


def command(program: Path, what: str, *options: str, processes: int = 1) -> list[str]:
    launch = ["launch", "--shutdown-timeout", "5", *options, "--"]
    return [*launch, "--nproc-per-node", str(processes), str(program), what]


@pytest.mark.parametrize(("what", "code"), [("78", 78), ("kill", 137)])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(launcher, program, what, code):
    returned, _, err = launcher.podtune(*command(program, what, processes=2)).end()
    assert returned == code
    assert "podtune launch: rank 0 ended with" in err


def test_a_good_run_ends_with_zero_and_leaves_no_folder_behind(launcher, program, tmp_path):
    assert launcher.podtune(*command(program, "ok", processes=2), TMPDIR=str(tmp_path)).wait() == 0
    assert list(tmp_path.iterdir()) == []


def test_sigterm_reaches_the_ranks_and_the_code_says_preempted(launcher, program):
    process = launcher.podtune(*command(program, "wait"))
    assert process.stdout.readline() == "ready 0\n"
    process.signal(signal.SIGTERM)
    assert process.wait() == 143


RESTARTED = """
import os
import torch, torch.distributed as dist
from podtune.run.distributed import (cleanup_distributed, setup_distributed)
world = setup_distributed(timeout_s=20, use_cpu=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and world.rank == 1:
    os._exit(9)
total = torch.ones(())
dist.all_reduce(total)
cleanup_distributed()
os.write(1, f"rank {world.rank} counts {int(total)}\\n".encode())  # in one piece, beside the other rank's
"""


def test_processes_that_torchrun_starts_again_meet_each_other_and_not_those_before(launcher, tmp_path):
    path = tmp_path / "restarted.py"
    path.write_text(RESTARTED)
    words = ["launch", "--", "--standalone", "--max-restarts=1", "--nproc-per-node=2", path]
    code, out, err = launcher.podtune(*words).end()
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 counts 2", "rank 1 counts 2"]


def test_a_master_that_is_not_there_is_a_lost_peer_named_by_its_address(launcher, program):
    with socket.socket() as bound:  # bound and not listening: nobody answers, and nobody else takes it
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        pets = {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        conf = "timeout=5,read_timeout=5"
        code, _, err = launcher.podtune(*command(program, "ok"), **pets, PET_RDZV_CONF=conf).end()
    assert code == 170, err
    assert f"did not meet at 127.0.0.1:{port}" in err


def test_failures_that_may_be_retried_are_counted_over_pods_and_end_for_good(launcher, program, tmp_path):
    environment = {"OUTPUT_DIR": str(tmp_path), "PODTUNE_POD_NAME": "run-worker-0"}
    words = command(program, "170", "--max-retries", "1")
    codes = [launcher.podtune(*words, **environment).wait() for _ in range(3)]
    assert codes == [170, 75, 170], "the count starts again after the end for good"


LOST = """
import os, signal, time
from podtune.pod.launch import terminable
from podtune.run.errors import Unavailable
with terminable():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    except SystemExit:
        pass  # as the start-up of numpy does, in C
    print("lost", flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["time.sleep(60)", "pass"])
def test_a_sigterm_whose_exception_is_swallowed_ends_the_launcher_all_the_same(then):
    done = subprocess.run([sys.executable, "-c", LOST.format(then=then)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("lost\n", 143)


ASKED = """
import os, signal, sys, time
from podtune.run.launcher import (follow_launcher, note_end)
follow_launcher()
what = sys.argv[1]
if what == "saves":
    signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), os._exit(143)))
elif what == "ended well":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note_end(0)
else:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
if what == "volume":
    os.kill(int(os.environ["PODTUNE_LAUNCHER"]), signal.SIGUSR1)
time.sleep(6 if what == "ended well" else 600)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    path = tmp_path_factory.mktemp("launch") / "asked.py"
    path.write_text(ASKED)
    return path


@pytest.mark.parametrize(
    ("what", "signals", "code"),
    [
        ("saves", [signal.SIGINT], 130),
        ("saves", [signal.SIGHUP], 129),
        ("stays", [signal.SIGINT, signal.SIGINT], 130),
        ("ended well", [signal.SIGTERM], 0),
        ("volume", [], 170),
    ],
)
def test_how_a_job_ends_that_is_asked_to(launcher, asked, what, signals, code):
    words = command(asked, what)
    words[words.index("--shutdown-timeout") + 1] = "60"
    process = launcher.podtune(*words)
    rank = int(process.stdout.readline().split()[1])
    for number in signals:
        process.signal(number)
        while (line := process.stderr.readline()) and "death signal" not in line:
            pass  # signals that come at once are one
    assert process.wait() == code
    assert ("saved" in process.stdout.read()) == (what == "saves")
    with contextlib.suppress(psutil.NoSuchProcess):
        assert (
            psutil.Process(rank).status() == psutil.STATUS_ZOMBIE
        )  # ended; nobody may be there to ask for it


def test_ranks_die_with_their_launcher(launcher, asked):
    process = launcher.podtune(*command(asked, "stays"))
    rank = psutil.Process(int(process.stdout.readline().split()[1]))
    process.kill()
    rank.wait(20)


def test_a_rank_that_torchrun_had_to_kill_is_called_hung(capsys):
    log = logging.getLogger("test.torchrun")
    log.addHandler(killed := _Killed())
    log.propagate = False
    source = Path(str(importlib.util.find_spec("torch").submodule_search_locations[0]))
    text = (source / "distributed/elastic/multiprocessing/api.py").read_text()
    message = "Unable to shutdown process %s via %s, forcefully exiting via %s"
    assert message in text, "torchrun says it in other words"
    log.warning(message, 7, signal.SIGTERM, signal.SIGKILL)
    hung = SimpleNamespace(exitcode=-9, pid=7, timestamp=1)
    peer = SimpleNamespace(exitcode=170, pid=8, timestamp=2)
    assert _failed({0: hung, 1: peer}, killed.pids) == 170
    assert capsys.readouterr().err.splitlines()[1].endswith("rank 0 hung: it did not end when asked to")
    assert _failed({0: hung}, killed.pids) == 170
    oom = SimpleNamespace(exitcode=-9, pid=9, timestamp=1)
    assert _failed({0: oom, 1: peer}, killed.pids) == 137


def test_an_abort_is_said_to_be_a_lost_peer_most_likely_and_is_tried_again(capsys):
    aborted = SimpleNamespace(exitcode=-signal.SIGABRT, pid=7, timestamp=1)
    assert _failed({0: aborted}, []) == 134
    assert "rank 0 ended with SIGABRT (NCCL gave up waiting for a lost peer" in capsys.readouterr().err


def test_pods_that_do_not_meet_within_the_programs_timeout_are_a_lost_peer(launcher, program):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        pets = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "127.0.0.1"}
        words = [*command(program, "ok"), "--timeout_s", "3"]
        code, _, err = launcher.podtune(*words, **pets, PET_MASTER_PORT=str(bound.getsockname()[1])).end()
    assert code == 170, err


def test_the_programs_timeout_is_found_in_its_words_or_its_yaml(tmp_path):
    (tmp_path / "c.yaml").write_text("timeout_s: 12\n")
    config = str(tmp_path / "c.yaml")
    assert rendezvous_s(["-m", "podtune.training", "--config", config]) == 12
    assert rendezvous_s(["-m", "podtune.training", "--config", config, "--timeout_s=7"]) == 7
    assert rendezvous_s(["job.py", "--config", "/absent"]) == 600


def test_a_failure_of_the_prepare_step_ends_the_next_container_with_its_code(launcher, program, tmp_path):
    (tmp_path / "config.yaml").write_text("learning_rat: 1\n")
    verdict = tmp_path / "prepare.json"
    prepare = ["prepare", "--config", str(tmp_path / "config.yaml")]
    assert launcher.podtune(*prepare).wait() == 78
    assert launcher.podtune(*prepare, "--verdict", verdict).wait() == 0
    code, _, err = launcher.podtune(*command(program, "ok", "--verdict", str(verdict))).end()
    assert code == 78
    assert "did you mean 'learning_rate'" in err


@pytest.mark.parametrize(
    ("codes", "one"),
    [
        ([1], 1),
        ([-9], 137),
        ([-11, 170], 139),
        ([170, -15], 170),
        ([143, 143], 143),
        ([170, 65], 65),  # a retry would meet the user's error again
        ([-15, 2], 2),
        ([3, 170], 3),
    ],
)
def test_one_code_stands_for_all_ranks(codes, one):
    assert exit_code_of(codes) == one


def test_one_process_on_each_gpu_without_a_gpu_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ended = CliRunner().invoke(load("train"), ["-n", "gpu", "--config", "sft.yaml"])
    assert isinstance(ended.exception, Unavailable)
    assert "torch sees no GPU" in str(ended.exception)
