"""What a run's bookkeeping costs: heartbeat, metrics with each rank's figures, the lines on the screen, and
the sync to Aim.

    python benchmarks/bookkeeping_cost.py                       # two gloo ranks, steps of 50 ms, a line every
    10 steps python benchmarks/bookkeeping_cost.py --logging-steps 1

The parts are the program's own, called as the trainer calls them; the step between them is a sleep. Each
figure is a share of the steps' time: how long rank 0 is held up by its own bookkeeping and the exchange with
the others (who have just met, as they have in training), processor time of the heartbeat's thread, and of the
process that writes to Aim, which runs beside the training at low priority. Ends with 1 if the first two
together are more than 0.5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LIMIT = 0.005


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="gloo ranks on this machine")
    parser.add_argument("--step-s", type=float, default=0.05, help="length of a step in seconds")
    parser.add_argument("--steps", type=int, default=600, help="steps that are measured")
    parser.add_argument("--logging-steps", type=int, default=10, help="a line every so many steps")
    args = parser.parse_args()
    if args.processes > 1 and "LOCAL_RANK" not in os.environ:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(args.processes),
            __file__,
            *sys.argv[1:],
        ]
        return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode

    from podtune.run.distributed import cleanup_distributed, setup_distributed

    world = setup_distributed(use_cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, world, Path(folder) / "run", str(Path(folder) / "aim"))
    cleanup_distributed()
    if not world.is_main:
        return 0
    print(
        f"{world.world_size} rank(s), {args.steps} steps of {args.step_s * 1000:.0f} ms, a line every "
        f"{args.logging_steps}"
    )
    for what, seconds in found.items():
        print(
            f"{what:<46}{seconds / args.steps * 1e6:9.1f} us a step "
            f"{seconds / (args.steps * args.step_s):9.3%}"
        )
    return int(found["rank 0 held up"] + found["heartbeat's thread"] > LIMIT * args.steps * args.step_s)


def measure(args: argparse.Namespace, world: Any, run_dir: Path, repo: str) -> dict[str, float]:
    """Seconds over all measured steps, by what took them."""
    import psutil
    import torch
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from podtune.run.aim.tracking import start_tracker
    from podtune.run.lock import claim
    from podtune.run.record import new_record, write_json
    from podtune.sft.train.meter import Meter
    from podtune.sft.train.progress import Progress

    meter = Meter(world, "ddp")
    if world.is_main:
        run_dir.mkdir(parents=True)
        write_json(
            run_dir / "run.json", new_record(mode="sft", name="cost", config={}, world_size=world.world_size)
        )
    lock = claim(run_dir) if world.is_main else None
    on_step = lock.step if lock else None
    progress = Progress(run_dir, meter, world, from_step=0, rows=1, on_step=on_step)
    tracker = start_tracker(run_dir, repo) if world.is_main else None
    arguments = TrainingArguments(output_dir=str(run_dir), use_cpu=True, report_to="none")
    state, control, model = TrainerState(), TrainerControl(), torch.nn.Identity()
    watched = torch.nn.Identity()
    state.max_steps, state.epoch = args.steps, 0.0
    source = iter(lambda: 0, 1)
    row = torch.zeros(1)

    def step(number: int) -> float:
        """One step; returns the seconds in which rank 0 did not train."""
        began = time.perf_counter()
        model(row)
        next(source)
        plain = time.perf_counter() - began
        began = time.perf_counter()
        next(meter.batches(source))
        meter.time_forward(watched)
        watched(row)
        held = time.perf_counter() - began - plain
        time.sleep(args.step_s)
        if world.world_size > 1:
            torch.distributed.barrier()
        state.global_step = number
        began = time.perf_counter()
        progress.on_step_end(arguments, state, control)
        meter.count({"input_ids": row})
        if number % args.logging_steps == 0:
            meter.exchange()
            logs = {
                "loss": 2.0 + 1 / number,
                "grad_norm": 1.0,
                "learning_rate": 1e-3,
                "tokens": meter.tokens,
            }
            progress.on_log(arguments, state, control, logs=logs)
        return held + time.perf_counter() - began

    beating = next((thread.native_id for thread in threading.enumerate() if thread.name == "lock"), None)
    follower = psutil.Process(tracker._child.pid) if tracker and tracker._child else None
    with contextlib.redirect_stdout(io.StringIO()):
        number = 0
        while True:  # until Aim is imported and its run is open, which happens once
            number += 1
            step(number)
            ready = torch.tensor(int(follower is None or written(run_dir)))
            if world.world_size > 1:
                torch.distributed.broadcast(ready, 0)
            if ready and number >= 20:
                break
        sync, beat = cpu_of(follower), thread_cpu(beating)
        held = sum(step(number + index) for index in range(1, args.steps + 1))
        sync, beat = cpu_of(follower) - sync, thread_cpu(beating) - beat
    if lock and tracker:
        lock.release()
        tracker.finish(60)
    found = {"rank 0 held up": held, "heartbeat's thread": beat}
    return found | ({"beside it: the writer to Aim": sync} if follower else {})


def written(run_dir: Path) -> bool:
    """Whether the writer to Aim has written a line."""
    with contextlib.suppress(OSError, ValueError):
        return any(
            one.get("offset") for one in json.loads((run_dir / "aim.json").read_text())["repos"].values()
        )
    return False


def cpu_of(process: Any) -> float:
    """User and system time of a process in seconds."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def thread_cpu(number: int | None) -> float:
    """The same of one thread of this process, to a hundredth of a second."""
    import psutil

    return sum(one.user_time + one.system_time for one in psutil.Process().threads() if one.id == number)


if __name__ == "__main__":
    sys.exit(main())
