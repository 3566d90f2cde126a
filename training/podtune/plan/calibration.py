"""What this machine's CPU does, measured once and kept in the user's cache folder. Needs torch only to
measure, in a program of its own (:mod:`podtune.bench.cell.cpu_probe`).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from podtune.machine.facts import cpu_model, torch_build, usable_cpus
from podtune.plan.layout import DATA_PARALLEL, PLANNED
from podtune.run.errors import Unavailable, UserError, working
from podtune.run.files import write_whole

SCHEMA = 2  # raised when the probe measures something else
TIMEOUT_S = 600.0  # ten times what it takes
GRACE_S = 40.0  # torchrun itself waits 30 s for its ranks
SECTIONS = {
    "operations": {
        *("linear fp32", "linear bf16", "convolution", "attention", "layer norm", "group norm", "gelu"),
        *("relu", "add", "loss", "adamw", "sgd", "copy"),
    },
    # one rank at a time has no code of its own, and DeepSpeed need not be there
    "machinery": {*PLANNED} - {"single", "naive-mp", "zero2", "zero3"},
    "copies": {*DATA_PARALLEL} - {"zero2", "zero3"},
    "messages": {"all_reduce", "all_gather", "reduce_scatter", "send"},
}

Curve = list[list[float]]  # rows of: size, seconds a call, seconds a unit


@dataclass(frozen=True)
class Calibration:
    """Seconds of operations (forward and backward) and of messages on this machine.

    Args:
        processes: that worked at once in ``together``; in ``alone`` the others waited.
        threads: of each.
        machinery: what a strategy adds to a step and to each of its blocks, tensors or turns (see
            :func:`podtune.plan.cpu_time.machinery_units`), the latency of its messages with it.
        copies: what a strategy that divides the batch adds for each byte of weights.
        messages: over all processes by gloo; empty for one.
        said: where the figures are from, for people.
    """

    processes: int
    threads: int
    alone: dict[str, Curve]
    together: dict[str, Curve]
    machinery: dict[str, Curve]
    copies: dict[str, Curve]
    messages: dict[str, Curve]
    measured_at: str
    said: str

    def operation(
        self, name: str, units: float, *, size: float = 0, calls: float = 1, alone: bool = False
    ) -> float:
        """Seconds of ``calls`` operations with ``units`` in all, those of ``size`` wide."""
        fixed, slope = at(size, (self.alone if alone else self.together)[name])
        return calls * fixed + units * slope

    def message(self, kind: str, size: float, calls: float = 1) -> float:
        """Seconds of ``calls`` messages of ``size`` bytes together."""
        fixed, slope = at(0, self.messages[kind])
        return calls * fixed + size * slope


def at(size: float, curve: Curve) -> tuple[float, float]:
    """Seconds a call and a unit at ``size``: between two sizes linearly in its logarithm, beyond them the
    nearest's.
    """
    below = [row for row in curve if row[0] <= size] or curve[:1]
    above = [row for row in curve if row[0] >= size] or curve[-1:]
    (low, *first), (high, *second) = below[-1], above[0]
    share = math.log(size / low) / math.log(high / low) if high > low else 0.0
    fixed, slope = (a + share * (b - a) for a, b in zip(first, second, strict=True))
    return fixed, slope


def at_work(processes: int, threads: int) -> str:
    """So many processes and threads of each, in words."""
    return f"{processes} process{'es' * (processes > 1)} of {threads} thread{'s' * (threads > 1)}"


def calibration_path() -> Path:
    """Below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "podtune" / "cpu.json"


def calibrate(processes: int, threads: int = 1, *, anew: bool = False) -> Calibration:
    """This machine with ``processes`` of ``threads`` at work: as kept, or measured now, which takes up to a
    minute.

    Raises:
        UserError: torch is not there, or the measurement failed.
    """
    path, key, name = calibration_path(), _key(), f"{processes}x{threads}"
    entries = {} if anew else _kept(path, key)
    entry = entries.get(name)
    if entry is not None:
        return _calibration(entry, processes, threads, f"kept in {path}")
    working(f"measuring this CPU with {at_work(processes, threads)}: about a minute, once")
    entry = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds"), **_measure(processes, threads)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"schema": SCHEMA, "key": key, "entries": entries | {name: entry}}))
        said = f"kept in {path}"
    except OSError as error:
        said = f"not kept: {path}: {error.strerror}"
    return _calibration(entry, processes, threads, said)


def _key() -> dict[str, Any]:
    build = torch_build()
    if build is None:
        raise Unavailable(
            "the CPU is measured with torch, which is not installed",
            where="--hardware cpu",
            fix="pip install 'podtune[train]', or name a GPU",
        )
    return {"cpu": cpu_model(), "cpus": usable_cpus(), "torch": build.version}


def _kept(path: Path, key: dict[str, Any]) -> dict[str, Any]:
    """The sound entries of the file, none of one that is damaged or of another machine."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA or content["key"] != key:
            return {}
        return {name: entry for name, entry in content["entries"].items() if _sound(name, entry)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def _sound(name: str, entry: Any) -> bool:
    """Whether every curve is there, of finite numbers that are not negative."""
    sections = {"alone": "operations", "machinery": "machinery", "copies": "copies"}
    if not name.startswith("1x"):
        sections |= {"together": "operations", "messages": "messages"}
    if not isinstance(entry, dict) or not isinstance(entry.get("measured_at"), str):
        return False
    for section, kind in sections.items():
        curves = entry.get(section)
        if not isinstance(curves, dict) or not SECTIONS[kind] <= set(curves):
            return False
        for curve in curves.values():
            if not isinstance(curve, list) or not curve or not all(_sound_row(row) for row in curve):
                return False
    return True


def _sound_row(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 3
        and all(type(value) in (int, float) and math.isfinite(value) and value >= 0 for value in row)
        and row[2] > 0
    )


def _calibration(entry: dict[str, Any], processes: int, threads: int, said: str) -> Calibration:
    alone = entry["alone"]
    return Calibration(
        processes,
        threads,
        alone,
        entry.get("together", alone),
        entry["machinery"],
        entry["copies"],
        entry.get("messages", {}),
        entry["measured_at"],
        said,
    )


def _measure(processes: int, threads: int) -> dict[str, Any]:
    """What the probe finds, run by torchrun in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="podtune-") as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"]
        command += [
            "--nproc-per-node",
            str(processes),
            "-m",
            "podtune.bench.cell.cpu_probe",
            str(threads),
            str(path),
        ]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,
        )
        try:
            said = process.communicate(timeout=TIMEOUT_S)[1]
        except subprocess.TimeoutExpired:
            raise _failed(f"took longer than {TIMEOUT_S:.0f} s") from None
        finally:
            if process.poll() is None:  # also after Ctrl-C
                _end(process)
        if process.returncode or not path.exists():
            raise _failed((said.strip().splitlines() or [f"code {process.returncode}"])[-1][:300])
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def _end(process: subprocess.Popen[str]) -> None:
    """End the launcher, which ends its ranks; they have sessions of their own."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failed(why: str) -> UserError:
    return Unavailable(
        f"measuring this CPU failed: {why}",
        where="--hardware cpu",
        fix="try again on a machine that is less busy, or name a GPU",
    )
