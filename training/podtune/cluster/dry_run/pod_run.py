"""One pod of a dry run, as the kubelet would run it: init containers in order, then the containers, restarted
by policy.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from podtune.cluster.dry_run.container import LocalContainer, kill_marked
from podtune.cluster.dry_run.sandbox import Sandbox, environment, rewrite
from podtune.cluster.job.pytorchjob import INIT_CONTAINER, INIT_TRIES, INIT_WAIT_S, INJECTED, Pod, expand
from podtune.run.errors import DataError

Json = dict[str, Any]
Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Deleted"]

MAX_GRACE_S = 30.0  # a dry run does not wait out terminationGracePeriodSeconds of minutes
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 10, 300  # CrashLoopBackOff, which a dry run counts
RESTART_S = 1.0  # and waits this much of


@dataclass(frozen=True)
class Exit:
    """How one container ended once."""

    container: str
    code: int
    last_line: str


@dataclass
class PodRun:
    """A pod and what has become of it. ``tick`` moves it on; nothing here waits."""

    pod: Pod
    sandbox: Sandbox
    namespace: str
    local: dict[str, str]  # variables whose value on this machine differs from the pod's
    emit: Callable[[str, str], None]  # (pod, line)
    master_ready: Callable[[], bool]
    phase: Phase = "Pending"
    restarts: int = 0  # of its containers, in place
    recreated: int = 0  # times that the operator created it again
    exits: list[Exit] = field(default_factory=list)
    backoff_s: float = 0  # what Kubernetes would have waited between restarts
    stalled: bool = False
    _inits: int = 0
    _running: dict[str, LocalContainer] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)
    _waiting_since: float | None = None
    _kill_at: float | None = None
    _not_before: float = 0
    _filled: bool = False

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def mark(self) -> str:
        """By which its processes are found, wherever they went."""
        return f"{self.sandbox.root}:{self.name}"

    @property
    def ended(self) -> bool:
        """No process of it runs any more."""
        return self.phase in ("Succeeded", "Failed", "Deleted") and not self._running

    def tick(self) -> None:
        """Look at its processes and do what the kubelet would."""
        if self._kill_at is not None:
            self._tick_deletion()
        elif self.phase == "Pending":
            self._tick_inits()
        elif self.phase == "Running":
            self._tick_containers()

    def _tick_inits(self) -> None:
        if not self._filled:
            self.sandbox.fill(self.pod)
            self._filled = True
        inits = self.pod.spec.get("initContainers") or []
        if self._inits == len(inits):
            self.phase = "Running"
            self._tick_containers()
            return
        init = inits[self._inits]
        if init["name"] == INIT_CONTAINER:
            self._tick_name_wait()
        elif init["name"] not in self._running:
            if time.monotonic() >= self._not_before:
                self.emit(self.name, f"(init container {init['name']})")
                self._start(init)
        elif (code := self._ended(init["name"])) is not None:
            if code == 0:
                self._inits += 1
            elif self.pod.spec["restartPolicy"] == "Never":
                self.phase = "Failed"
            else:
                self._count_restart(init["name"], code)

    def _tick_name_wait(self) -> None:
        """The operator's init container: the master's name resolves once its pod is ready."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        if self.master_ready():
            self._inits += 1
        elif time.monotonic() - self._waiting_since > INIT_TRIES * INIT_WAIT_S:
            self.exits.append(Exit(INIT_CONTAINER, 1, "waiting for master"))
            self._waiting_since = None
            self.restarts += 1
            if self.pod.spec["restartPolicy"] == "Never":
                self.phase = "Failed"

    def _tick_containers(self) -> None:
        policy = self.pod.spec["restartPolicy"]
        for container in self.pod.spec["containers"]:
            name = container["name"]
            if name not in self._running and name not in self._done:
                if time.monotonic() >= self._not_before:
                    self._start(container)
            elif name in self._running and (code := self._ended(name)) is not None:
                if policy == "Always" or (policy == "OnFailure" and code):
                    self._count_restart(name, code)
                else:
                    self._done[name] = code
        if len(self._done) == len(self.pod.spec["containers"]):
            self.phase = "Failed" if any(self._done.values()) else "Succeeded"

    def _tick_deletion(self) -> None:
        for name in list(self._running):
            self._ended(name)
        if self._running and self._kill_at is not None and time.monotonic() > self._kill_at:
            for container in self._running.values():
                container.kill()
        if not self._running:
            self.phase = "Deleted"
            self._kill_at = None

    def _ended(self, name: str) -> int | None:
        code = self._running[name].exit_code
        if code is not None:
            container = self._running.pop(name)
            container.kill()  # what its first process left behind goes with the container
            self.exits.append(Exit(name, code, container.tail[-1] if container.tail else ""))
        return code

    def _count_restart(self, name: str, code: int) -> None:
        waited = (
            0 if self.restarts == 0 else min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self.restarts - 1))
        )
        self.restarts += 1
        self.backoff_s += waited
        self._not_before = time.monotonic() + min(waited, RESTART_S)
        self.emit(self.name, f"(the kubelet restarts {name}, which ended with {code})")

    def _start(self, container: Json) -> None:
        argv = [*(container.get("command") or []), *(container.get("args") or [])]
        if not container.get("command"):
            raise DataError(
                f"container {container['name']!r} has no command: what its image starts is not known here",
                where=self.name,
                fix="write the command into the manifest",
            )
        paths = self.sandbox.mounts(self.pod, container)
        env = environment(self.pod, container, self.sandbox, self.namespace)
        # $(NAME) expands to the cluster's value first, as in the pod; then names and paths become local ones.
        argv = [rewrite(expand(str(word), env), paths) for word in argv]
        env = {key: rewrite(value, paths) for key, value in env.items()}
        env |= {key: value for key, value in self.local.items() if key in env or key not in INJECTED}
        folder = self.sandbox.folder(self.pod)
        self._running[container["name"]] = LocalContainer(
            argv, env, folder, self.mark, lambda line: self.emit(self.name, line)
        )

    def strike(self, kind: Literal["kill", "stall"]) -> bool:
        """SIGKILL or SIGSTOP every process of the pod; False if none runs."""
        running = list(self._running.values())
        for container in running:
            container.signal_all(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self.stalled = self.stalled or (kind == "stall" and bool(running))
        return bool(running)

    def delete(self) -> None:
        """As the operator does: SIGTERM now, SIGKILL after the grace period (at most 30 s here)."""
        if self.phase in ("Succeeded", "Failed") and not self._running:
            return
        grace = float(self.pod.spec.get("terminationGracePeriodSeconds") or 30)
        self._kill_at = time.monotonic() + min(grace, MAX_GRACE_S)
        for container in self._running.values():
            container.signal(signal.SIGTERM)

    def recreate(self) -> None:
        """A new pod of the same name: empty folders of its own, no restarts counted."""
        self.emit(self.name, f"(the operator creates the pod again; it ended with {self.exits[-1].code})")
        self.phase, self._inits, self._done, self._waiting_since, self._filled = "Pending", 0, {}, None, False
        self.stalled = False
        self.restarts = 0
        shutil.rmtree(self.sandbox.folder(self.pod))
        self.recreated += 1

    def end(self) -> None:
        """Whatever happens, no process of the pod survives this."""
        for container in list(self._running.values()):
            container.kill()
        self._running.clear()
        kill_marked(self.mark)  # one that was being started when the dry run was interrupted
