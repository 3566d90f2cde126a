"""Causes of a job that does not run, in its objects, events, logs and folder, by the table causes.yaml."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.why.flight_recorder import missing_rank
from podtune.cluster.why.scene import Scene, about_of
from podtune.cluster.why.state import container_statuses, ends_of, has_failed, phase, queue_of, state
from podtune.run.errors import PEER_LOST, PREEMPTED
from podtune.run.job_snapshot import Cause
from podtune.run.lock import life, read_beat

#: how much a problem explains: it is the cause; most likely it is; it follows from another; it has no words
CAUSE, LIKELY, SYMPTOM, BARE = range(4)
GRADES = {"cause": CAUSE, "likely": LIKELY, "symptom": SYMPTOM}
HANGS_S = 600.0  # without a step: longer than an evaluation or a save takes
#: the beginning of a traceback's last line, after the names that torchrun puts before it
RAISED = r"^(?:\[[\w-]+\]:\s*)*(?:[a-z_]\w*\.)*"
#: exceptions that only repeat what another process said
REPEATED = re.compile(r"ChildFailedError|DistBackendError|DistNetworkError|SignalException|DistStoreError")


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    reason: str
    line: re.Pattern[str]
    text: str
    fix: str
    grade: int


@cache
def table() -> dict[str, list[Row]]:
    """The rows of each section, the most telling first."""
    import yaml

    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        section: [
            Row(
                reason,
                re.compile(row.get("line", f"^{reason}: (.*)").replace("RAISED", RAISED)),
                row.get("text", "{0}"),
                row.get("fix", ""),
                GRADES[row.get("grade", "cause")],
            )
            for reason, row in rows.items()
        ]
        for section, rows in content.items()
    }


def told(section: str, said: str, pod: str, reason: str = "") -> Cause | None:
    """The cause that the first fitting row of the table sees in ``said``."""
    said = " ".join(said.split())
    for row in table()[section]:
        if match := row.line.search(said):
            part = next((group for group in match.groups() if group), "" if match.groups() else said)
            return Cause(pod, reason or row.reason, row.text.format(part.strip()[:1000]), row.fix, row.grade)
    return None


def causes(scene: Scene) -> list[Cause]:
    """Everything that keeps pods from running, or ended them; a cause before what followed from it."""
    return sorted(_causes(scene), key=lambda cause: (cause.grade, cause.at))


def _causes(scene: Scene) -> Iterator[Cause]:
    if traced := missing_rank(scene.traces):
        ranks = ", ".join(str(trace.rank) for trace in scene.traces)
        yield _rank_missing(traced, f"Flight Recorder's dumps of ranks {ranks}")
    for job in scene.jobs:
        yield from _of_waiting_job(job, scene)
    yield from _of_events(scene)
    for pod in scene.pods:
        yield from _of_pod(pod)
    yield from _of_logs(scene)
    yield from _of_timeouts(scene)
    if scene.folder:
        yield from _of_folder(scene.folder)


def _of_waiting_job(job: Json, scene: Scene) -> Iterator[Cause]:
    name, spec, queue = name_of(job), dig(job, "spec"), queue_of(job)
    for workload in scene.workloads if queue else []:
        for condition in dig(workload, "status").get("conditions") or []:
            if condition["type"] == "QuotaReserved" and condition["status"] == "False":
                said = f"waits in the queue {queue} of Kueue: {condition.get('message')}"
                yield from filter(None, [told("queued", said, name, "Queued")])
    suspended = spec.get("suspend") or dig(spec, "runPolicy").get("suspend")
    if suspended and not queue and state(job)[0] not in ("Succeeded", "Failed"):
        yield Cause(name, "Suspended", "it is suspended and names no queue", "set suspend: false")


def of_failed_job(job: Json, pods: list[Json]) -> Iterator[Cause]:
    """Yield the reason that the job's controller gives for its failure."""
    condition, message = state(job)
    reasons = [str(one.get("reason")) for one in dig(job, "status").get("conditions") or []]
    cause = told("failed", f"{' '.join(reasons)} {message}", name_of(job))
    if condition == "Failed" and cause:
        codes = {end.get("exitCode") for pod in pods for end in ends_of(pod)}
        by_itself = codes - {0, 130, 137, PREEMPTED}  # a pod failed before the controller ended the others
        text = f"{cause.text}: {message}" if message else cause.text
        yield replace(cause, text=text, grade=SYMPTOM if by_itself else cause.grade)


def _of_events(scene: Scene) -> Iterator[Cause]:
    """Causes that events tell of what still waits: pods that are not made, pods without volumes, claims."""
    waiting = {name_of(each): phase(each) == "Pending" for each in (*scene.pods, *scene.claims)}
    begun = ("Pulling", "Pulled", "Created")
    waiting |= {about_of(event): False for event in scene.events if event.get("reason") in begun}
    missing = [name_of(job) for job in scene.jobs if _pods_missing(job, scene.pods)]
    found: dict[tuple[str, str], Cause] = {}  # the last of each kind
    for event in scene.events:
        about = about_of(event)
        cause = told("events", f"{event.get('reason')}: {event.get('message')}", about)
        of_missing = any(about == job or about.startswith(f"{job}-") for job in missing)
        if cause and (waiting.get(about, of_missing) or cause.reason == "LivenessProbe"):
            found[about, cause.reason] = cause
    yield from found.values()


def _pods_missing(job: Json, pods: list[Json]) -> bool:
    """True if the job has fewer pods than its manifest asks for."""
    spec = dig(job, "spec")
    wanted = sum(int(each.get("replicas") or 1) for each in dig(spec, "pytorchReplicaSpecs").values())
    return len(pods) < int(wanted or spec.get("parallelism") or dig(spec, "trainer").get("numNodes") or 1)


