"""One sentence about why a job does not run, or no longer does, and the evidence for it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podtune.cluster.job.pytorchjob import INIT_CONTAINER
from podtune.cluster.live.diagnose import (
    CAUSE,
    LIKELY,
    SYMPTOM,
    PodProblem,
    container_statuses,
    held_back,
    in_a_queue,
    problems,
    state,
)
from podtune.cluster.live.kinds import name_of
from podtune.cluster.why.flight_recorder import missing_rank
from podtune.cluster.why.log_signs import read_signs
from podtune.cluster.why.scene import Scene
from podtune.run.lock import life, read_beat

Json = dict[str, Any]

EVIDENCE = 6  # lines
HANGS_S = 600.0  # without a step: longer than an evaluation or a save takes
#: events of a job whose pods the API server or its webhooks refuse -> what to do
REFUSALS = (
    (r"exceeded quota", "QuotaExceeded", "ask for less, or have the namespace's ResourceQuota raised"),
    (r"violates PodSecurity", "PodSecurity", "set podSecurityContext and securityContext as the level wants"),
    (r"serviceaccount .* not found", "NoServiceAccount", "create the ServiceAccount, or name another"),
    (
        r"admission webhook .* denied|is invalid|is forbidden",
        "Refused",
        "correct what it names: podtune lint FILE",
    ),
)
CLAIM_EVENTS = ("ProvisioningFailed", "FailedBinding")
#: conditions of a job that ended it
ENDS = (
    (
        r"DeadlineExceeded|longer than specified deadline",
        "DeadlineExceeded",
        LIKELY,
        "it ran into its deadline",
    ),
    (r"BackoffLimitExceeded|backoff limit", "BackoffLimit", SYMPTOM, "its pods failed too often"),
    (r"", "Failed", SYMPTOM, "it failed"),
)


@dataclass(frozen=True)
class Answer:
    """The sentence, the problem behind it (None where all is well), and what else was found."""

    schema: str
    subject: str
    sentence: str
    certain: bool
    cause: PodProblem | None
    evidence: list[str]
    others: list[PodProblem]


def explain(scene: Scene) -> Answer:
    """Find the problem that explains most, and say it."""
    found = sorted(_found(scene), key=lambda problem: (problem.grade, problem.at))
    well = _is_well(scene)
    if well and (not found or well == "succeeded"):
        return Answer("podtune.why/1", _subject(scene), f"{_subject(scene)} {well}", True, None, [], found)
    if not found:
        sentence = f"{_subject(scene)}: nothing here says why"
        last = [line for lines in scene.logs.values() for line in lines if line.strip()][-EVIDENCE:]
        return Answer("podtune.why/1", _subject(scene), sentence, False, None, last, [])
    cause, *others = found
    where = f"{cause.pod}: " if cause.pod and cause.pod != _subject(scene) else ""
    certain = cause.grade <= LIKELY
    hedge = "" if certain else "no certain cause is seen here; nearest to it, "
    sentence = f"{_subject(scene)} {_verb(scene)}: {hedge}{where}{cause.text}"
    evidence = list(cause.evidence) or _last_lines(scene, cause)
    return Answer("podtune.why/1", _subject(scene), sentence, certain, cause, evidence, others)


def _found(scene: Scene) -> Iterator[PodProblem]:
    if traced := missing_rank(scene.traces):
        ranks = ", ".join(str(trace.rank) for trace in scene.traces)
        seen = f"Flight Recorder's dumps of ranks {ranks}"
        yield PodProblem("", "RankMissing", traced, "look at that rank's log and node", LIKELY, "", (seen,))
    for job in scene.jobs:
        yield from _of_job(job, scene)
    yield from _of_claims(scene)
    yield from problems(scene.pods, scene.events)
    for pod in scene.pods:
        yield from _of_waiting(pod)
        for end in _ends(pod):  # a foreign image may leave its last words there
            scene.logs.setdefault(name_of(pod), []).extend(str(end.get("message") or "").splitlines())
    alive = {name_of(pod) for pod in scene.pods if not _has_failed(pod)}
    ended_at = {name_of(pod): str(end.get("finishedAt") or "") for pod in scene.pods for end in _ends(pod)}
    for pod_name, lines in scene.logs.items():
        if pod_name not in alive:
            yield from read_signs(pod_name, lines, ended_at.get(pod_name, ""))
    yield from _of_timeouts(scene)
    if scene.folder:
        yield from _of_folder(scene.folder)


def _ends(pod: Json) -> list[Json]:
    """The ends of the pod's containers, before a restart and now."""
    ends = [
        (status.get(when) or {}).get("terminated")
        for status in container_statuses(pod)
        for when in ("lastState", "state")
    ]
    return [end for end in ends if end]


