"""The part of preflight that pods do together: facts exchanged, the volume really shared, an all-reduce
checked and measured.

It uses a store and a process group of its own, on the job's port before torchrun takes it, and no default
group: training then starts as if nothing had been.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from podtune.run.world import PodPlace

Json = dict[str, Any]

REDUCED_BYTES, ROUNDS = 16 * 2**20, 3
VISIBLE_S = 10.0  # a file on a network volume is seen by the other pods within this
READ_S = 10.0  # rank 0 keeps the store open so long for the others to read the verdict
UNDERWAY_S = 30.0  # what else may answer at the port: the store of a job whose end is not over yet
CONNECT_S = 10.0  # one attempt to reach the store
TELL_S = 30.0
POLL_S = 0.05
OPEN = "podtune-preflight"  # in the store of a preflight, and in no other


class Missing(Exception):
    """Pods that did not arrive, or one that came twice. ``faults`` are (pod, check, text)."""

    def __init__(self, faults: list[tuple[str, str, str]]) -> None:
        super().__init__(faults[0][2])
        self.faults = faults


class Underway(Exception):
    """The other pods are past their preflight: this one was started again while they wait for it, or
    train.
    """


@contextlib.contextmanager
def master_needed(name: str) -> Iterator[None]:
    """The store's own errors as :class:`Missing`: the master's pod went away. ``name`` is this pod's."""
    import torch.distributed as dist

    try:
        yield
    except dist.DistError as error:
        raise Missing(
            [(name, "port", (f"the master's pod was lost: {str(error).splitlines()[0][:200]}"))]
        ) from error


