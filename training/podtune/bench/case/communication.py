"""Bytes and calls by collective, counted where they reach the process group.

Every call, from DDP's C++ reducer to DTensor, passes the dispatcher as a ``c10d`` (or functional) operation
with its tensors and its group; a dispatch mode around one untimed step sees them all, on gloo and NCCL alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

# by the beginning of an operation's name without its underlines
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "all_to_all",
    "send": "send",
    "recv": "recv",
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}  # they move nothing


def sent_bytes(collective: str, message: int, ranks: int) -> float:
    """Bytes that a rank sends, as the mean over the ``ranks`` of a group, for a message of ``message`` bytes.

    By the ring algorithms that nccl-tests reckons with (doc/PERFORMANCE.md): all_reduce 2 (n-1)/n;
    all_gather, reduce_scatter and all_to_all (n-1)/n of the whole message; broadcast and reduce the same, n-1
    hops among n ranks. send: all of it.
    """
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks * message
    return float(message) if collective == "send" else (ranks - 1) / ranks * message


class CountCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``calls`` and ``sent_bytes`` of this rank by collective, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, int] = defaultdict(int)
        self.sent_bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        if namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            short = name.replace("_", "")
            collective = next((one for start, one in COLLECTIVES.items() if short.startswith(start)), None)
            if collective is None:
                raise RuntimeError(
                    f"{namespace}::{name} moves bytes that nobody counts: add it to COLLECTIVES"
                )
            self._count(collective, args, functional=namespace != "c10d")
        return func(*args, **(kwargs or {}))

    def _count(self, collective: str, args: tuple[Any, ...], *, functional: bool) -> None:
        ranks = _group_size(args)
        if ranks < 2:
            return  # nothing leaves the process
        # c10d is handed the output first, which of these two is a part of the message
        position = 1 if collective in ("reduce_scatter", "all_to_all") and not functional else 0
        message = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[position]))
        if collective == "all_gather" and functional:
            message *= ranks  # it is handed the shard
        self.calls[collective] += 1
        if collective != "recv":  # counted where it was sent
            self.sent_bytes[collective] += sent_bytes(collective, message, ranks)


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors(item)


def _group_size(args: tuple[Any, ...]) -> int:
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
        if isinstance(argument, dist.ProcessGroup):
            return argument.size()
    for argument in args:  # functional operations name their group
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product"):
            group: dist.ProcessGroup = _resolve_process_group(argument)  # type: ignore[arg-type]
            return group.size()
    return dist.get_world_size()
