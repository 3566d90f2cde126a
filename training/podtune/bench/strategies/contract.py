"""The contract of a strategy: ``setup(context)``, then ``train_step(batch) -> loss``.

The loop knows nothing else of a strategy, and a strategy knows nothing of clocks, records or other
strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from podtune.bench.models.stack import Stack
from podtune.bench.options import Options
from podtune.run.world import World


class Batch(NamedTuple):
    """Rows of one step: token ids and targets (rows, time), or images (rows, 3, h, w) and labels (rows,)."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: str) -> Batch:
        """On ``device``; asynchronous where the rows are pinned."""
        return Batch(self.inputs.to(device, non_blocking=True), self.targets.to(device, non_blocking=True))

    def split(self, pieces: int) -> list[Batch]:
        """``pieces`` equal batches, in order."""
        return [
            Batch(i, t) for i, t in zip(self.inputs.chunk(pieces), self.targets.chunk(pieces), strict=True)
        ]


BuildModel = Callable[[], Stack]  # the whole model on the CPU, with the same weights on every rank
# parameters, or groups of them
BuildOptimizer = Callable[[Iterable[nn.Parameter] | Iterable[dict[str, Any]]], Optimizer]


class Strategy(Protocol):
    """One rank's part of the training."""

    rows: tuple[int, int]
    """The part of the global batch that this rank reads, as (index of the part, number of equal parts)."""

    model: nn.Module
    """What this rank holds of the model."""

    optimizer: Any
    """What updates it: a torch optimizer, or DeepSpeed's around one."""

    def train_step(self, batch: Batch) -> Tensor:
        """Train on this rank's rows; on every rank the mean loss over the global batch."""
        ...

    def predict(self, batch: Batch) -> Tensor | None:
        """The logits of this rank's rows, without gradients; None on a rank without the last layer."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into ``folder``; a collective call, as :meth:`load` is."""
        ...

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote with the same strategy and ranks."""
        ...


@dataclass(frozen=True)
class SetupContext:
    """The factories, the place and the options of which every strategy's ``setup`` makes its part."""

    build_model: BuildModel
    build_optimizer: BuildOptimizer
    world: World
    options: Options


Setup = Callable[[SetupContext], Strategy]  # a collective call
