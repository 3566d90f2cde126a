"""Steps after the timed ones, watched closely: collectives, ``--profile``, ``--memory-snapshot``."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from podtune.bench.case.communication import COLLECTIVES
from podtune.bench.options import Options
from podtune.run.record import Json
from podtune.run.world import World

TRACE, OPERATORS, MEMORY, SNAPSHOT = "trace.json", "operators.txt", "memory.png", "memory_snapshot.pickle"
TOP = 20
Interval = tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """A profiled step of rank 0.

    ``content`` is ``profile`` of the measurements; ``exposed_s`` are the seconds of several ranks in
    which bytes were on their way and nothing was computed.
    """

    content: Json
    step_s: float
    exposed_s: float | None


def profile_step(step: Callable[[], None], output: Path, options: Options, world: World) -> Profile | None:
    """Take the steps on every rank; rank 0 writes trace, operators and memory picture.

    None on other ranks, and without ``--profile``.
    """
    cuda = world.device_type == "cuda"
    if options.memory_snapshot:
        torch.cuda.memory._record_memory_history()
        step()
        if world.is_main:
            torch.cuda.memory._dump_snapshot(str(output / SNAPSHOT))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
    if not options.profile:
        return None
    with profile(record_shapes=True, profile_memory=True) as profiler:
        started = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()  # else the profile ends before the step's kernels do
        seconds = time.perf_counter() - started
    if not world.is_main:
        return None
    profiler.export_chrome_trace(str(output / TRACE))
    averages = profiler.key_averages()
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    (output / OPERATORS).write_text(averages.table(sort_by=by, row_limit=TOP), encoding="utf-8")
    slowest = sorted(averages, key=lambda each: float(getattr(each, by)), reverse=True)[:TOP]
    events: list[Json] = json.loads((output / TRACE).read_text(encoding="utf-8"))["traceEvents"]
    draw_memory(events, output / MEMORY)
    content = {
        "trace": TRACE,
        "operators": OPERATORS,
        "memory_timeline": MEMORY,
        "step_s": seconds,
        "top_operators": [
            {"name": each.key, "calls": each.count, "self_ms": float(getattr(each, by)) / 1e3}
            for each in slowest
        ],
    }
    return Profile(content, seconds, exposed_seconds(events) if world.world_size > 1 else None)


def collective_seconds(step: Callable[[], None], world: World) -> dict[str, float]:
    """Seconds of one step in which a collective of each kind is under way on this rank.

    On a GPU they are NCCL's kernels, by the device's clock; on the CPU gloo's operations from call to end, in
    which a reduce_scatter is an all_reduce. Waiting for the other ranks counts.
    """
    cuda = world.device_type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    spans: dict[str, list[Interval]] = defaultdict(list)
    for event in profiler.events() or ():
        name = event.name.lower().replace("_", "")
        if name.startswith(("nccldevkernel", "ncclkernel", "gloo:")):
            kind = next((kind for part, kind in COLLECTIVES.items() if part in name), "other")
            spans[kind].append((event.time_range.start, event.time_range.end))
    return {kind: _length(intervals) / 1e6 for kind, intervals in spans.items()}


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
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def draw_memory(events: list[Json], file: Path) -> None:
    """Draw the allocated memory over the step, one line a device."""
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event.get("name") == "[memory]":
            args = event["args"]
            device = "CPU" if args["Device Type"] == 0 else f"GPU {args['Device Id']}"
            lines[device].append((float(event["ts"]) / 1e3, float(args["Total Allocated"]) / 2**20))
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    start = min((points[0][0] for points in map(sorted, lines.values())), default=0.0)
    for device, points in sorted(lines.items()):
        # the total counts from when the profile began, and a step frees what it did not allocate: start at 0
        least = min(0.0, *(allocated for _, allocated in points))
        times, sizes = zip(*((ms - start, mib - least) for ms, mib in sorted(points)), strict=True)
        axes.step(times, sizes, where="post", label=device)
    axes.set(xlabel="time in the step (ms)", ylabel="allocated (MiB)", title="Memory over one step of rank 0")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file)
