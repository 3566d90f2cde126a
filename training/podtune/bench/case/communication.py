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

# c10d operation -> (collective, which argument is the full message). Functional ones carry the group's size
# or name.
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
SILENT = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"}  # they move nothing
# Functional gathers are handed the shard; the message is all shards together.
GIVEN_A_SHARD = {"all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"}


def sent_bytes(collective: str, message: int, ranks: int) -> float:
    """Bytes that a rank sends, as the mean over the ``ranks`` of a group, for a message of ``message`` bytes.

    By the ring algorithms that nccl-tests reckons with (doc/PERFORMANCE.md): all_reduce 2 (n-1)/n;
    all_gather, reduce_scatter and all_to_all (n-1)/n of the whole message; broadcast and reduce the same, n-1
    hops among n ranks. send: all of it.
    """
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks * message
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        return (ranks - 1) / ranks * message
    return float(message)


class CountCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``calls``, ``message_bytes`` and ``sent_bytes`` of this rank by collective, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, int] = defaultdict(int)
        self.message_bytes: dict[str, int] = defaultdict(int)
        self.sent_bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        if namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            if name not in COLLECTIVES:
                raise RuntimeError(
                    f"{namespace}::{name} moves bytes that nobody counts: add it to COLLECTIVES"
                )
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        collective, position = COLLECTIVES[name]
        ranks = _group_size(args)
        if ranks < 2:
            return  # nothing leaves the process
        message = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(args[position]))
        if name in GIVEN_A_SHARD:
            message *= ranks
        self.calls[collective] += 1
        self.message_bytes[collective] += message
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
