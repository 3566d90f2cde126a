"""One pod of a dry run: init containers in order, then the containers, started again once by its policy."""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from podtune.cluster.dry_run.container import LocalContainer, kill_marked
from podtune.cluster.dry_run.sandbox import Sandbox, rewrite
from podtune.cluster.job.manifest import Json, Pod, expand
from podtune.cluster.job.pytorchjob import INIT_CONTAINER, INJECTED
from podtune.run.errors import DataError

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Deleted"]

POLL_S = 0.05


@dataclass(frozen=True)
class Exit:
    """The end of one container."""

    container: str
    code: int


@dataclass
class PodRun:
    """A pod and its state. ``run`` sees it through in a thread; the other methods are for the main thread."""

    pod: Pod
    sandbox: Sandbox
    local: dict[str, str]  # variables whose value on this machine differs from the pod's
    emit: Callable[[str, str], None]  # (pod, line)
    master_running: threading.Event
    phase: Phase = "Pending"
    restarts: int = 0
    exits: list[Exit] = field(default_factory=list)
    _running: list[LocalContainer] = field(default_factory=list)
    _deleted: bool = False
    # between starting a container and deleting the pod, so that none is started after the deletion
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def mark(self) -> str:
        """The mark of this start's processes, wherever they went; a kill must not reach the next start's."""
        return f"{self.sandbox.root}:{self.name}:{self.restarts}"

    def run(self) -> None:
        """Start the pod and wait for its end, through at most one restart.

        Raises:
            UserError: a container that cannot be started on this machine.
        """
        code = self._init_containers() or self._containers()
        if code and self.retries(code) and not self._deleted:
            # once shows that a run resumes; what fails twice on one machine will fail again
            self.restarts += 1
            self.emit(self.name, f"(the pod is made again; it ended with {code})")
            shutil.rmtree(self.sandbox.folder(self.pod))
            code = self._init_containers() or self._containers()
        self.phase = "Deleted" if self._deleted else "Failed" if code else "Succeeded"

    def retries(self, code: int) -> bool:
        """True if the pod is started again after the exit code."""
        return code not in self.pod.final

    def _init_containers(self) -> int:
        """Run them one after another; the first exit code that is not 0."""
        self.phase = "Pending"
        self.sandbox.fill(self.pod)
        for container in self.pod.spec.get("initContainers") or []:
            if container["name"] == INIT_CONTAINER:
                # the operator's own waits for the master's name, which resolves once its pod runs
                while not self.master_running.wait(POLL_S) and not self._deleted:
                    pass
                continue
            self.emit(self.name, f"(init container {container['name']})")
            if code := self._wait([container]):
                return code
        return 0

    def _containers(self) -> int:
        self.phase = "Running"
        if self.pod.replica_type == "master":
            self.master_running.set()
        return self._wait(self.pod.spec["containers"])

    def _wait(self, containers: list[Json]) -> int:
        """Start all of them and wait for all; the first exit code that is not 0."""
        codes = []
        for container in containers:
            with self._lock:
                if not self._deleted:
                    self._running.append(self._start(container))
        for container, started in zip(containers, self._running, strict=False):
            codes.append(started.wait())
            self.exits.append(Exit(container["name"], codes[-1]))
        self._running.clear()
        kill_marked(self.mark)  # what the first processes left behind goes with the pod
        return next((code for code in codes if code), 0)

    def _start(self, container: Json) -> LocalContainer:
        if not container.get("command"):
            what = f"container {container['name']!r} has no command: what its image starts is not known here"
            raise DataError(what, where=self.name, fix="write the command into the values")
        paths = self.sandbox.mounts(self.pod, container)
        env = self.sandbox.environment(self.pod, container)
        # $(NAME) expands to the cluster's value first, as in the pod; then paths and names become local
        words = [*container["command"], *(container.get("args") or [])]
        command = [rewrite(expand(str(word), env), paths) for word in words]
        env = {key: rewrite(value, paths) for key, value in env.items()}
        env |= {key: value for key, value in self.local.items() if key in env or key not in INJECTED}
        folder = self.sandbox.folder(self.pod)
        return LocalContainer(command, env, folder, self.mark, lambda line: self.emit(self.name, line))

    def kill(self) -> bool:
        """Send SIGKILL to every process of the pod; False if none runs."""
        mark, running = self.mark, list(self._running)
        for container in running:  # before their children, so that they cannot react to those children's end
            container.send(signal.SIGKILL)
        kill_marked(mark)
        return bool(running)

    def delete(self) -> None:
        """Send SIGTERM, as to a deleted pod; nothing of it is started any more."""
        with self._lock:
            self._deleted = True
        for container in list(self._running):
            container.send(signal.SIGTERM)

    def end(self) -> None:
        """End every process of the pod, whatever state it is in."""
        with self._lock:
            self._deleted = True
        self.kill()
