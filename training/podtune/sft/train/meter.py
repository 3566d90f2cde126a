"""What each rank sees of its own machine while it trains: memory, GPU, the wait for data, the forward pass.
Read when a line is logged.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist

from podtune.machine.facts import nvml_handle, nvml_reading
from podtune.run.distributed import World
from podtune.run.record import Json

GIB = 2**30
# Under these a forward pass waits for no other rank, so its time is the rank's own; the others gather weights
# in it.
LOCAL_FORWARD = ("single", "ddp")
FIELDS = ("tokens", "data_wait_s", "forward_s", "rss_gib", "gpu_memory_gib", "gpu_utilisation_percent")


class Meter:
    """One rank's figures since the last logging step, and everyone's after :meth:`exchange`.

    An ordinary step costs a few readings of the clock, and no synchronisation: on a GPU the forward pass is
    timed by CUDA events, in the steps that are logged alone. A step takes all ranks equally long, because
    they wait for each other; a slow one shows by what it does before it first waits: its data and its forward
    pass.
    """

    def __init__(self, world: World, strategy: str = "") -> None:
        self._world, self._local_forward = world, strategy in LOCAL_FORWARD
        self._process = psutil.Process()
        # None on the CPU, and where NVML does not answer
        on_gpu = world.device_type == "cuda"
        self._gpu = nvml_handle(str(torch.cuda.get_device_properties(world.device).uuid)) if on_gpu else None
        self._all_steps, self._began = 0, 0.0
        self._forget()
        self._hooked: Any = None
        self._measuring, self._logs_next = False, False
        self.step_began = time.monotonic()
        self.ranks: list[Json] = []  # by rank, as of the last exchange

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """``source``, with the time that a step waits for it; a step begins here."""
        # the first step's time went into what is done once: kernels, buffers, workers
        if self._all_steps == 1:
            self._forget()
        self._all_steps += 1
        self._steps += 1
        self.step_began = time.monotonic()
        return _Timed(source, self)

    def forward_of(self, model: Any, *, logs_next: bool) -> _Forward:
        """A context for one training micro-batch in which the calls of ``model``, as it is wrapped, are
        timed.
        """
        if self._local_forward and self._hooked is None:
            self._hooked = (
                model.register_forward_pre_hook(self._enter),
                model.register_forward_hook(self._leave),
            )
        self._logs_next = logs_next
        return _Forward(self)

    def _enter(self, *_: Any) -> None:
        if not self._measuring:
            return
        if self._world.device_type == "cuda":
            self._mark()
        else:
            self._began = time.monotonic()

    def _leave(self, *_: Any) -> None:
        if not self._measuring:
            return
        if self._world.device_type == "cuda":
            self._mark()
        else:
            self._forward_s += time.monotonic() - self._began

    def _mark(self) -> None:
        if self._logs_next:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)

    def exchange(self, tokens: int) -> int:
        """Gather every rank's figures and return the sum of their ``tokens``. A collective call: one
        all-gather of a few numbers.
        """
        own = {"tokens": float(tokens), **self._look()}
        row = torch.tensor([own.get(name, math.nan) for name in FIELDS], dtype=torch.double)
        rows = [row]
        if self._world.world_size > 1:
            rows = [torch.empty_like(row) for _ in range(self._world.world_size)]
            dist.all_gather(rows, row)
        self.ranks = [
            {k: v for k, v in zip(FIELDS, row.tolist(), strict=True) if not math.isnan(v)} for row in rows
        ]
        self._forget()
        return int(sum(rank["tokens"] for rank in self.ranks))

    def _forget(self) -> None:
        self._steps, self._waited_s, self._forward_s = 0, 0.0, 0.0
        self._events: list[torch.cuda.Event] = []

    def _look(self) -> Json:
        """This rank's figures; what cannot be measured here is left out."""
        use = {"rss_gib": self._process.memory_info().rss / GIB}
        measured = self._all_steps > 1 and self._steps > 0
        if measured:
            use["data_wait_s"] = self._waited_s / self._steps
        if measured and self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=False)
            use["forward_s"] = sum(before.elapsed_time(after) for before, after in pairs) / 1000
        elif measured and self._forward_s:
            use["forward_s"] = self._forward_s / self._steps
        if self._world.device_type == "cuda":
            use["gpu_memory_gib"] = torch.cuda.memory_reserved() / GIB
        if self._gpu is not None:
            reading = nvml_reading(self._gpu)
            use |= {key: value for key, value in reading.items() if key == "gpu_utilisation_percent"}
        return use


class _Timed:
    """An iterator that notes how long its source lets a step wait."""

    def __init__(self, source: Iterator[Any], meter: Meter) -> None:
        self._source, self._meter = source, meter

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        began = time.monotonic()
        try:
            return next(self._source)
        finally:
            self._meter._waited_s += time.monotonic() - began


class _Forward:
    """Forward passes count only in here: an evaluation calls the same model."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._meter._measuring = True

    def __exit__(self, *_: object) -> None:
        self._meter._measuring = False


def system_metrics(ranks: list[Json], step_time_s: float | None) -> Json:
    """The ``system`` line of metrics.jsonl for the figures of all ranks; what no rank could measure is
    absent.

    At the top the figure to watch: the largest over the ranks, for utilisation the mean, and how far the
    slowest rank is from the middle of the others. Below ``per_rank`` each rank's own, None where it has none.
    """
    columns = {name: [rank.get(name) for rank in ranks] for name in FIELDS[1:]}
    per_rank = {
        name: [None if v is None else round(v, 6) for v in column]
        for name, column in columns.items()
        if any(map(_is, column))
    }
    metrics: Json = {}
    for name, column in per_rank.items():
        values = [value for value in column if value is not None]
        metrics[name] = statistics.fmean(values) if name.endswith("_percent") else max(values)
    if step_time_s and "data_wait_s" in metrics:
        metrics["data_wait_share"] = round(min(1.0, metrics["data_wait_s"] / step_time_s), 4)
    own = [
        sum(pair)
        for pair in zip(*(per_rank.get(name, []) for name in ("data_wait_s", "forward_s")), strict=False)
        if all(map(_is, pair))
    ]
    if len(own) == len(ranks) > 1:
        rank = max(range(len(own)), key=own.__getitem__)
        others = statistics.median(own[:rank] + own[rank + 1 :])
        if others > 0:
            metrics |= {"slowest_rank": rank, "slowest_ratio": round(own[rank] / others, 3)}
    return metrics | ({"per_rank": per_rank} if len(ranks) > 1 else {})


def _is(value: object) -> bool:
    return value is not None
