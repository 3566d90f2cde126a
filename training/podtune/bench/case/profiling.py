"""``--profile`` and ``--memory-snapshot``: one more step, watched closely. Never on the clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from podtune.bench.options import Options
from podtune.run.record import Json
from podtune.run.world import World

TRACE, OPERATORS, MEMORY, SNAPSHOT = "trace.json", "operators.txt", "memory.png", "memory_snapshot.pickle"
TOP = 20
Interval = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """A profiled step of rank 0; the files lie in the case's folder.

    ``exposed_s``: with several ranks the seconds in which bytes were on their way and nothing was computed.
    """

    step_s: float
    top_operators: list[Json]
    has_memory_timeline: bool
    exposed_s: float | None

    def to_json(self) -> Json:
        """``profile`` of the measurements."""
        memory = {"memory_timeline": MEMORY} if self.has_memory_timeline else {}
        return {
            "trace": TRACE,
            "operators": OPERATORS,
            "step_s": self.step_s,
            "top_operators": self.top_operators,
            **memory,
        }


def profile_step(step: Callable[[], None], output: Path, options: Options, world: World) -> Profile | None:
    """Take the steps on every rank; rank 0 writes trace, operators and memory picture.

    None on other ranks, and without ``--profile``.
    """
    if options.memory_snapshot:
        torch.cuda.memory._record_memory_history()
        step()
        if world.is_main:
            torch.cuda.memory._dump_snapshot(str(output / SNAPSHOT))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
    if not options.profile:
        return None
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if world.device_type == "cuda" else [])
    with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        started = time.perf_counter()
        step()
        if world.device_type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    if not world.is_main:
        return None
    profiler.export_chrome_trace(str(output / TRACE))
    averages = profiler.key_averages()
    by = "self_cuda_time_total" if world.device_type == "cuda" else "self_cpu_time_total"
    (output / OPERATORS).write_text(averages.table(sort_by=by, row_limit=TOP), encoding="utf-8")
    events: list[Json] = json.loads((output / TRACE).read_text(encoding="utf-8"))["traceEvents"]
    return Profile(
        step_s=seconds,
        top_operators=top_operators(averages, world.device_type),
        has_memory_timeline=draw_memory(events, output / MEMORY),
        exposed_s=exposed_seconds(events) if world.world_size > 1 else None,
    )


def top_operators(averages: Iterable[Any], device_type: str) -> list[Json]:
    """The operators with most time of their own: name, calls, milliseconds."""
    field = "self_device_time_total" if device_type == "cuda" else "self_cpu_time_total"
    ordered = sorted(averages, key=lambda average: float(getattr(average, field)), reverse=True)
    return [
        {"name": a.key, "calls": a.count, "self_ms": float(getattr(a, field)) / 1e3} for a in ordered[:TOP]
    ]


def exposed_seconds(events: list[Json]) -> float:
    """Time covered by communication and by no computation.

    On a GPU both are kernels, NCCL's and all others. On the CPU communication is gloo's own events, and
    computation the operators of torch, on whatever thread.
    """
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    if kernels:
        talking = [_interval(event) for event in kernels if "nccl" in event["name"].lower()]
        working = [_interval(event) for event in kernels if "nccl" not in event["name"].lower()]
    else:
        talking = [_interval(event) for event in timed if event["name"].startswith("gloo:")]
        working = [_interval(event) for event in timed if event["name"].startswith("aten::")]
    together = _length(talking + working)
    return (together - _length(working)) / 1e6


def _interval(event: Json) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _length(intervals: list[Interval]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def draw_memory(events: list[Json], file: Path) -> bool:
    """Allocated memory over the step, one line a device; False if the trace holds no allocations."""
    lines: dict[str, list[tuple[float, float]]] = {}
    events = sorted(
        (event for event in events if event.get("name") == "[memory]"), key=lambda event: float(event["ts"])
    )
    for event in events:
        args = event["args"]
        device = "CPU" if args["Device Type"] == 0 else f"GPU {args['Device Id']}"
        lines.setdefault(device, []).append((float(event["ts"]), float(args["Total Allocated"])))
    if not lines:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = min(points[0][0] for points in lines.values())
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for device, points in sorted(lines.items()):
        # The allocator's total counts from when the profile began; a step frees what it did not allocate, so
        # start at 0.
        least = min(allocated for _, allocated in points)
        axes.step(
            [(ts - start) / 1e3 for ts, _ in points],
            [(a - min(least, 0)) / 2**20 for _, a in points],
            where="post",
            label=device,
        )
    axes.set(xlabel="time in the step (ms)", ylabel="allocated (MiB)", title="Memory over one step of rank 0")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