def _has_failed(pod: Json) -> bool:
    failed = any(end.get("exitCode") for end in _ends(pod))
    return failed or (pod.get("status") or {}).get("phase") == "Failed"


def _pods_missing(job: Json, pods: list[Json]) -> bool:
    """True if the job has fewer pods than its manifest asks for."""
    spec = job.get("spec") or {}
    replicas = (spec.get("pytorchReplicaSpecs") or {}).values()
    wanted = sum(int(each.get("replicas") or 1) for each in replicas) or spec.get("parallelism")
    return len(pods) < int(wanted or (spec.get("trainer") or {}).get("numNodes") or 1)


def _of_job(job: Json, scene: Scene) -> Iterator[PodProblem]:
    name, (condition, message) = name_of(job), state(job)
    if in_a_queue(job):
        yield from held_back(job, scene.workloads)
    for event in scene.events:
        about = str((event.get("involvedObject") or {}).get("name") or "")
        ours = about == name or about.startswith(f"{name}-")
        if not ours or event.get("type") == "Normal" or not _pods_missing(job, scene.pods):
            continue
        said = " ".join(str(event.get("message")).split())
        for pattern, reason, fix in REFUSALS:
            if re.search(pattern, said) and re.search(r"Creat|Failed", str(event.get("reason"))):
                yield PodProblem(name, reason, f"its pods are refused: {said[:300]}", fix, CAUSE, "", (said,))
                break
    spec = job.get("spec") or {}
    suspended = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend")
    if suspended and not in_a_queue(job) and condition not in ("Succeeded", "Failed"):
        yield PodProblem(name, "Suspended", "it is suspended and names no queue", "set suspend: false")
    if condition == "Failed":
        reasons = " ".join(
            str(one.get("reason")) for one in (job.get("status") or {}).get("conditions") or []
        )
        _, reason, grade, text = next(end for end in ENDS if re.search(end[0], f"{reasons} {message}"))
        codes = {end.get("exitCode") for pod in scene.pods for end in _ends(pod)}
        if codes - {0, 130, 137, 143}:  # they failed by themselves before that
            grade = SYMPTOM
        yield PodProblem(name, reason, f"{text}: {message}" if message else text, "", grade)
    if "status" not in job and not scene.pods:
        yield from _of_manifest(job)


def _of_manifest(job: Json) -> Iterator[PodProblem]:
    """Errors of lint, of a job that no cluster has seen."""
    from podtune.cluster.lint.check import lint

    for finding in lint([("-", json.dumps(job, default=str))]).findings:
        if finding.severity == "error":
            text, seen = f"{finding.message} ({finding.code})", (finding.path,)
            yield PodProblem(name_of(job), finding.code, text, finding.fix, CAUSE, "", seen)


def _of_claims(scene: Scene) -> Iterator[PodProblem]:
    for claim in scene.claims:
        if (claim.get("status") or {}).get("phase") != "Pending":
            continue
        said = [
            " ".join(str(event.get("message")).split())
            for event in scene.events
            if (event.get("involvedObject") or {}).get("name") == name_of(claim)
            and event.get("reason") in CLAIM_EVENTS
        ]
        if said:
            fix = "kubectl get storageclass; name one that exists under persistence.*.storageClass"
            yield PodProblem(f"claim {name_of(claim)}", "ClaimPending", f"it is not bound: {said[-1]}", fix)


def _of_waiting(pod: Json) -> Iterator[PodProblem]:
    for status in container_statuses(pod):
        if status["name"] == INIT_CONTAINER and "running" in (status.get("state") or {}):
            text, fix = "it waits for the name of the master", "see the master's pod and its Service"
            yield PodProblem(name_of(pod), "WaitsForMaster", text, fix, SYMPTOM)


