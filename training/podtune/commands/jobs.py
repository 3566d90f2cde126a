"""podtune submit, status, logs, delete: jobs on a cluster."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from podtune.cluster.job.manifest import Json, name_of
from podtune.cluster.live import submit as steps
from podtune.cluster.live.client import Cluster, connect
from podtune.cluster.live.follow import follow, log_of
from podtune.cluster.live.status import scene_of, status_of
from podtune.cluster.why.answer import explain
from podtune.cluster.why.state import state
from podtune.commands.manifests import chart_manifests, linted
from podtune.commands.options import Context, Name, Namespace, Sets, Values
from podtune.commands.why import as_text
from podtune.run.errors import DataError, NotFound, UsageError
from podtune.run.job_snapshot import JobStatus


def submit(
    values: Values = None,
    sets: Sets = None,
    name: Annotated[str, typer.Option(help="The run; the first values file's name if left out.")] = "",
    manifest: Annotated[Path | None, typer.Option(help="A manifest in place of the chart.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print conditions, events and logs until the job ends.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Ask the cluster everything, create nothing.")
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Create the chart's job without helm, after the cluster was asked whether it would take it.

    Looked at before anything is created: lint (what the API server, the webhook or the operator would
    refuse ends it, the rest is named), the operator, Secrets and claims, and a server-side dry run, which
    needs create and patch of the chart's kinds. What a failure leaves half-way is removed again.

    \b
    Examples:
      podtune submit -f deploy/values/two-node.yaml --name my-run --follow
      podtune submit -f deploy/values/two-node.yaml --dry-run
    """
    if manifest:
        try:
            text = manifest.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NotFound(f"cannot be read: {error}", where=str(manifest)) from error
    else:
        name = name or (values[0].stem if values else "run")
        text = chart_manifests(values or [], sets or [], name, namespace or "default")
    documents = steps.installable(linted(text))
    cluster = connect(namespace, context)
    for note in steps.check(cluster, documents):
        print(f"podtune: note: {note}", file=sys.stderr)
    job = name_of(documents[-1])
    if dry_run:
        kinds = ", ".join(document["kind"] for document in documents)
        print(f"the cluster would take {kinds} of {job} in {cluster.namespace}; nothing was created")
        return
    print(f"created in {cluster.namespace}: {', '.join(steps.create(cluster, documents))}")
    if follow:
        follow_job(cluster, job)
    else:
        print(f"follow it:  podtune logs {job} --follow\nlook at it: podtune status {job}")
        print(f"end it:     podtune delete {job}")


def status(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="All jobs of the namespace if left out.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Conditions, pods and findings as JSON.")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Show a job's condition, its pods, and why a pod does not run.

    \b
    Examples:
      podtune status
      podtune status my-run --json
    """
    cluster = connect(namespace, context)
    if name:
        print_status(cluster, cluster.job(name), as_json=as_json)
        return
    jobs = [{"job": name_of(job), "kind": job["kind"], "condition": state(job)[0]} for job in cluster.jobs()]
    width = max((len(job["job"]) for job in jobs), default=0)
    lines = [f"{job['job']:<{width}}  {job['condition']:<10}  {job['kind']}" for job in jobs]
    text = "\n".join(lines) or f"no jobs in the namespace {cluster.namespace}"
    print(json.dumps(jobs, indent=2) if as_json else text)


def logs(
    name: Name,
    everything: Annotated[
        bool, typer.Option("--all", help="Logs of all pods, each line after its pod's name.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Follow until the job ends, with conditions and problems of all pods."),
    ] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Print a job's logs: of its first pod, or of all.

    \b
    Examples:
      podtune logs my-run
      podtune logs my-run --all --follow
    """
    cluster = connect(namespace, context)
    if follow:
        follow_job(cluster, name)
        return
    job = cluster.job(name)
    pods = [name_of(pod) for pod in cluster.pods(job)]
    if not pods:
        what, fix = f"the job {name!r} has no pods (any more)", f"podtune status {name}"
        raise DataError(what, where=cluster.namespace, fix=fix)
    for pod in pods if everything else pods[:1]:
        for line in log_of(cluster, job, pod) or ["(no log yet)"]:
            print(f"{pod} | {line}" if everything else line)


def delete(
    name: Name,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Also the claims, with models, data and checkpoints.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before claims go.")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Delete a job and what podtune submitted with it. The volumes stay unless --volumes is given.

    \b
    Examples:
      podtune delete my-run
      podtune delete my-run --volumes --yes
    """
    cluster = connect(namespace, context)
    job = cluster.job(name)
    parts = steps.parts_of(cluster, job, volumes=volumes)
    claims = [name_of(part) for part in parts if part["kind"] == "PersistentVolumeClaim"]
    if claims and not yes:
        if not sys.stdin.isatty():
            what = f"the claims {', '.join(claims)} would be deleted, and there is no terminal to ask on"
            raise UsageError(what, where="--volumes", fix="add --yes")
        typer.confirm(f"Delete {', '.join(claims)} with all that is on them?", abort=True)
    print(f"deleted: {', '.join(steps.delete(cluster, job, parts))}")


def follow_job(cluster: Cluster, name: str) -> None:
    """Follow the job to its end: exit code 0 for Succeeded, 1 for Failed with reasons and last lines.

    Ctrl-C only detaches.
    """
    lock = threading.Lock()  # each pod's lines come from a thread of its own

    def emit(who: str, line: str) -> None:
        with lock:
            print(f"{'---' if who == 'job' else who + ' |'} {line}", flush=True)

    try:
        condition = follow(cluster, name, emit)
    except KeyboardInterrupt:
        back = f"Come back: podtune logs {name} --follow; end it: podtune delete {name}"
        print(f"\ndetached; the job continues. {back}", file=sys.stderr)
        raise typer.Exit(130) from None
    if condition == "Failed":
        print(f"\n{as_text(explain(scene_of(cluster, name)))}")
        raise typer.Exit(1)


def print_status(cluster: Cluster, job: Json, *, as_json: bool = False) -> None:
    """Print a job's condition, its pods, and what is wrong with them."""
    found = status_of(cluster, job)
    content = {"schema": "podtune.status/1", **asdict(found)}
    print(json.dumps(content, indent=2) if as_json else _status_text(found))


def _status_text(status: JobStatus) -> str:
    head = f"{status.kind} {status.job} in {status.namespace}: {status.condition}"
    lines = [head + (f" ({status.message})" if status.message else "")]
    width = max((len(pod.name) for pod in status.pods), default=0)
    for pod in status.pods:
        lines.append(
            f"  {pod.name:<{width}}  {pod.phase:<18} restarts {pod.restarts}  node {pod.node or '-'}"
        )
        if pod.start_s:
            parts = ", ".join(f"{name} {seconds:.0f}" for name, seconds in pod.start_s.items())
            lines.append(f"  {'':<{width}}  after {sum(pod.start_s.values()):.0f} s: {parts}")
    for problem in status.problems:
        lines.append(f"  {problem.pod}: {problem.text}")
        lines += [f"    fix: {problem.fix}"] if problem.fix else []
    return "\n".join(lines)
