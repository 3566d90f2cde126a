"""Podtune why: the cause of a job that does not run, or no longer does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from podtune.cluster.live.client import connect
from podtune.cluster.live.status import scene_of
from podtune.cluster.why.answer import Answer, explain
from podtune.cluster.why.scene import from_files
from podtune.commands.options import Context, Namespace
from podtune.run.errors import NotFound, printable

OTHERS = 4


def why(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="[JOB|FOLDER|FILE]",
            help="A job or pod, a run's folder, or saved logs and objects; else the newest job.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="The answer as JSON, podtune.why/1; a list for several jobs.")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Say in one sentence why a job does not run, with what shows it: events, exit codes, logs, heartbeats.

    For any PyTorchJob, TrainJob or Job, or pods, of podtune's or not; in a cluster, or from what was saved of
    it: `kubectl get pytorchjob,pod,event,pvc -o yaml`, logs, Flight Recorder dumps.

    \b
    Examples:
      podtune why my-run
      podtune why work/runs/my-run
      kubectl get pytorchjob,pod,event -o yaml > saved.yaml; podtune why saved.yaml
    """
    if subject and Path(subject).exists():
        scenes = from_files(Path(subject)).by_job()
    elif "/" in subject or Path(subject).suffix:
        raise NotFound("there is no such file or folder", where=subject)
    else:
        scenes = [scene_of(connect(namespace, context), subject)]
    answers = [explain(scene) for scene in scenes]
    if as_json:
        content = [asdict(answer) for answer in answers]
        print(json.dumps(content[0] if len(content) == 1 else content, indent=2))
    else:
        print("\n".join(map(as_text, answers)))


def as_text(answer: Answer) -> str:
    """The sentence, the fix, the evidence, and what else was found."""
    lines = [answer.sentence]
    if answer.cause:
        lines += [f"  fix: {answer.cause.fix}"] * bool(answer.cause.fix)
        lines += [f"  | {line}" for line in answer.evidence]
        lines += [f"  also {other.pod or other.reason}: {other.text}" for other in answer.others[:OTHERS]]
    return printable("\n".join(lines))