class Meeting:
    """All pods of a job, met through a TCP store at the master."""

    def __init__(self, pod: PodPlace, facts: Json, *, wait_s: float, timeout_s: float) -> None:
        """Arrive, and say so.

        ``wait_s`` is for all pods to arrive, ``timeout_s`` for what they do together then.

        Raises:
            Missing: the master's port is not reachable, or this pod's rank is another's, too.
            Underway: what answers at the master's port is no preflight.
        """
        self.pod, self._name, self._timeout_s = pod, facts["pod"], timeout_s
        self._deadline, self._told_at = time.monotonic() + wait_s, time.monotonic()
        self._store = self._host() if pod.node_rank == 0 else self._reach()
        self._store.set_timeout(datetime.timedelta(seconds=timeout_s))  # from here on the other side answers
        if self._store.add(f"arrived/{pod.node_rank}", 1) > 1:
            self._store.set("twice", f"{pod.node_rank}")
            raise Missing([(self._name, "rank", f"rank {pod.node_rank} is this pod's and another's")])
        self._store.set(f"facts/{pod.node_rank}", json.dumps(facts))

    def _host(self) -> Any:
        import torch.distributed as dist

        try:
            store = self._connect(CONNECT_S)
        except dist.DistError as error:
            text = f"port is busy at {self._where()}: {str(error).splitlines()[0][:200]}"
            raise Missing([(self._name, "port", text)]) from error
        store.set(OPEN, f"{time.time_ns():x}")
        return store

    def _reach(self) -> Any:
        """The store of the master's preflight.

        A pod that is started again may meet the store by which the last attempt trained: it goes away with
        that, and then the master is started again, too.
        """
        import torch.distributed as dist

        answered_until = None
        while True:
            try:
                store = self._connect(max(1.0, min(CONNECT_S, (self._deadline - time.monotonic()) / 2)))
                answered_until = answered_until or time.monotonic() + UNDERWAY_S
                while not store.check([OPEN]):
                    if time.monotonic() > answered_until:
                        raise Underway
                    time.sleep(POLL_S)
                return store
            except dist.DistError as error:
                if time.monotonic() > self._deadline:
                    text = f"{self._where()} is not reachable: {str(error).splitlines()[0][:200]}"
                    raise Missing([(name_of(0, self.pod), "port", text)]) from error
                self._tell(f"no answer from {self._where()}")
                time.sleep(POLL_S)

    def _connect(self, seconds: float) -> Any:
        import torch.distributed as dist

        c10d: Any = dist  # torch's type hints do not export the store
        return c10d.TCPStore(
            self.pod.master_addr,
            self.pod.master_port,
            is_master=self.pod.node_rank == 0,
            timeout=datetime.timedelta(seconds=seconds),
            wait_for_workers=False,
        )

    def facts(self) -> list[Json]:
        """Every pod's facts, in the order of ranks.

        Raises:
            Missing: a pod did not arrive in time, or a rank came twice; says which.
        """
        absent = self._await([f"facts/{rank}" for rank in range(self.pod.nnodes)], says="not here yet:")
        if self._store.check(["twice"]):
            rank = int(self._store.get("twice"))
            text = f"two pods have the rank {rank}: PET_NODE_RANK is set by hand, or an old pod still runs"
            raise Missing([(name_of(rank, self.pod), "rank", text)])
        if absent:
            names = [name_of(int(key.partition("/")[2]), self.pod) for key in absent]
            raise Missing(
                [
                    (
                        names[0],
                        "names",
                        (f"{', '.join(names)} did not arrive ({len(absent)} of {self.pod.nnodes} pods)"),
                    )
                ]
            )
        self._deadline = time.monotonic() + self._timeout_s
        return [json.loads(self._store.get(f"facts/{rank}")) for rank in range(self.pod.nnodes)]

    def unshared(self, folder: Path) -> list[tuple[int, int]]:
        """Every pod writes a file into ``folder`` and looks for the others'; returns who missed whose, as
        ranks.
        """
        mine = folder / f".preflight-shared-{self._token()}-{self.pod.node_rank}"
        with contextlib.suppress(OSError):  # a volume that cannot be written is a problem of its own
            mine.write_text("here")
        self._store.set(f"wrote/{self.pod.node_rank}", "1")
        self._await([f"wrote/{rank}" for rank in range(self.pod.nnodes)])
        expected = [folder / f".preflight-shared-{self._token()}-{rank}" for rank in range(self.pod.nnodes)]
        until = min(self._deadline, time.monotonic() + VISIBLE_S)
        while not all(path.exists() for path in expected) and time.monotonic() < until:
            # a network file system looks again when the folder is listed
            list(folder.iterdir()) if folder.is_dir() else None
            time.sleep(POLL_S)
        missed = [rank for rank, path in enumerate(expected) if not path.exists()]
        self._store.set(f"missed/{self.pod.node_rank}", json.dumps(missed))
        self._await([f"missed/{rank}" for rank in range(self.pod.nnodes)])
        mine.unlink(missing_ok=True)
        reports = [json.loads(self._store.get(f"missed/{rank}")) for rank in range(self.pod.nnodes)]
        return [(rank, missing[0]) for rank, missing in enumerate(reports) if missing]

    def all_reduce(self) -> Json:
        """Reduce 16 MiB over all pods, by each GPU of a pod in turn; returns backend, bytes, and seconds and
        bus bandwidth of the slowest.

        Raises:
            Missing: it failed, timed out or gave a wrong sum.
        """
        import torch
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if on_gpu else ["cpu"]
        backend, size, rank = "nccl" if on_gpu else "gloo", self.pod.nnodes, self.pod.node_rank
        c10d: Any = dist  # the groups' own constructors are not in torch's type hints
        seconds = []
        for device in devices:
            store = c10d.PrefixStore(f"allreduce/{device}", self._store)
            timeout = datetime.timedelta(seconds=max(5.0, self._deadline - time.monotonic()))
            try:
                group = (
                    c10d.ProcessGroupNCCL(store, rank, size)
                    if on_gpu
                    else c10d.ProcessGroupGloo(store, rank, size, timeout)
                )
                seconds.append(self._reduce(group, device))
                if on_gpu:
                    group.shutdown()
            except RuntimeError as error:
                text = f"the all-reduce by {backend} on {device} failed: {str(error).splitlines()[0][:200]}"
                raise Missing([(self._name, "all-reduce", text)]) from error
        # bus bandwidth of a ring all-reduce, as NVIDIA's nccl-tests define it: 2 (n - 1) / n of the bytes
        # cross each link
        return {
            "backend": backend,
            "bytes": REDUCED_BYTES,
            "seconds": round(max(seconds), 6),
            "bus_gb_per_s": round(2 * (size - 1) / size * REDUCED_BYTES / max(seconds) / 1e9, 3),
        }

    def _reduce(self, group: Any, device: str) -> float:
        """Seconds of the best of a few rounds on ``device``, checked for the sum."""
        import torch

        size, seconds = self.pod.nnodes, []
        values = torch.empty(REDUCED_BYTES // 4, device=device)
        for _ in range(ROUNDS + 1):  # the first opens the connections
            values.fill_(self.pod.node_rank + 1.0)
            started = time.perf_counter()
            group.allreduce([values]).wait()
            if values.is_cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        expected = size * (size + 1) / 2
        if not bool((values == expected).all()):
            text = f"the all-reduce gave {values[0].item()} instead of {expected}"
            raise Missing([(self._name, "all-reduce", text)])
        return min(seconds[1:])

    def agree(self, verdict: Json | None) -> Json:
        """Rank 0's verdict, on every pod. Returns once the port is free again: what comes next meets there,
        too.
        """
        import torch.distributed as dist

        if self.pod.node_rank == 0:
            self._store.set("verdict", json.dumps(verdict))
            self._store.set("read/0", "1")
            self._await([f"read/{rank}" for rank in range(self.pod.nnodes)], READ_S)
            return verdict or {}
        agreed: Json = json.loads(self._store.get("verdict"))
        self._store.set(f"read/{self.pod.node_rank}", "1")
        until = time.monotonic() + READ_S
        with contextlib.suppress(dist.DistError):
            while self._store.check([OPEN]) and time.monotonic() < until:
                time.sleep(POLL_S)
        return agreed

    def _token(self) -> str:
        return str(self._store.get(OPEN).decode())

    def _await(self, keys: list[str], at_most_s: float = float("inf"), *, says: str = "") -> list[str]:
        """Wait for the keys; returns those that never came. ``says``: tell now and then whose are missing."""
        until = min(self._deadline, time.monotonic() + at_most_s)
        while absent := [key for key in keys if not self._store.check([key])]:
            if time.monotonic() > until or (says and self._store.check(["twice"])):
                break
            if says:
                self._tell(
                    f"{says} {', '.join(name_of(int(key.partition('/')[2]), self.pod) for key in absent)}"
                )
            time.sleep(POLL_S)
        return absent

    def _tell(self, text: str) -> None:
        """Say what this pod waits for, every TELL_S."""
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            print(
                f"preflight: {text} (waiting at most {max(0, self._deadline - now):.0f} s more)",
                file=sys.stderr,
                flush=True,
            )
            self._told_at = now

    def _where(self) -> str:
        return f"{self.pod.master_addr}:{self.pod.master_port}"


def name_of(rank: int, pod: PodPlace) -> str:
    """The name of the pod with this rank, as the operator and Trainer give names; ``rank N`` where they did
    not.
    """
    first = pod.master_addr.partition(".")[0]
    if first.endswith("-master-0"):
        return first if rank == 0 else f"{first.removesuffix('-master-0')}-worker-{rank - 1}"
    return f"{first.removesuffix('-0')}-{rank}" if first.endswith("-node-0-0") else f"rank {rank}"
