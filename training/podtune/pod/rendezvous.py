"""The part of preflight that pods do together: facts exchanged, the volume really shared, an all-reduce.

It uses a store and a process group of its own, on the job's port before torchrun takes it, and no default
group: training then starts as if nothing had been.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podtune.pod.pod_info import PodInfo
from podtune.pod.preflight import BUS_GB_PER_S, AllReduce, Problem, Verdict, assess, errors, slow
from podtune.run.world import PodPlace

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

REDUCED_BYTES, ROUNDS = 16 * 2**20, 3
VISIBLE_S = 10.0  # a file on a network volume is seen by the other pods within this
READ_S = 10.0  # rank 0 keeps the store open so long for the others to read the verdict
UNDERWAY_S = 30.0  # what else may answer at the port: the store of a job whose end is not over yet
CONNECT_S = 10.0  # one attempt to reach the store
NOTIFY_S = 30.0
POLL_S = 0.05
OPEN = "podtune-preflight"  # in the store of a preflight, and in no other
FIX = "kubectl get pods; check names, port and NetworkPolicy, and nccl.env for the interface"


class RendezvousFailed(Exception):
    """Pods that did not arrive, came twice, do not reach each other, or are past their preflight."""

    def __init__(
        self, pod: str, check: str, text: str, fix: str = FIX, severity: Literal["error", "warning"] = "error"
    ) -> None:
        super().__init__(text)
        self.problem = Problem(pod, check, text, fix, severity)


def judge_together(place: PodPlace, info: PodInfo, *, wait_s: float, timeout_s: float) -> Verdict:
    """Judge all pods with the others; the verdict is the same on each."""
    import torch.distributed as dist

    pods, problems, measured = [info], assess([info]), None
    try:
        rendezvous = Rendezvous(place, info, wait_s=wait_s, timeout_s=timeout_s)
        pods = rendezvous.pods()
        problems = assess(pods)
        if not errors(problems):
            shared = Path(os.environ.get("OUTPUT_DIR") or ".")
            # a run that is published does without a shared volume
            for reader, writer in [] if info.publish else rendezvous.unshared(shared):
                text = f"it does not see what {pods[writer].pod} wrote to {shared}"
                fix = "the claim is not one volume for all pods: ReadWriteMany, and one claim"
                problems.append(Problem(pods[reader].pod, "shared", text, fix))
            measured = rendezvous.all_reduce()
            problems += slow(measured, float(os.environ.get(BUS_GB_PER_S) or 0))
        return rendezvous.agree(Verdict(tuple(problems), tuple(pods), measured))
    except RendezvousFailed as failed:
        problems.append(failed.problem)
    except dist.DistError as error:
        text = f"the master's pod was lost: {_first_line(error)}"
        problems.append(Problem(info.pod, "port", text, FIX))
    return Verdict(tuple(problems), tuple(pods), measured)


class Rendezvous:
    """All pods of a job, met through a TCP store at the master."""

    def __init__(self, pod: PodPlace, info: PodInfo, *, wait_s: float, timeout_s: float) -> None:
        """Meet the master: ``wait_s`` is for all pods to arrive, ``timeout_s`` for what they do then.

        Raises:
            RendezvousFailed: the master's port is not reachable, or what answers there is not a preflight, or
                another pod has this pod's rank.
        """
        self.pod, self._info, self._timeout_s = pod, info, timeout_s
        self._deadline, self._notified_at = time.monotonic() + wait_s, time.monotonic()
        self._store = self._host() if pod.node_rank == 0 else self._reach()
        self._store.set_timeout(datetime.timedelta(seconds=timeout_s))  # from here on the other side answers
        if self._store.add(f"arrived/{pod.node_rank}", 1) > 1:
            text = f"rank {pod.node_rank} is also another pod's, an old one's or by PET_NODE_RANK set by hand"
            raise RendezvousFailed(info.pod, "rank", text)

    def _host(self) -> Store:
        import torch.distributed as dist

        try:
            store = self._connect(CONNECT_S)
        except dist.DistError as error:
            text = f"port is busy at {self._where()}: {_first_line(error)}"
            raise RendezvousFailed(self._info.pod, "port", text) from error
        store.set(OPEN, f"{time.time_ns():x}")
        return store

    def _reach(self) -> Store:
        """Connect to the store of the master's preflight.

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
                        text = "the other pods are past their preflight: started again, it joins them"
                        raise RendezvousFailed(self._info.pod, "names", text, "nothing to do", "warning")
                    time.sleep(POLL_S)
                return store
            except dist.DistError as error:
                if time.monotonic() > self._deadline:
                    text = f"{self._where()} is not reachable: {_first_line(error)}"
                    raise RendezvousFailed(name_of(0, self.pod), "port", text) from error
                self._notify(f"no answer from {self._where()}")
                time.sleep(POLL_S)

    def _connect(self, seconds: float) -> Store:
        import torch.distributed as dist

        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            self.pod.master_addr,
            self.pod.master_port,
            is_master=self.pod.node_rank == 0,
            timeout=datetime.timedelta(seconds=seconds),
            # it would wait without a word about who is missing
            wait_for_workers=False,
        )
        return store

    def _exchange(self, what: str, value: object) -> list[Any]:
        """Leave ``value`` for the other pods and return those of all, in the order of ranks.

        Raises:
            RendezvousFailed: a pod has left none in time; says which.
        """
        self._store.set(f"{what}/{self.pod.node_rank}", json.dumps(value))
        ranks = range(self.pod.nnodes)
        while absent := [rank for rank in ranks if not self._store.check([f"{what}/{rank}"])]:
            names = [name_of(rank, self.pod) for rank in absent]
            if time.monotonic() > self._deadline:
                text = f"{', '.join(names)} did not arrive ({len(absent)} of {self.pod.nnodes} pods)"
                raise RendezvousFailed(names[0], "names", text)
            self._notify(f"not here yet: {', '.join(names)}")
            time.sleep(POLL_S)
        return [json.loads(self._store.get(f"{what}/{rank}")) for rank in ranks]

    def pods(self) -> list[PodInfo]:
        """Every pod's facts, in the order of ranks."""
        contents = self._exchange("facts", self._info.to_json())
        self._deadline = time.monotonic() + self._timeout_s
        return [PodInfo.from_json(content) for content in contents]

    def unshared(self, folder: Path) -> list[tuple[int, int]]:
        """Write a file into ``folder`` and look for the others'; returns pairs of ranks, (reader, writer).

        A pair is a pod that does not see what the other has written.
        """
        token = self._store.get(OPEN).decode()
        expected = [folder / f".preflight-shared-{token}-{rank}" for rank in range(self.pod.nnodes)]
        mine = expected[self.pod.node_rank]
        with contextlib.suppress(OSError):  # a volume that cannot be written is a problem of its own
            folder.mkdir(parents=True, exist_ok=True)
            mine.write_text("here")
        self._exchange("wrote", True)
        until = min(self._deadline, time.monotonic() + VISIBLE_S)
        while not all(path.exists() for path in expected) and time.monotonic() < until:
            with contextlib.suppress(OSError):
                list(folder.iterdir())  # a network file system looks again when the folder is listed
            time.sleep(POLL_S)
        missed = self._exchange("missed", [rank for rank, path in enumerate(expected) if not path.exists()])
        mine.unlink(missing_ok=True)
        return [(rank, missing[0]) for rank, missing in enumerate(missed) if missing]

    def all_reduce(self) -> AllReduce:
        """Reduce 16 MiB over all pods, by each GPU of a pod in turn.

        Raises:
            RendezvousFailed: it failed, timed out or gave a wrong sum.
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
                text = f"the all-reduce by {backend} on {device} failed: {_first_line(error)}"
                raise RendezvousFailed(self._info.pod, "all-reduce", text) from error
        # bus bandwidth of a ring all-reduce, as NVIDIA's nccl-tests define it: 2 (n - 1) / n of the bytes
        # cross each link
        bus_gb_per_s = 2 * (size - 1) / size * REDUCED_BYTES / max(seconds) / 1e9
        return AllReduce(backend, REDUCED_BYTES, round(max(seconds), 6), round(bus_gb_per_s, 3))

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
            raise RendezvousFailed(self._info.pod, "all-reduce", text)
        return min(seconds[1:])

    def agree(self, verdict: Verdict) -> Verdict:
        """Rank 0's verdict, on every pod. Returns once the port is free again: torchrun takes it next."""
        import torch.distributed as dist

        if self.pod.node_rank == 0:
            self._store.set("verdict", json.dumps(verdict.to_json()))
            self._deadline = time.monotonic() + READ_S
            with contextlib.suppress(RendezvousFailed):
                self._exchange("read", True)
            return verdict
        agreed = Verdict.from_json(json.loads(self._store.get("verdict")))
        self._store.set(f"read/{self.pod.node_rank}", "true")
        until = time.monotonic() + READ_S
        with contextlib.suppress(dist.DistError):
            while self._store.check([OPEN]) and time.monotonic() < until:
                time.sleep(POLL_S)
        return agreed

    def _notify(self, text: str) -> None:
        """Print what this pod waits for, every NOTIFY_S."""
        now = time.monotonic()
        if now - self._notified_at >= NOTIFY_S:
            left_s = max(0, self._deadline - now)
            print(f"preflight: {text} (waiting at most {left_s:.0f} s more)", file=sys.stderr, flush=True)
            self._notified_at = now

    def _where(self) -> str:
        return f"{self.pod.master_addr}:{self.pod.master_port}"


def name_of(rank: int, pod: PodPlace) -> str:
    """Name of the pod with this rank, as the operator and Trainer give names; else ``rank N``."""
    first = pod.master_addr.partition(".")[0]
    if first.endswith("-master-0"):
        return first if rank == 0 else f"{first.removesuffix('-master-0')}-worker-{rank - 1}"
    indexed = first != pod.master_addr and first.endswith("-0")  # a pod of a Job, below its Service
    return f"{first.removesuffix('-0')}-{rank}" if indexed else f"rank {rank}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