def _of_pod(pod: Json) -> Iterator[Cause]:
    name, status = name_of(pod), dig(pod, "status")
    said: list[tuple[str, str, str]] = []  # section, reason, message
    if status.get("reason"):
        said.append(("taken", status["reason"], status.get("message") or ""))
    for condition in status.get("conditions") or []:
        reason, message = str(condition.get("reason")), condition.get("message") or ""
        if condition.get("type") == "PodScheduled" and reason == "Unschedulable":
            said.append(("unscheduled", reason, message))
        if condition.get("type") == "DisruptionTarget" and not status.get("reason"):
            said.append(("taken", reason, message))
    for container in container_statuses(pod):
        waiting = dig(container, "state", "waiting")
        message = f"{container['name']}: {waiting.get('message') or ''}"
        said.append(("waiting", str(waiting.get("reason")), message))
    for section, reason, message in said:
        yield from filter(None, [told(section, f"{reason}: {message}", name, reason)])
    for container in container_statuses(pod):
        end = dig(container, "state", "terminated") or dig(container, "lastState", "terminated")
        if end.get("exitCode"):
            yield from _of_end(name, container["name"], end)


def _of_end(pod: str, container: str, end: Json) -> Iterator[Cause]:
    code, words = int(end["exitCode"]), " ".join(str(end.get("message") or "").split())
    said, reason = words.removeprefix(f"exit {code}: "), str(end.get("reason") or "Error")
    text = f"{reason}: exit code {code}" + (f": {said[-900:]}" if said else "")
    if cause := told("exits", text, pod, reason):
        # the last words of a foreign image may be about anything
        sure = cause.grade != CAUSE or reason == "OOMKilled" or (said and (said != words or code > 125))
        at = str(end.get("finishedAt") or "")
        yield replace(cause, text=f"{container} {cause.text}", grade=cause.grade if sure else BARE, at=at)


def _of_logs(scene: Scene) -> Iterator[Cause]:
    """Causes in the logs of pods that failed, the last of each first: one before it was survived."""
    ends = {name_of(pod): list(ends_of(pod)) for pod in scene.pods}
    alive = {name_of(pod) for pod in scene.pods if not has_failed(pod)}
    for pod in sorted({*scene.logs, *ends} - alive):
        # an image that is not ours may leave its last words in the termination message
        words = [line for end in ends.get(pod, []) for line in str(end.get("message") or "").splitlines()]
        at = next((str(end.get("finishedAt") or "") for end in reversed(ends.get(pod, []))), "")
        last: dict[str, Cause] = {}
        for line in [*scene.logs.get(pod, []), *words]:
            cause = told("logs", line, pod)
            if cause and not (cause.reason == "Exception" and REPEATED.search(line)):
                last.pop(cause.reason, None)
                last[cause.reason] = replace(cause, at=at, evidence=(line.strip()[:300],))
        yield from reversed(last.values())


def _of_timeouts(scene: Scene) -> Iterator[Cause]:
    """The rank without a word about the collective that timed out in all others."""
    waiting: dict[int, str] = {}
    ranks: set[int] = set()
    for line in (line for lines in scene.logs.values() for line in lines):
        if match := re.search(r"\[?[Rr]ank ?(\d+)\]?", line):
            ranks.add(int(match[1]))
            if "Watchdog caught collective operation timeout" in line:
                waiting[int(match[1])] = line.strip()[:300]
    silent = sorted(ranks - set(waiting))
    if waiting and len(silent) == 1:
        operation = re.search(r"OpType=(\w+)", next(iter(waiting.values())))
        place = operation[1] if operation else "a collective"
        others = ", ".join(map(str, sorted(waiting)))
        text = f"rank {silent[0]} did not come to {place}, in which rank {others} timed out"
        yield _rank_missing(text, *list(waiting.values())[:3])


def _rank_missing(text: str, *evidence: str) -> Cause:
    return Cause("", "RankMissing", text, "look at that rank's log and node", LIKELY, "", evidence)


def _of_folder(folder: Path) -> Iterator[Cause]:
    """Causes in a run's record and heartbeat."""
    record = record_of(folder)
    status, code = record.get("status"), record.get("exit_code")
    reason = str(record.get("reason") or "").strip()
    beat, lives = read_beat(folder), life(folder)
    seen = (f"{folder / 'run.json'}: status {status}, exit code {code}",)
    if status in ("oom", "error") and reason:
        fix = "a smaller batch or max_length, LoRA, or more GPUs" if status == "oom" else ""
        grade = SYMPTOM if code in (PREEMPTED, PEER_LOST) else CAUSE
        yield Cause("", str(status), reason, fix, grade, "", seen)
    elif status == "preempted":
        text = "it was stopped by SIGTERM after saving" + (f": {reason}" if reason else "")
        yield Cause("", "preempted", text, "start it again: it resumes", LIKELY, "", seen)
    elif status == "running" and beat:
        sign = (f"heartbeat of process {beat.pid}", *seen)
        if lives in ("dead", "silent"):
            silent_s = time.time() - beat.time
            text = f"no sign of life from {beat.host} for {silent_s:.0f} s, at step {beat.step}"
            fix = "look for an out-of-memory kill or a lost node there; started again, it resumes"
            yield Cause("", "died", text, fix, SYMPTOM, "", sign)
        elif time.time() - beat.step_at > HANGS_S:
            text = f"it hangs: no step after {beat.step} for {time.time() - beat.step_at:.0f} s"
            fix = "py-spy dump on each rank; NCCL's timeout writes a Flight Recorder dump"
            yield Cause("", "hangs", text, fix, SYMPTOM, "", sign)


def record_of(folder: Path) -> dict[str, object]:
    """The run's record, empty where there is none to be read."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
