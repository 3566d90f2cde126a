"""Measurements of a rank while it trains: tokens, memory, GPU, the wait for data, the forward pass, FLOPs.

Read when a line is logged, so that a step costs a few readings of the clock and no synchronisation.
"""

from __future__ import annotations

import functools
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from podtune.machine.facts import gpu_reading
from podtune.run.world import World
from podtune.sft.cpu.padded_batches import REAL_TOKENS

if TYPE_CHECKING:
    from transformers import TrainingArguments

GIB = 2**30
# Under these a forward pass waits for no other rank, so its time is the rank's own; the others gather weights
# in it.
LOCAL_FORWARD = ("single", "ddp")
FIELDS = ("data_wait_s", "forward_s", "rss_gib", "gpu_memory_gib", "gpu_utilisation_percent")


class Meter:
    """One rank's measurements since the last logging step, and everyone's after :meth:`exchange`.

    On a GPU the forward pass is timed by CUDA events, and that of the logged step alone is read. A step takes
    all ranks equally long, because they wait for each other; a slow one shows by what it does before it first
    waits: its data and its forward pass.
    """

    def __init__(self, world: World, strategy: str = "", *, tokens_before: int = 0) -> None:
        #: real tokens of all ranks since the very first start, as of the last logging step
        self.tokens = tokens_before
        self._local_tokens = torch.zeros((), dtype=torch.long)
        self._rows_read = 0  # of a stream, by this rank: up to which place
        self._world, self._local_forward = world, strategy in LOCAL_FORWARD
        self._process = psutil.Process()
        self._all_steps, self._forward_is_timed = 0, False
        self._forget()
        self.step_began = time.monotonic()
        self.ranks: list[dict[str, float]] = []  # by rank, as of the last exchange

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return ``source``, timing how long a step waits for it; a step begins here."""
        # the first step's time went into what is done once: kernels, buffers, workers
        if self._all_steps == 1:
            self._forget()
        self._all_steps += 1
        self._steps += 1
        self.step_began = time.monotonic()
        self._events.clear()
        return self._timed(source)

    def _timed(self, source: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self._waited_s += time.monotonic() - began
            yield batch

    def time_forward(self, model: torch.nn.Module) -> None:
        """Time the training passes of the wrapped ``model`` from now on, where they are a rank's own."""
        if self._local_forward and not self._forward_is_timed:
            self._forward_is_timed = True
            model.register_forward_pre_hook(functools.partial(self._clock, sign=-1))
            model.register_forward_hook(functools.partial(self._clock, sign=1))

    def _clock(self, model: torch.nn.Module, *_: Any, sign: int) -> None:
        if not model.training:  # an evaluation
            return
        if self._world.device_type == "cuda":  # the host is ahead of it, and is not made to wait
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._forward_s += sign * time.monotonic()

    def count(self, inputs: dict[str, torch.Tensor], places: Sequence[int] | None = None) -> None:
        """Count the real tokens of a micro-batch, and the ``places`` of its rows in a stream."""
        if places:
            self._rows_read = max(places) + 1
        mask = inputs.get("attention_mask")
        tokens = (
            inputs.get(REAL_TOKENS, torch.tensor(inputs["input_ids"].numel())) if mask is None else mask.sum()
        )
        # where the batch lies: a GPU is not waited for before a line is logged
        self._local_tokens = self._local_tokens.to(tokens.device) + tokens

    def global_tokens(self) -> int:
        """Real tokens of all ranks and starts until now. A collective call."""
        counted = self._local_tokens.cpu().clone()
        if self._world.world_size > 1:
            dist.all_reduce(counted)
        self.tokens += int(counted)
        self._local_tokens.zero_()
        return self.tokens

    def stream_position(self) -> int:
        """Rows of the stream that lie behind, over all ranks. A collective call."""
        position = torch.tensor(self._rows_read)
        if self._world.world_size > 1:
            dist.all_reduce(position, op=dist.ReduceOp.MAX)
        return int(position)

    def exchange(self) -> None:
        """Gather every rank's measurements. A collective call."""
        self.ranks = gather_object([{"tokens": float(self._local_tokens), **self._look()}])
        self._forget()
        self.tokens += int(sum(rank.pop("tokens") for rank in self.ranks))
        self._local_tokens.zero_()

    def _forget(self) -> None:
        self._steps, self._waited_s, self._forward_s = 0, 0.0, 0.0
        self._events: list[torch.cuda.Event] = []  # before and after each forward pass of the current step

    def _look(self) -> dict[str, float]:
        """Measure this rank; what cannot be measured here is left out."""
        use = {"rss_gib": self._process.memory_info().rss / GIB}
        if self._all_steps > 1 and self._steps:
            use["data_wait_s"] = self._waited_s / self._steps
            if self._events:
                self._events[-1].synchronize()
                pairs = zip(self._events[::2], self._events[1::2], strict=False)
                use["forward_s"] = sum(before.elapsed_time(after) for before, after in pairs) / 1000
            elif self._forward_s:
                use["forward_s"] = self._forward_s / self._steps
        if self._world.device_type == "cuda":
            use["gpu_memory_gib"] = torch.cuda.memory_reserved() / GIB
            reading = gpu_reading(self._world.device)
            use |= {key: value for key, value in reading.items() if key == "gpu_utilisation_percent"}
        return use