def _of_timeouts(scene: Scene) -> Iterator[PodProblem]:
    """The rank without a word about the collective that timed out in all others."""
    waiting: dict[int, str] = {}
    ranks: set[int] = set()
    for lines in scene.logs.values():
        for line in lines:
            if match := re.search(r"\[?[Rr]ank ?(\d+)\]?", line):
                ranks.add(int(match[1]))
                if "Watchdog caught collective operation timeout" in line:
                    waiting[int(match[1])] = line.strip()[:300]
    silent = sorted(ranks - set(waiting))
    if waiting and len(silent) == 1:
        operation = re.search(r"OpType=(\w+)", next(iter(waiting.values())))
        text = (
            f"rank {silent[0]} did not come to {operation[1] if operation else 'a collective'}, in which rank"
            f"{'s' * (len(waiting) > 1)} {', '.join(map(str, sorted(waiting)))} timed out"
        )
        seen = tuple(waiting.values())
        yield PodProblem("", "RankMissing", text, "look at that rank's log and node", LIKELY, "", seen[:3])


def _of_folder(folder: Path) -> Iterator[PodProblem]:
    record = _record(folder)
    status, code = record.get("status"), record.get("exit_code")
    reason = str(record.get("reason") or "").strip()
    beat, lives = read_beat(folder), life(folder)
    seen = (f"{folder / 'run.json'}: status {status}, exit code {code}",)
    if status in ("oom", "error") and reason:
        fix = "a smaller batch or max_length, LoRA, or more GPUs" if status == "oom" else ""
        grade = SYMPTOM if code in (143, 170) else CAUSE
        yield PodProblem("", str(status), reason, fix, grade, "", seen)
    elif status == "preempted":
        text = "it was stopped by SIGTERM after saving" + (f": {reason}" if reason else "")
        yield PodProblem("", "preempted", text, "start it again: it resumes", LIKELY, "", seen)
    elif status == "running" and beat and lives in ("dead", "silent"):
        text = f"its process on {beat.host} ended at step {beat.step} without a word, as from outside"
        fix = "look for an out-of-memory kill or a lost node there; started again, it resumes"
        if lives == "silent":
            text = (
                f"no sign of life from {beat.host} for {time.time() - beat.time:.0f} s, at step {beat.step}"
            )
        yield PodProblem("", "died", text, fix, SYMPTOM, "", (f"heartbeat of process {beat.pid}", *seen))
    elif status == "running" and beat and time.time() - beat.step_at > HANGS_S:
        text = f"it hangs: no step after {beat.step} for {time.time() - beat.step_at:.0f} s"
        fix = "py-spy dump on each rank; NCCL's timeout writes a Flight Recorder dump"
        yield PodProblem("", "hangs", text, fix, SYMPTOM, "", (f"heartbeat of process {beat.pid}",))


def _record(folder: Path) -> Json:
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _subject(scene: Scene) -> str:
    return f"{scene.jobs[0]['kind']} {name_of(scene.jobs[0])}" if scene.jobs else scene.subject


def _is_well(scene: Scene) -> str:
    """The end of the sentence about a job that runs or has succeeded, or ""."""
    if scene.jobs:
        condition = state(scene.jobs[0], scene.pods)[0]
        well = {"Succeeded": "succeeded", "Running": "runs, and nothing is wrong with its pods"}
        return well.get(condition, "")
    if scene.pods and all((pod.get("status") or {}).get("phase") == "Succeeded" for pod in scene.pods):
        return "succeeded"
    if scene.folder:
        status, beat = _record(scene.folder).get("status"), read_beat(scene.folder)
        if status == "ok":
            return "succeeded"
        if status == "running" and beat and life(scene.folder) == "alive":
            return f"runs, at step {beat.step}" if time.time() - beat.step_at <= HANGS_S else ""
    return ""


def _verb(scene: Scene) -> str:
    if scene.jobs:
        condition = state(scene.jobs[0])[0]
        if "status" not in scene.jobs[0] and not scene.pods:
            return "would not run"
        started = any(_has_failed(pod) for pod in scene.pods)
        if condition in ("Pending", "Created", "Suspended") and not started:
            return "does not start"
        return "failed" if condition == "Failed" else "does not run well"
    return "failed"


def _last_lines(scene: Scene, cause: PodProblem) -> list[str]:
    return [line for line in scene.logs.get(cause.pod, []) if line.strip()][-EVIDENCE:]
