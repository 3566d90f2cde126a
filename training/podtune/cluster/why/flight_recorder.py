"""Dumps of torch's Flight Recorder: the collectives of each rank, and the rank that is missing from one.

torch writes them when NCCL's watchdog sees a timeout: one pickle a rank, ``..._trace_rank_N``, of mappings,
lists, texts and numbers (torch/csrc/distributed/c10d/FlightRecorder.hpp).
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a Flight Recorder's dump")


def read_traces(files: Iterable[Path]) -> list[RankTrace]:
    """The dumps among ``files``, by rank; what is damaged or is none is left out."""
    traces = []
    for file in files:
        match = NAME.search(file.name)
        if match and file.stat().st_size < LARGEST:
            with contextlib.suppress(
                pickle.UnpicklingError, AttributeError, EOFError, LookupError, TypeError, ValueError
            ):
                traces.append(_trace(int(match[1]), _PlainPickle(io.BytesIO(file.read_bytes())).load()))
    return sorted(traces, key=lambda trace: trace.rank)


def _trace(rank: int, content: dict[str, Any]) -> RankTrace:
    """The rank's last collective of all ranks; a ValueError if it has entered none."""
    groups = content["pg_config"].values()
    world = frozenset(int(rank) for group in groups for rank in re.findall(r"\d+", str(group["ranks"])))
    # point-to-point calls are numbered by themselves
    entries = [one for one in content["entries"] if not one.get("is_p2p")]
    last = max(
        # torch's name for the group of all ranks
        (one for one in entries if one["process_group"][1] == "default_pg"),
        key=lambda one: int(one["collective_seq_id"]),
    )
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
    absent = frozenset[int]().union(*(trace.world for trace in traces)) - {trace.rank for trace in traces}
    waiting = f"{_ranks(there)} wait{'s' * (len(there) == 1)} in collective {furthest}, {there[0].operation}"
    if behind:
        last = f"whose last is collective {behind[0].sequence}, {behind[0].operation}"
        return f"{waiting}; {_ranks(behind)} never came to it, {last}"
    if len({trace.operation for trace in there}) > 1:
        each = ", ".join(f"rank {trace.rank} {trace.operation}" for trace in there[:4])
        return f"the ranks are in different operations at collective {furthest}: {each}"
    return f"{waiting}; rank {', '.join(map(str, sorted(absent)[:8]))} left no dump" if absent else ""


def _ranks(traces: list[RankTrace]) -> str:
    return f"rank {', '.join(str(trace.rank) for trace in traces[:8])}" + " ..." * (len(traces) > 8)
