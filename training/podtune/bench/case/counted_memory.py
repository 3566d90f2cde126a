"""Bytes of tensors by what they are for, counted while one untimed step runs.

On a CPU the resident memory of a process is mostly libraries and says nothing of a strategy; the bytes of
its tensors do. A dispatch mode sees every tensor that an operation makes, also those of DDP's reducer, of
FSDP and of DeepSpeed, and follows the storage under it until it is freed or, as FSDP does, resized.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from podtune.run.record import CountedMemory

GIB = 2**30


class CountMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it before the model is made, leave it after :meth:`of_step`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._new = itertools.count()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._number_at: dict[int, int] = {}  # by address, which is used again once a storage is gone
        self._sizes: dict[int, int] = {}
        self._changes: list[tuple[int, int]] | None = None  # (storage, bytes more) while a step is watched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        self._numbers(tree_leaves(result))
        if self._changes is not None:
            self._look()
        return result

    def of_step(self, step: Callable[[], None], model: nn.Module) -> CountedMemory:
        """Take a step, at least the third, and count what its tensors take on this rank.

        DDP builds its buckets again in the second. Weights, gradients and optimizer (with master weights of
        its own) are those found when the optimizer steps. Activations are whatever else the step makes before
        that, at its fullest moment; buffers were there before it.
        """
        weights, gradients, states = self._numbers(map(_held, model.parameters())), set[int](), set[int]()
        updates: list[int] = []

        def before_update(optimizer: Optimizer, *_: Any) -> None:
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients.update(self._numbers(p.grad for p in (*trained, *model.parameters())))
            states.update(self._numbers([*trained, *tree_leaves(dict(optimizer.state))]))
            updates.append(len(self._changes or ()))

        self._look()
        before, self._changes = dict(self._sizes), []
        hook = register_optimizer_step_pre_hook(before_update)
        try:
            step()
        finally:
            hook.remove()
        changes, self._changes = self._changes, None
        at_update, named = Counter(before), weights | gradients | states
        for number, more in changes[: updates[0]]:
            at_update[number] += more
        made = (
            more for number, more in changes[: updates[0]] if number not in named and number not in before
        )

        def bytes_of(numbers: Iterable[int]) -> float:
            return sum(at_update[number] for number in numbers) / GIB

        return CountedMemory(
            weights=bytes_of(weights),
            gradients=bytes_of(gradients - weights),
            optimizer=bytes_of(states - weights - gradients),
            activations=max(itertools.accumulate(made, initial=0)) / GIB,
            buffers=sum(size for number, size in before.items() if number not in named) / GIB,
            total=max(itertools.accumulate((more for _, more in changes), initial=sum(before.values())))
            / GIB,
        )

    def _numbers(self, tensors: Iterable[Any]) -> set[int]:
        """The storages under ``tensors``, each with the number that it got when it was first seen."""
        numbers = set()
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            number = self._number_at.get(storage._cdata)
            if number is None or number not in self._alive or self._alive[number]() is None:
                number = self._number_at[storage._cdata] = next(self._new)
                self._alive[number] = weakref.ref(storage)
            numbers.add(number)
        return numbers

    def _look(self) -> None:
        """Bring the sizes up to date and, while a step is watched, write down what has changed."""
        for number, alive in list(self._alive.items()):
            storage = alive()
            size = 0 if storage is None else storage.nbytes()
            if storage is None:
                del self._alive[number]
            if (more := size - self._sizes.get(number, 0)) != 0:
                self._sizes[number] = size
                if self._changes is not None:
                    self._changes.append((number, more))


def _held(parameter: nn.Parameter) -> Tensor:
    """The part of a weight that this rank holds: under ZeRO-3 DeepSpeed keeps it beside the weight."""
    held: Tensor = getattr(parameter, "ds_tensor", parameter)
    return held
