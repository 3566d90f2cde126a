"""podtune collect: the records that runs printed, out of container logs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from podtune.cluster.live.client import connect
from podtune.cluster.live.follow import logs_of
from podtune.commands.options import Namespace
from podtune.run import collect as records
from podtune.run.collect import Collection
from podtune.run.errors import CannotCreate, DataError, NotFound, UsageError, creating, printable
from podtune.run.follow import read_record
from podtune.run.record import RUN_FILE, write_json


def collect(
    logs: Annotated[
        list[str] | None, typer.Argument(help="Log files, or - for standard input.", metavar="LOGFILE...")
    ] = None,
    job: Annotated[str, typer.Option(help="Read the logs of this job's pods on the cluster instead.")] = "",
    namespace: Namespace = "",
    output: Annotated[
        str, typer.Option(help="Write each record to a folder below this one, as run.json.")
    ] = "",
    expect: Annotated[int, typer.Option(help="How many records there must be.")] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="The records themselves, and what is damaged.")
    ] = False,
) -> None:
    """Find the records that runs printed to their logs; each comes back exactly, or is named as damaged.

    Exit code 0: all records exact. 65: one is missing or damaged.

    \b
    Examples:
      kubectl logs my-run-master-0 | podtune collect - --output results
      podtune collect pod-0.log pod-1.log --json
      podtune collect --job my-run --output results
    """
    if bool(logs) == bool(job):
        fix = "podtune collect LOGFILE..., or podtune collect --job NAME"
        raise UsageError("give log files, or a job", fix=fix)
    collection = _collected(logs or [], job, namespace)
    if output:
        _write(collection, Path(output), quiet=as_json)
    missing = max(0, expect - len(collection.records) - len(collection.damaged))
    if as_json:
        damaged = [{"tag": record.tag, "reason": record.reason} for record in collection.damaged]
        content = {"records": collection.records, "damaged": damaged, "missing": missing}
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo(f"{len(collection.records)} exact, {len(collection.damaged)} damaged, {missing} missing")
    if collection.damaged or missing:
        what = [str(record) for record in collection.damaged]
        what += [f"{missing} of {expect} expected records are missing"] if missing else []
        raise DataError(
            "; ".join(what),
            where=f"the pods of {job}" if job else ", ".join(logs or []),
            fix="collect the complete logs: kubectl logs --tail=-1, before rotation",
        )


def _collected(logs: list[str], job: str, namespace: str) -> Collection:
    if job:
        return records.collect(logs_of(connect(namespace), job))
    if logs == ["-"]:
        # rotation cuts a log inside a character
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        return records.collect(sys.stdin)
    for log in logs:
        if not Path(log).is_file():
            raise NotFound("no such file", where=log, fix="give the log files of the run's pods")
    try:
        return records.collect_files(map(Path, logs))
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", where=str(error.filename)) from None


def _write(collection: Collection, output: Path, *, quiet: bool) -> None:
    """Write each record to a folder of its own below ``output``."""
    with creating(output):
        for record, digest in zip(collection.records, collection.digests, strict=True):
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(record.get("name") or "run")).strip(".-") or "run"
            folder = output / f"{name[:100]}-{digest}"
            _keep(folder, record)
            if not quiet:
                typer.echo(f"{folder}/run.json: {printable(str(record.get('status')))}")


def _keep(folder: Path, record: dict[str, Any]) -> None:
    """Write the record below ``folder``, which may hold the same one already and no other."""
    if folder.is_symlink():
        raise CannotCreate("is a link", where=str(folder), fix="remove it")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / RUN_FILE).exists() and read_record(folder) != record:
        raise CannotCreate("holds another record", where=str(folder), fix="give an --output of its own")
    write_json(folder / RUN_FILE, record)
