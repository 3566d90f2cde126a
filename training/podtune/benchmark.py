"""Measure one model under one strategy: one cell, one record.

    python -m podtune.benchmark --model tinygpt-test --strategy single
    torchrun --nproc-per-node 2 -m podtune.benchmark --model tinygpt-test --strategy ddp --output /tmp/cell

Rank 0 writes OUTPUT/run.json and prints the record between markers. A failed cell is a record too: out of
memory, a hang, a dead peer. Exit codes: 0 measured; 2, 64-78 the command line or the machine does not fit; 70
parity failed; 170 a peer or a collective was lost.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from podtune.bench.models import Size
from podtune.bench.options import Options, read_options
from podtune.machine.provenance import provenance
from podtune.run import errors
from podtune.run.collect import emit_record
from podtune.run.distributed import World, cleanup_distributed, peer_failure, read_world, setup_distributed
from podtune.run.errors import PeerLost, UserError
from podtune.run.record import (
    RUN_FILE,
    Json,
    Measurements,
    Status,
    end_record,
    new_record,
    write_json,
)

if TYPE_CHECKING:
    from podtune.bench.cell.loop import Run

CLAIM = ".ended"  # whoever creates it writes the record: the rank that failed, while the others hang on it


class Ended(SystemExit):
    """SIGTERM, which torchrun sends when another rank has failed and Kubernetes when the pod must go."""

    def __str__(self) -> str:
        return "ended by SIGTERM"


def main(arguments: list[str] | None = None) -> int:
    """Run one cell; the exit code."""
    world = World()
    try:
        world = read_world()
        options, size, _ = read_options(arguments, world)
        output = _prepare_output(options, world)
    except UserError as error:
        return errors.report(error) if world.is_main else error.code
    return _run_cell(options, size, output)


def _run_cell(options: Options, size: Size, output: Path) -> int:
    _configure(options)
    from podtune.bench.cell.watchdog import Watchdog

    record = new_record(
        mode="benchmark",
        name=output.name,
        config=asdict(options),
        strategy=options.strategy,
        model=options.model,
        global_batch_size=options.global_batch_size,
        seed=options.seed,
    )
    record["attempts"].append({"started_at": record["started_at"], "from_step": 0})
    run: Run | None = None

    def hang(doing: str) -> None:
        reason = f"hang: nothing ended for {watchdog.patience:.0f} s while {doing}"
        _finish(record, "error", errors.PEER_LOST, reason, output)
        print(f"podtune: error: {reason}", file=sys.stderr, flush=True)
        os._exit(errors.PEER_LOST)

    watchdog = Watchdog(options.timeout_s, hang)
    try:
        world = setup_distributed(options.timeout_s, use_cpu=options.cpu)
        _identify(record, world)
        from podtune.bench.cell.device import refuse_what_the_device_lacks
        from podtune.bench.cell.loop import Run, measure

        refuse_what_the_device_lacks(options, world)
        run = Run(options, size, world, watchdog)
        measurements = measure(run)
        record["measurements"] = measurements.to_json()
        run = None
        cleanup_distributed()
        return _conclude(record, measurements, world, output)
    except BaseException as error:
        return _fail(record, error, run, output)
    finally:
        watchdog.stop()


def _conclude(record: Json, measurements: Measurements, world: World, output: Path) -> int:
    parity = measurements.parity
    if parity is None or parity.status != "failed":
        if world.is_main:
            _finish(record, "ok", errors.OK, "", output)
        return errors.OK
    reason = (
        f"parity: failed, losses differ by {parity.max_relative_difference:.1e} (relative), "
        f"tolerance {parity.tolerance:.0e}"
    )
    if world.is_main:
        _finish(record, "error", errors.SOFTWARE, reason, output)
        print(f"podtune: error: {record['strategy']}: {reason}", file=sys.stderr)
    return errors.SOFTWARE


def _fail(record: Json, error: BaseException, run: Run | None, output: Path) -> int:
    """Whatever ended the cell, on any rank, is written down by the first rank to come here."""
    rank = int(record.get("rank", 0))
    from podtune.bench.cell.measure import is_out_of_memory, memory_held

    if is_out_of_memory(error):
        held = {} if run is None else run.held | memory_held(run.world.device)
        record["measurements"] = {"held_at_oom": held}
        reason = f"out of memory on rank {rank}: {str(error).splitlines()[0]}"
        _finish(record, "oom", errors.UNAVAILABLE, reason, output)
        advice = UserError(
            reason,
            where=f"{record['model']} under {record['strategy']}",
            fix=(
                "lower --global-batch-size, raise --accumulation, use --activation-checkpointing full, or "
                "shard with fsdp or zero3"
            ),
            code=errors.UNAVAILABLE,
        )
        return errors.report(advice, rank=rank)
    error = peer_failure(error) or error
    text = (
        str(error) if isinstance(error, UserError | PeerLost | Ended) else f"{type(error).__name__}: {error}"
    )
    code = errors.exit_code(error)
    _finish(record, "error", code, text, output)
    if not isinstance(error, UserError | PeerLost | Ended):
        import traceback

        traceback.print_exception(error)
    return errors.report(error, rank=rank)


def _finish(record: Json, status: Status, code: int, reason: str, output: Path) -> None:
    try:
        os.close(os.open(output / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return
    end_record(record, status, code, reason)
    write_json(output / RUN_FILE, record)
    if status == "ok":
        print(summary(record), flush=True)
    emit_record(record, sys.stdout)


def summary(record: Json) -> str:
    """The cell in a line for people; the record holds the rest."""
    measured = Measurements.read(record)
    line = f"{record['model']} {record['strategy']} on {record['world_size']}"
    if measured.parity:
        line += f": parity {measured.parity.status}"
    if measured.step_time_s:
        line += f", {measured.step_time_s.p50 * 1000:,.1f} ms a step"
    for speed, unit in ((measured.tokens_per_s, "tokens"), (measured.samples_per_s, "samples")):
        if speed is not None:
            line += f", {speed:,.0f} {unit}/s"
    if measured.peak_memory_gib:
        line += f", {measured.peak_memory_gib.max:.2f} GiB at the most"
    return line


def _prepare_output(options: Options, world: World) -> Path:
    """The folder, empty of an earlier cell's result. Every rank tries, since one that fails writes there
    too.
    """
    output = Path(options.output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if world.is_main:
            (output / RUN_FILE).unlink(missing_ok=True)
            (output / CLAIM).unlink(missing_ok=True)
        if not os.access(output, os.W_OK):
            raise PermissionError("not writable")
    except OSError as error:
        raise UserError(
            f"cannot write there: {error}", where=f"--output {output}", code=errors.CANNOT_CREATE
        ) from None
    return output


def _identify(record: Json, world: World) -> None:
    record.update(
        rank=world.rank,
        world_size=world.world_size,
        nnodes=world.nnodes,
        nproc_per_node=world.local_world_size,
        provenance=provenance(),
    )


def _configure(options: Options) -> None:
    """What must be set before torch is loaded, and how torchrun ends us when a peer has failed."""
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    # of DeepSpeed's calls, not of ours
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not read_world().master and options.strategy != "single":
        # One process without torchrun: a group of one, so that every strategy runs as it would among many.
        alone = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        os.environ.update(alone)

    def end(signum: int, frame: object) -> None:
        raise Ended(128 + signum)

    signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    code = main()
    if code:
        # Peers may sit in a collective that never ends: leave without waiting for the threads of the process
        # group.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
