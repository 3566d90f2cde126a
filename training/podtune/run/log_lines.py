"""Lines that a run prints while it trains. Needs no torch."""

from __future__ import annotations

import statistics
from typing import Any

Json = dict[str, Any]

# a rank that takes so many times as long as the others before it first waits for them is called slow
SLOW_RATIO = 1.5
DATA_WAIT_SHARE = 0.1  # of a step that waits for data, from which on that is worth saying
DATA_WAIT_SHARE_GPU = 0.5  # a GPU meanwhile works on the step before


def head_line(
    name: str,
    strategy: str,
    world_size: int,
    device_type: str,
    nnodes: int,
    parameters: int,
    rows: int | None,
    tokens: int | None,
) -> str:
    """The first line of a training: name, strategy, devices and data. Streamed rows are not counted."""
    where = f"{world_size} x {device_type} ({nnodes} node{'s' if nnodes > 1 else ''})"
    data = "streamed rows" if rows is None else f"{rows:,} rows, {tokens:,} tokens"
    return f"{name}: {strategy} on {where}, {parameters:,} trained parameters, {data}"


def start_line(done: int, max_steps: int) -> str:
    """The line at the first step: 0, or that of the checkpoint from which the run resumes."""
    return f"training: steps {done} to {max_steps}"


def train_line(
    step: int, max_steps: int, train: Json, system: Json | None = None, nproc_per_node: int = 1
) -> str:
    """The line of a step: loss, gradient norm, learning rate, real tokens/s, time left, each pod's memory."""
    line = f"step {step:>{len(str(max_steps))}}/{max_steps}  loss {train['loss']:.4f}"
    if "grad_norm" in train:
        line += f"  grad {train['grad_norm']:.3f}"
    line += f"  lr {train['learning_rate']:.2e}"
    if "tokens_per_s" in train:
        line += f"  {train['tokens_per_s']:,.0f} tokens/s  eta {duration(train['eta_s'])}"
    return line + (_system_part(system, nproc_per_node) if system else "")


def _system_part(system: Json, nproc_per_node: int) -> str:
    pods = per_pod(system, nproc_per_node)
    on_gpu = any("gpu_memory_gib" in pod for pod in pods)
    use = [_use(pod) for pod in pods]
    part = f"  {'gpu' if on_gpu else 'memory'} {', '.join(use)}" if all(use) else ""
    if is_slow(system):
        part += f"  slow rank {system['slowest_rank']} ({system['slowest_ratio']:.1f}x)"
    if waits_for_data(system):
        part += f"  data wait {system['data_wait_share']:.0%}"
    return part


def _use(pod: Json) -> str:
    memory = pod.get("gpu_memory_gib", pod.get("rss_gib"))
    words = [f"{pod['gpu_utilisation_percent']:.0f}%"] if "gpu_utilisation_percent" in pod else []
    return " ".join(words + ([f"{memory:.1f} GiB"] if memory is not None else []))


def eval_line(step: int, metrics: Json) -> str:
    return f"eval at step {step}  loss {metrics['loss']:.4f}  perplexity {metrics['perplexity']:.2f}"


def per_pod(system: Json, nproc_per_node: int) -> list[Json]:
    """Each pod's use of its machine, in the order of ranks, from a system entry.

    Memory is that of the pod's largest rank, utilisation the mean of its GPUs.
    """
    names = ("gpu_utilisation_percent", "gpu_memory_gib", "rss_gib")
    per_rank = system.get("per_rank") or {name: [system[name]] for name in names if name in system}
    count = max((len(column) for column in per_rank.values()), default=0)
    pods = []
    for first in range(0, count, max(1, nproc_per_node)):
        pod: Json = {}
        for name in names:
            values = [
                value for value in per_rank.get(name, [])[first : first + nproc_per_node] if value is not None
            ]
            if values:
                pod[name] = statistics.fmean(values) if name.endswith("_percent") else max(values)
        pods.append(pod)
    return pods


def is_slow(system: Json) -> bool:
    """True if a rank holds up the others."""
    return float(system.get("slowest_ratio") or 0.0) > SLOW_RATIO


def waits_for_data(system: Json) -> bool:
    """True if steps wait for data so long that it matters."""
    limit = DATA_WAIT_SHARE_GPU if "gpu_memory_gib" in system else DATA_WAIT_SHARE
    return float(system.get("data_wait_share") or 0.0) > limit


def duration(seconds: float) -> str:
    """``75`` as ``1m15s``."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