def system_metrics(
    ranks: list[dict[str, float]], step_time_s: float | None
) -> dict[str, float | dict[str, list[float | None]]]:
    """Build the ``system`` line of metrics.jsonl; what no rank could measure is absent.

    At the top the value to watch: the largest over the ranks, for utilisation the mean, and how far the
    slowest rank is from the median of the others. Below ``per_rank`` each rank's own, None where it has
    none.
    """
    metrics: dict[str, float] = {}
    per_rank: dict[str, list[float | None]] = {}
    for name in FIELDS:
        if values := [round(rank[name], 6) for rank in ranks if name in rank]:
            metrics[name] = statistics.fmean(values) if name.endswith("_percent") else max(values)
            per_rank[name] = [round(rank[name], 6) if name in rank else None for rank in ranks]
    if step_time_s and "data_wait_s" in metrics:
        metrics["data_wait_share"] = round(min(1.0, metrics["data_wait_s"] / step_time_s), 4)
    if len(ranks) == 1:
        return {**metrics}
    own = [
        rank["data_wait_s"] + rank["forward_s"] for rank in ranks if {"data_wait_s", "forward_s"} <= {*rank}
    ]
    if len(own) == len(ranks):
        slowest = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:slowest] + own[slowest + 1 :])
        if others > 0:
            metrics |= {"slowest_rank": slowest, "slowest_ratio": round(own[slowest] / others, 3)}
    return {**metrics, "per_rank": per_rank}


def evaluation_of(logs: Mapping[str, object]) -> str:
    """Name the split that an evaluation's ``logs`` are of, ``eval`` or ``eval_NAME``; empty for others."""
    times = (key.removesuffix("_runtime") for key in logs if key.endswith("_runtime"))
    return next((split for split in times if split.startswith("eval")), "")


class EvaluationLoss:
    """The loss of an evaluation by scored tokens, over all ranks."""

    # transformers averages the batches' means, which depends on how rows fall into batches

    def __init__(self, world: World) -> None:
        self._world = world
        self._sums = torch.zeros(2, dtype=torch.double)  # of losses, of scored tokens

    def add(self, mean: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch by its mean loss."""
        scored = (labels[:, 1:] != -100).sum().cpu()
        self._sums += torch.stack((mean.detach().double().cpu() * scored, scored))

    def take(self) -> float | None:
        """Return the loss and begin anew; None without a scored token. A collective call."""
        if self._world.world_size > 1:
            dist.all_reduce(self._sums)
        loss = float(self._sums[0] / self._sums[1]) if self._sums[1] > 0 else None
        self._sums.zero_()
        return loss


def peak_memory_gib(world: World) -> list[float]:
    """Peak memory of every rank: the CUDA allocator's, or the process's resident one. A collective call."""
    if world.device_type == "cuda":
        peak = torch.cuda.max_memory_allocated() / GIB
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
    peaks: list[float] = gather_object([peak])
    return peaks


def product_precision(training: TrainingArguments, model: Any) -> str:
    """The precision of most matrix products: autocast's, or that of the weights."""
    if training.bf16 or training.fp16:
        return "bf16" if training.bf16 else "fp16"
    half = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(model.dtype)
    return half or ("tf32" if multiplies_in_tf32() else "fp32")


def multiplies_in_tf32() -> bool:
    """True where transformers lets a GPU multiply fp32 tensors in TF32: for ``torch_compile`` or ``tf32``."""
    return str(torch.backends.cuda.matmul.fp32_precision) == "tf32"


def utilisation(
    model: Any, world: World, precision: str, *, tokens_per_s: float | None, mean_length: int
) -> tuple[float | None, float | None]:
    """Compute FLOPs of a token in rows of ``mean_length``, and the share of the hardware's peak reached.

    Each is None where it is not known. ``precision`` is bf16, fp16, tf32 or fp32.
    """
    from peft import PeftModel

    from podtune.plan.hardware import peak_flops
    from podtune.sft.model.flops import flops_per_token

    # an adapter's own work is small beside the frozen model's forward pass and its activations' gradients
    trained_share = 0.0 if isinstance(model, PeftModel) else 1.0
    try:
        flops = flops_per_token(model.config, mean_length, trained_share=trained_share)
    except Exception:  # an architecture without heads, or one that cannot say: a value less, not a run
        return None, None
    name = torch.cuda.get_device_name() if world.device_type == "cuda" else "cpu"
    peak = peak_flops(name, precision)
    mfu = flops * tokens_per_s / (peak * world.world_size) if peak and tokens_per_s else None
    return flops, mfu
