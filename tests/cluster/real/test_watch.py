"""podtune watch on a real run: a terminal sees a job go on, and Ctrl-C leaves it alone.

It is asked with the documented rights and no others: no exec, and no volume mounted. One short run of the
chart serves all tests.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.real.test_client import documented_rules, kubeconfig_of, podtune
from support.real_cluster import Cluster, config

ROOT = Path(__file__).parents[3]
STEPS = 60

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def user(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kubeconfig with the rights of docs/cluster.md."""
    return kubeconfig_of(
        cluster.api,
        cluster.namespace,
        "watcher",
        documented_rules(),
        tmp_path_factory.mktemp("user") / "config",
    )


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[str]:
    """A run of two pods that has logged a step."""
    assert cluster.claims("Bound")
    short = config(max_steps=STEPS, eval_steps=STEPS, max_eval_rows=8, logging_steps=1, save_strategy="no")
    cluster.install("seen", distributed={"nodes": 2}, config=short)
    cluster.started("seen", 2)
    yield "seen"
    cluster.ended("seen")


def test_a_job_is_watched_in_a_terminal_and_ctrl_c_leaves_it_alone(
    cluster: Cluster, running: str, user: str
) -> None:
    command = [sys.executable, "-m", "podtune.cli", "watch", running, "-n", cluster.namespace]
    ours, theirs = pty.openpty()
    env = {**os.environ, "KUBECONFIG": user, "COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(
        command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env
    ) as watching:
        os.close(theirs)
        screen = ""
        with contextlib.suppress(OSError):  # it ended by itself
            while not re.search(rf"seen-master-0 \| step +\d+/{STEPS}", screen):
                screen += os.read(ours, 65536).decode(errors="replace")
        watching.send_signal(signal.SIGINT)
        _, told = watching.communicate(timeout=30)
    os.close(ours)
    assert (watching.returncode, "the job continues" in told) == (130, True), screen + told
    for part in ("--- Running", "ddp on 2 x cpu", "loss"):
        assert part in screen, part
    assert "Failed" not in cluster.conditions(running)


def test_a_user_who_may_not_read_logs_is_told_so(cluster: Cluster, running: str, tmp_path: Path) -> None:
    rules = [
        {**rule, "resources": [one for one in rule["resources"] if one != "pods/log"]}
        for rule in documented_rules()
    ]
    user = kubeconfig_of(cluster.api, cluster.namespace, "blind", rules, tmp_path / "config")
    done = podtune("logs", running, "--follow", "-n", cluster.namespace, kubeconfig=user)
    assert done.returncode == 77, done.stdout + done.stderr
    assert 'cannot get resource "pods/log"' in done.stderr
