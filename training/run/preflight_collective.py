"""The part of preflight that pods do together: facts exchanged, the volume really shared, an all-reduce checked and measured.

It uses a store and a process group of its own, on the job's port before torchrun takes it, and no default group: training then
starts as if nothing had been.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from pathlib import Path
from typing import Any

from training.run.distributed import Pod

Json = dict[str, Any]

REDUCED_BYTES, ROUNDS = 16 * 2**20, 3
VISIBLE_S = 10.0  # a file on a network volume is seen by the other pods within this
READ_S = 10.0  # rank 0 keeps the store open so long for the others to read the verdict
POLL_S = 0.05


class Missing(Exception):
    """Pods that did not arrive, or one that came twice. ``faults`` are (pod, check, text)."""

    def __init__(self, faults: list[tuple[str, str, str]]) -> None:
        super().__init__(faults[0][2])
        self.faults = faults


class Meeting:
    """All pods of a job, met through a TCP store at the master."""

    def __init__(self, pod: Pod, facts: Json, timeout_s: float) -> None:
        """Arrive.

        Raises:
            Missing: the master's port is not reachable, or this pod's rank is another's, too.
        """
        import torch.distributed as dist

        c10d: Any = dist  # torch's type hints do not export the store
        self.pod, self._deadline = pod, time.monotonic() + timeout_s
        where = f"{pod.master_addr}:{pod.master_port}"
        try:
            self._store = c10d.TCPStore(
                pod.master_addr,
                pod.master_port,
                is_master=pod.node_rank == 0,
                timeout=datetime.timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except (dist.DistError, RuntimeError) as error:
            what = "port is busy" if pod.node_rank == 0 else "master is not reachable"
            raise Missing([(facts["pod"], "port", f"{what} at {where}: {str(error).splitlines()[0][:200]}")]) from error
        if self._store.add(f"arrived/{pod.node_rank}", 1) > 1:
            self._store.set("twice", f"{pod.node_rank}")
            raise Missing([(facts["pod"], "rank", f"rank {pod.node_rank} is this pod's and another's")])
        self._store.set(f"facts/{pod.node_rank}", json.dumps(facts))

    def facts(self) -> list[Json]:
        """Every pod's facts, in the order of ranks.

        Raises:
            Missing: a pod did not arrive in time, or a rank came twice; says which.
        """
        absent = self._await([f"facts/{rank}" for rank in range(self.pod.nnodes)])
        if self._store.check(["twice"]):
            rank = self._store.get("twice").decode()
            raise Missing(
                [(f"rank {rank}", "rank", f"two pods have the rank {rank}: PET_NODE_RANK is set by hand, or an old pod still runs")]
            )
        if absent:
            ranks = ", ".join(key.partition("/")[2] for key in absent)
            raise Missing([(f"rank {ranks}", "names", f"of {self.pod.nnodes} pods, rank {ranks} did not arrive")])
        return [json.loads(self._store.get(f"facts/{rank}")) for rank in range(self.pod.nnodes)]

    def unshared(self, folder: Path) -> list[str]:
        """Every pod writes a file into ``folder`` and looks for the others'; returns what a pod missed."""
        mine = folder / f".preflight-shared-{self._token()}-{self.pod.node_rank}"
        with contextlib.suppress(OSError):  # a volume that cannot be written is a problem of its own
            mine.write_text("here")
        self._store.set(f"wrote/{self.pod.node_rank}", "1")
        self._await([f"wrote/{rank}" for rank in range(self.pod.nnodes)])
        expected = [folder / f".preflight-shared-{self._token()}-{rank}" for rank in range(self.pod.nnodes)]
        until = min(self._deadline, time.monotonic() + VISIBLE_S)
        while not all(path.exists() for path in expected) and time.monotonic() < until:
            list(folder.iterdir()) if folder.is_dir() else None  # a network file system looks again when the folder is listed
            time.sleep(POLL_S)
        missed = [rank for rank, path in enumerate(expected) if not path.exists()]
        self._store.set(f"missed/{self.pod.node_rank}", json.dumps(missed))
        self._await([f"missed/{rank}" for rank in range(self.pod.nnodes)])
        mine.unlink(missing_ok=True)
        reports = [json.loads(self._store.get(f"missed/{rank}")) for rank in range(self.pod.nnodes)]
        return [f"rank {rank} does not see what rank {missing[0]} wrote to {folder}" for rank, missing in enumerate(reports) if missing]

    def all_reduce(self) -> Json:
        """Reduce 16 MiB over all pods; returns backend, bytes, seconds and bus bandwidth.

        Raises:
            Missing: it failed, timed out or gave a wrong sum.
        """
        import torch
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
        device, backend = ("cuda:0", "nccl") if on_gpu else ("cpu", "gloo")
        size, rank = self.pod.nnodes, self.pod.node_rank
        c10d: Any = dist  # the groups' own constructors are not in torch's type hints
        store = c10d.PrefixStore("allreduce", self._store)
        timeout = datetime.timedelta(seconds=max(5.0, self._deadline - time.monotonic()))
        values = torch.empty(REDUCED_BYTES // 4, device=device)
        try:
            group = c10d.ProcessGroupNCCL(store, rank, size) if on_gpu else c10d.ProcessGroupGloo(store, rank, size, timeout)
            seconds = []
            for _ in range(ROUNDS + 1):  # the first opens the connections
                values.fill_(rank + 1.0)
                started = time.perf_counter()
                group.allreduce([values]).wait()
                if on_gpu:
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
        except RuntimeError as error:
            raise Missing(
                [(f"rank {rank}", "all-reduce", f"the all-reduce by {backend} failed: {str(error).splitlines()[0][:200]}")]
            ) from error
        expected = size * (size + 1) / 2
        if not bool((values == expected).all()):
            raise Missing([(f"rank {rank}", "all-reduce", f"the all-reduce gave {values[0].item()} instead of {expected}")])
        best = min(seconds[1:])
        # bus bandwidth of a ring all-reduce, as NVIDIA's nccl-tests define it: 2 (n - 1) / n of the bytes cross each link
        return {
            "backend": backend,
            "bytes": REDUCED_BYTES,
            "seconds": round(best, 6),
            "bus_gb_per_s": round(2 * (size - 1) / size * REDUCED_BYTES / best / 1e9, 3),
        }

    def agree(self, verdict: Json | None) -> Json:
        """Rank 0's verdict, on every pod."""
        if self.pod.node_rank == 0:
            self._store.set("verdict", json.dumps(verdict))
            self._store.set("read/0", "1")
            self._await([f"read/{rank}" for rank in range(self.pod.nnodes)], READ_S)
            return verdict or {}
        found: Json = json.loads(self._store.get("verdict"))
        self._store.set(f"read/{self.pod.node_rank}", "1")
        return found

    def _token(self) -> str:
        if self.pod.node_rank == 0 and not self._store.check(["token"]):
            self._store.set("token", f"{time.time_ns():x}")
        return str(self._store.get("token").decode())

    def _await(self, keys: list[str], at_most_s: float = float("inf")) -> list[str]:
        """Wait for the keys; returns those that never came."""
        until = min(self._deadline, time.monotonic() + at_most_s)
        absent = list(keys)
        while (absent := [key for key in absent if not self._store.check([key])]) and time.monotonic() < until:
            time.sleep(POLL_S)
        return absent
