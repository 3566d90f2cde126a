"""The record of one case, however it ends: written once, by the rank that ends it first. Needs no torch."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from podtune.bench.options import Options
from podtune.machine.provenance import provenance
from podtune.run import errors
from podtune.run.collect import emit_record
from podtune.run.errors import PeerLost, UserError
from podtune.run.exit import peer_failure
from podtune.run.record import RUN_FILE, Json, Measurements, Status, end_record, new_record, write_json
from podtune.run.world import World

CLAIM = ".ended"  # whoever creates it writes the record: the rank that failed, while the others hang on it


class Ended(SystemExit):
    """SIGTERM, which torchrun sends when another rank has failed and Kubernetes when the pod must go."""

    def __str__(self) -> str:
        return "ended by SIGTERM"


def prepare_output(options: Options, world: World) -> Path:
    """The folder, empty of an earlier cell's result. Every rank tries, since one that fails writes there too.

    Raises:
        UserError: it cannot be written.
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
        raise errors.CannotCreate(f"cannot write there: {error}", where=f"--output {output}") from None
    return output


def case_record(options: Options, name: str) -> Json:
    return new_record(
        mode="benchmark",
        name=name,
        config=asdict(options),
        strategy=options.strategy,
        model=options.model,
        global_batch_size=options.global_batch_size,
        seed=options.seed,
    )


def identity(world: World) -> dict[str, int]:
    """The processes of a case, as its record names them."""
    return {
        "world_size": world.world_size,
        "nnodes": world.nnodes,
        "nproc_per_node": world.local_world_size,
    }


class CaseRecord:
    """The record as this rank knows it; :meth:`end` writes it unless another rank has done so."""

    def __init__(self, options: Options, output: Path) -> None:
        self.output = output
        self.world = World()
        self.content = case_record(options, output.name)
        self.content["attempts"].append({"started_at": self.content["started_at"], "from_step": 0})

    def identify(self, world: World) -> None:
        """Once the process group is open: who this rank is, and on what machine."""
        self.world = world
        self.content |= {"rank": world.rank, "provenance": provenance(), **identity(world)}

    def end(self, status: Status, code: int, reason: str = "") -> int:
        """Write and print the record; the exit code."""
        try:
            os.close(os.open(self.output / CLAIM, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return code
        end_record(self.content, status, code, reason)
        write_json(self.output / RUN_FILE, self.content)
        if status == "ok":
            print(
                f"{self.content['model']} {self.content['strategy']} on {self.content['world_size']}: "
                f"{summary(self.content)}",
                flush=True,
            )
        emit_record(self.content, sys.stdout)
        return code

    def conclude(self, measurements: Measurements) -> int:
        """The cell was measured: ok, unless its losses are not those of one process. Rank 0 writes."""
        self.content["measurements"] = measurements.to_json()
        parity = measurements.parity
        if parity is None or parity.status != "failed":
            return self.end("ok", errors.OK) if self.world.is_main else errors.OK
        reason = (
            f"parity: failed, losses differ by {parity.max_relative_difference:.1e} (relative), "
            f"tolerance {parity.tolerance:.0e}"
        )
        if self.world.is_main:
            self.end("error", errors.SOFTWARE, reason)
            print(f"podtune: error: {self.content['strategy']}: {reason}", file=sys.stderr)
        return errors.SOFTWARE

    def fail(self, error: BaseException, memory_gib: Json) -> int:
        """Whatever ended the cell, on any rank, is written down by the first rank to come here.

        ``memory_gib`` is what the rank held, for a cell that ran out of memory.
        """
        rank = self.world.rank
        if errors.out_of_memory(error):
            self.content["measurements"] = {"held_at_oom": memory_gib}
            reason = f"out of memory on rank {rank}: {str(error).splitlines()[0]}"
            advice = errors.OutOfMemory(
                reason,
                where=f"{self.content['model']} under {self.content['strategy']}",
                fix="lower --global-batch-size, raise --accumulation, use --activation-checkpointing full, "
                "or shard with fsdp or zero3",
            )
            self.end("oom", errors.OUT_OF_MEMORY, reason)
            return errors.report(advice, rank=rank)
        error = peer_failure(error) or error
        expected = isinstance(error, UserError | PeerLost | Ended)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        self.end("error", errors.exit_code(error), text)
        if not expected:
            traceback.print_exception(error)
        return errors.report(error, rank=rank)


def summary(record: Json) -> str:
    """A line for people on how a case went; the record holds the rest."""
    if record.get("status") != "ok":
        return f"{record.get('status', 'no record')}: {' '.join(str(record.get('reason', '')).split())[:160]}"
    measured = Measurements.read(record)
    parts = [f"parity {measured.parity.status}"] if measured.parity else []
    if step := measured.step_time_s:
        spread = "" if step.std is None else f" (std {step.std * 1000:,.1f})"
        parts.append(f"{step.p50 * 1000:,.1f} ms a step{spread}")
    for speed, unit in ((measured.tokens_per_s, "tokens/s"), (measured.samples_per_s, "images/s")):
        if speed is not None:
            parts.append(f"{speed:,.{0 if speed >= 100 else 1}f} {unit}")
    if measured.peak_memory_gib:
        parts.append(f"{measured.peak_memory_gib.max:.2f} GiB at the most")
    return ", ".join(parts)
