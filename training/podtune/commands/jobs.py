"""podtune submit, status, logs, delete: jobs on a cluster."""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from podtune.commands.options import Context, Name, Namespace, Sets, Values
from podtune.run.errors import DataError, UsageError

if TYPE_CHECKING:
    from podtune.cluster.live.client import Cluster
    from podtune.cluster.live.status import JobStatus


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
    no_lint: Annotated[bool, typer.Option("--no-lint", help="Create it whatever lint finds.")] = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Create the chart's job without helm, after the cluster was asked whether it would take it.

    Looked at before anything is created: lint (what the API server, the webhook or the operator would
    refuse ends it, the rest is named), the operator, your permissions (create and patch of the
    chart's kinds, get of what it refers to), Secrets and claims, and a server-side dry run. What a failure
    leaves half-way is removed again.

    \b
    Examples:
      podtune submit -f deploy/values/two-node.yaml --name my-run --follow
      podtune submit -f deploy/values/two-node.yaml --dry-run
    """
    from podtune.cluster.live import submit as steps
    from podtune.cluster.live.client import connect
    from podtune.cluster.live.kinds import name_of
    from podtune.commands.manifests import chart_manifests, linted, read_manifest

    if manifest:
        text = read_manifest(manifest)
    else:
        name = name or (values[0].stem if values else "run")
        text = chart_manifests(values or [], sets or [], name, namespace or "default")
    fix = "correct what is listed above, or --no-lint"
    documents = steps.installable(linted(text, refuse=not no_lint, fix=fix))
    cluster = connect(namespace, context)
    for note in steps.check(cluster, documents):
        print(f"podtune: note: {note}", file=sys.stderr)
    job = name_of(documents[-1])
    if dry_run:
        print(
            f"the cluster would take {', '.join(document['kind'] for document in documents)} of {job} in "
            f"{cluster.namespace}; nothing was created"
        )
        return
    print(f"created in {cluster.namespace}: {', '.join(steps.create(cluster, documents))}")
    if follow:
        _follow(cluster, job)
    else:
        print(
            f"follow it:  podtune logs {job} --follow\nlook at it: podtune status {job}\nend it:     "
            f"podtune delete {job}"
        )


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
    from podtune.cluster.live.client import connect
    from podtune.cluster.live.diagnose import state
    from podtune.cluster.live.kinds import name_of
    from podtune.cluster.live.status import status_of

    cluster = connect(namespace, context)
    if not name:
        jobs = [
            {"job": name_of(job), "kind": job["kind"], "condition": state(job)[0]} for job in cluster.jobs()
        ]
        width = max((len(job["job"]) for job in jobs), default=0)
        lines = [f"{job['job']:<{width}}  {job['condition']:<10}  {job['kind']}" for job in jobs]
        print(
            json.dumps(jobs, indent=2)
            if as_json
            else "\n".join(lines) or f"no jobs in the namespace {cluster.namespace}"
        )
        return
    content = status_of(cluster, cluster.job(name))
    print(json.dumps(asdict(content), indent=2) if as_json else _status_text(content))


def logs(
    name: Name,
    everything: Annotated[
        bool, typer.Option("--all", help="Logs of all pods, each line after its pod's name.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Follow until the job ends, with conditions and problems of all pods."),
    ] = False,
    of_pod: Annotated[
        str, typer.Option("--pod", metavar="POD", help="Log of this pod; the end of its name is enough.")
    ] = "",
    tail: Annotated[int, typer.Option(min=0, help="The last so many lines of each pod; 0: all.")] = 0,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Print a job's logs: of its first pod, or of all.

    \b
    Examples:
      podtune logs my-run
      podtune logs my-run --all --follow
      podtune logs my-run --pod worker-0 --tail 50
    """
    if (of_pod and everything) or (follow and (of_pod or tail)):
        raise UsageError(
            "--pod excludes --all and --follow, and --follow excludes --tail", fix="leave one of them out"
        )
    from podtune.cluster.live.client import connect
    from podtune.cluster.live.follow import last_lines
    from podtune.cluster.live.kinds import name_of

    cluster = connect(namespace, context)
    if follow:
        _follow(cluster, name)
        return
    job = cluster.job(name)
    pods = cluster.pods(job)
    if not pods:
        raise DataError(
            f"the job {name!r} has no pods (any more)", where=cluster.namespace, fix=f"podtune status {name}"
        )
    chosen = [pod for pod in pods if name_of(pod).endswith(of_pod)]
    if not chosen:
        names = ", ".join(name_of(pod) for pod in pods)
        raise UsageError(f"{name!r} has no pod {of_pod!r}", where="--pod", fix=f"one of {names}")
    for pod in chosen if everything else chosen[:1]:
        for line in last_lines(cluster, job, name_of(pod), tail) or ["(no log yet)"]:
            print(f"{pod['metadata']['name']} | {line}" if everything else line)


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
    from podtune.cluster.live import submit as steps
    from podtune.cluster.live.client import connect
    from podtune.cluster.live.kinds import name_of

    cluster = connect(namespace, context)
    job = cluster.job(name)
    parts = steps.parts_of(cluster, job, volumes=volumes)
    claims = [name_of(part) for part in parts.own if part["kind"] == "PersistentVolumeClaim"]
    if claims and not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"the claims {', '.join(claims)} would be deleted, and there is no terminal to ask on",
                where="--volumes",
                fix="add --yes",
            )
        typer.confirm(f"Delete {', '.join(claims)} with all that is on them?", abort=True)
    print(f"deleted: {', '.join(steps.delete(cluster, job, parts.own))}")
    if parts.others:
        print(
            f"left, because podtune did not make them: kubectl -n {cluster.namespace} delete "
            f"{' '.join(parts.others)}"
        )


def _follow(cluster: Cluster, name: str) -> None:
    """Follow the job to its end: exit code 0 for Succeeded, 1 for Failed with reasons and last lines.

    Ctrl-C only detaches.
    """
    from podtune.cluster.live.follow import JobFollower
    from podtune.cluster.why.answer import explain
    from podtune.cluster.why.live_scene import from_cluster
    from podtune.commands.why import as_text

    lock = threading.Lock()

    def emit(who: str, line: str) -> None:
        with lock:
            print(f"{'---' if who == 'job' else who + ' |'} {line}", flush=True)

    try:
        condition = JobFollower(cluster, name, emit).run()
    except KeyboardInterrupt:
        print(
            f"\ndetached; the job continues. Come back: podtune logs {name} --follow; end it: podtune delete "
            f"{name}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    if condition == "Succeeded":
        return
    print(f"\n{as_text(explain(from_cluster(cluster, name)))}")
    raise typer.Exit(1)


def _status_text(status: JobStatus) -> str:
    head = f"{status.kind} {status.job} in {status.namespace}: {status.condition}"
    lines = [head + (f" ({status.message})" if status.message else "")]
    width = max((len(pod.name) for pod in status.pods), default=0)
    lines += [
        f"  {pod.name:<{width}}  {pod.phase:<18} restarts {pod.restarts}  node {pod.node or '-'}"
        for pod in status.pods
    ]
    for problem in status.problems:
        lines.append(f"  {problem.pod}: {problem.text}")
        lines += [f"    fix: {problem.fix}"] if problem.fix else []
    return "\n".join(lines)
