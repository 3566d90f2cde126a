"""Dumps of torch's Flight Recorder: the collectives of each rank, and the rank that is missing from one.

torch writes them when NCCL's watchdog sees a timeout: one pickle a rank, ``..._trace_rank_N``, of mappings,
lists, texts and numbers (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAME = re.compile(r"trace_rank_(\d+)$")
LARGEST = 256 * 1024**2  # bytes


@dataclass(frozen=True)
class RankTrace:
    """The last collective of one rank in the group of all ranks."""

    rank: int
    world: frozenset[int]  # the ranks of the group
    sequence: int  # of the last collective that it entered, counted from 1
    operation: str  # all_reduce [[2]]
    waits: bool  # it has not come out of it


class _PlainPickle(pickle.Unpickler):
    """An unpickler that makes no objects: a dump comes from a volume, and a pickle may run anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a Flight Recorder's dump")


def read_traces(files: Iterable[Path]) -> list[RankTrace]:
    """The dumps among ``files``; what is damaged or is none is left out."""
    traces = []
    for file in files:
        match = NAME.search(file.name)
        if match and file.stat().st_size < LARGEST:
            try:
                content = _PlainPickle(io.BytesIO(file.read_bytes())).load()
                trace = _trace(int(match[1]), content)
            except (pickle.UnpicklingError, AttributeError, EOFError, LookupError, TypeError, ValueError):
                continue
            traces += [trace] if trace else []
    return sorted(traces, key=lambda trace: trace.rank)


def _trace(rank: int, content: dict[str, Any]) -> RankTrace | None:
    groups = [
        frozenset(map(int, re.findall(r"\d+", str(each["ranks"])))) for each in content["pg_config"].values()
    ]
    world = max(groups, key=len, default=frozenset[int]())
    entries = [one for one in content["entries"] if not one.get("is_p2p")]
    whole = [one for one in entries if one["process_group"][1] == "default_pg"]
    if not whole:
        return None
    last = max(whole, key=lambda one: int(one["collective_seq_id"]))
    operation = f"{str(last['profiling_name']).rpartition(':')[2]} {last['input_sizes']}"
    waits = last["state"] != "completed" and not last.get("retired")
    return RankTrace(rank, world, int(last["collective_seq_id"]), operation, waits)


def missing_rank(traces: list[RankTrace]) -> str:
    """The sentence about who is missing from the collective in which the others wait, or ""."""
    if not any(trace.waits for trace in traces):
        return ""
    furthest = max(trace.sequence for trace in traces)
    there = [trace for trace in traces if trace.sequence == furthest]
    behind = [trace for trace in traces if trace.sequence < furthest]
    absent = sorted(set().union(*(trace.world for trace in traces)) - {trace.rank for trace in traces})
    where = f"collective {furthest}, {there[0].operation}"
    waiting = f"{_ranks([trace.rank for trace in there])} wait{'s' * (len(there) == 1)} in {where}"
    if behind:
        last = f"whose last is collective {behind[0].sequence}, {behind[0].operation}"
        return f"{waiting}; {_ranks([trace.rank for trace in behind])} never came to it, {last}"
    if len({trace.operation for trace in there}) > 1:
        each = ", ".join(f"rank {trace.rank} {trace.operation}" for trace in there[:4])
        return f"the ranks are in different operations at collective {furthest}: {each}"
    return f"{waiting}; {_ranks(absent)} left no dump" if absent else ""


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"
