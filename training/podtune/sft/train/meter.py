"""Measurements of a rank while it trains: tokens, memory, GPU, the wait for data, FLOPs.

Read when a line is logged, so that a step costs a few readings of the clock and no synchronisation.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from podtune.machine.facts import nvml_handle, nvml_reading
from podtune.run.record import Json
from podtune.run.world import World
from podtune.sft.cpu.padded_batches import REAL_TOKENS

if TYPE_CHECKING:
    from transformers import TrainingArguments

GIB = 2**30
FIELDS = ("tokens", "data_wait_s", "rss_gib", "gpu_memory_gib", "gpu_utilisation_percent")


class Meter:
    """One rank's measurements since the last logging step, and everyone's after :meth:`exchange`.

    Args:
        tokens_before: real tokens of all ranks in earlier starts.
    """

    def __init__(self, world: World, *, tokens_before: int = 0) -> None:
        #: real tokens of all ranks since the very first start, as of the last logging step
        self.tokens = tokens_before
        self._local_tokens = torch.zeros((), dtype=torch.long)
        self._rows_read = 0  # of a stream, by this rank: up to which place
        self._world, self._on_gpu = world, world.device_type == "cuda"
        self._process = psutil.Process()
        # None on the CPU, and where NVML does not answer
        self._gpu = (
            nvml_handle(str(torch.cuda.get_device_properties(world.device).uuid)) if self._on_gpu else None
        )
        self._all_steps, self._steps, self._waited_s = 0, 0, 0.0
        self.step_began = time.monotonic()
        self.ranks: list[Json] = []  # by rank, as of the last exchange

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Return ``source``, timing how long a step waits for it; a step begins here."""
        # the first step's time went into what is done once: kernels, buffers, workers
        if self._all_steps == 1:
            self._steps, self._waited_s = 0, 0.0
        self._all_steps += 1
        self._steps += 1
        self.step_began = time.monotonic()
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

    def count(self, inputs: Json, places: Sequence[int] | None = None) -> None:
        """Count the real tokens of a micro-batch, and the ``places`` of its rows in a stream.

        Counted where the batch lies and read when a line is logged: a GPU is not waited for.
        """
        if places:
            self._rows_read = max(places) + 1
        mask = inputs.get("attention_mask")
        tokens = (
            inputs.get(REAL_TOKENS, torch.tensor(inputs["input_ids"].numel())) if mask is None else mask.sum()
        )
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
        """Gather every rank's measurements. A collective call: one all-gather of a few numbers."""
        own = {"tokens": float(self._local_tokens), **self._look()}
        row = torch.tensor([own.get(name, math.nan) for name in FIELDS], dtype=torch.double)
        rows = [row]
        if self._world.world_size > 1:
            rows = [torch.empty_like(row) for _ in range(self._world.world_size)]
            dist.all_gather(rows, row)
        named = (zip(FIELDS, row.tolist(), strict=True) for row in rows)
        self.ranks = [{key: value for key, value in pairs if not math.isnan(value)} for pairs in named]
        self._steps, self._waited_s = 0, 0.0
        self.tokens += int(sum(rank["tokens"] for rank in self.ranks))
        self._local_tokens.zero_()

    def _look(self) -> Json:
        """Measure this rank; what cannot be measured here is left out."""
        use = {"rss_gib": self._process.memory_info().rss / GIB}
        if self._all_steps > 1 and self._steps > 0:
            use["data_wait_s"] = self._waited_s / self._steps
        if self._on_gpu:
            use["gpu_memory_gib"] = torch.cuda.memory_reserved() / GIB
        reading = nvml_reading(self._gpu) if self._gpu is not None else {}
        if "gpu_utilisation_percent" in reading:
            use["gpu_utilisation_percent"] = reading["gpu_utilisation_percent"]
        return use


def system_metrics(ranks: list[Json], step_time_s: float | None) -> Json:
    """Build the ``system`` line of metrics.jsonl; what no rank could measure is absent.

    At the top the largest over the ranks, for utilisation the mean. Below ``per_rank`` each rank's own, None
    where it has none.
    """
    metrics: Json = {}
    per_rank: dict[str, list[float | None]] = {}
    for name in FIELDS[1:]:
        column = [round(rank[name], 6) if name in rank else None for rank in ranks]
        if values := [value for value in column if value is not None]:
            per_rank[name] = column
            metrics[name] = statistics.fmean(values) if name.endswith("_percent") else max(values)
    if step_time_s and "data_wait_s" in metrics:
        metrics["data_wait_share"] = round(min(1.0, metrics["data_wait_s"] / step_time_s), 4)
    return metrics | ({"per_rank": per_rank} if len(ranks) > 1 else {})


class EvaluationLoss:
    """The loss of an evaluation by scored tokens, over all ranks.

    transformers averages the batches' means, which depends on how rows fall into batches.
    """

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
    peaks: list[Any] = [peak]
    if world.world_size > 1:
        peaks = [None] * world.world_size
        dist.all_gather_object(peaks, peak)
    return peaks


class Utilisation(NamedTuple):
    """FLOPs of a token, and the share of the hardware's peak that training reached, where each is known."""

    flops_per_token: float | None = None
    mfu: float | None = None


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
) -> Utilisation:
    """Compute the utilisation at rows of ``mean_length`` tokens; ``precision`` is bf16, fp16 or fp32."""
    from peft import PeftModel

    from podtune.plan.hardware import peak_flops
    from podtune.sft.model.flops import flops_per_token

    # an adapter's own work is small beside the frozen model's forward pass and its activations' gradients
    trained_share = 0.0 if isinstance(model, PeftModel) else 1.0
    try:
        flops = flops_per_token(model.config, mean_length, trained_share=trained_share)
    except Exception:  # an architecture without heads, or one that cannot say: a value less, not a run
        return Utilisation()
    name = torch.cuda.get_device_name() if world.device_type == "cuda" else "cpu"
    peak = peak_flops(name, precision)
    mfu = flops * tokens_per_s / (peak * world.world_size) if peak and tokens_per_s else None
    return Utilisation(flops, mfu)
