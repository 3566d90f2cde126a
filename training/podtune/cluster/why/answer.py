"""One sentence about why a job does not run, or no longer does, and the evidence for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from podtune.cluster.job.manifest import name_of
from podtune.cluster.why.causes import HANGS_S, LIKELY, causes, of_failed_job, record_of
from podtune.cluster.why.scene import Scene
from podtune.cluster.why.state import has_failed, phase, state
from podtune.run.job_snapshot import Cause
from podtune.run.lock import life, read_beat

EVIDENCE = 6  # lines


@dataclass(frozen=True)
class Answer:
    """The sentence, the cause behind it (None where all is well), and what else was found."""

    schema: str
    subject: str
    sentence: str
    certain: bool
    cause: Cause | None
    evidence: list[str]
    others: list[Cause]


def explain(scene: Scene) -> Answer:
    """Find the cause that explains most, and say it."""
    subject = f"{scene.jobs[0]['kind']} {name_of(scene.jobs[0])}" if scene.jobs else scene.subject
    ended = [cause for job in scene.jobs for cause in of_failed_job(job, scene.pods)]
    # the earliest of the best grade: what came after it may follow from it
    found = sorted([*ended, *causes(scene)], key=lambda cause: (cause.grade, cause.at))
    well = _well(scene)
    if well == "succeeded" or (well and not found):
        return Answer("podtune.why/1", subject, f"{subject} {well}", True, None, [], found)
    if not found:
        sentence = f"{subject}: nothing here says why"
        return Answer("podtune.why/1", subject, sentence, False, None, _last_lines(scene, *scene.logs), [])
    cause, *others = found
    where = f"{cause.pod}: " if cause.pod and cause.pod != subject else ""
    certain = cause.grade <= LIKELY
    hedge = "" if certain else "no certain cause is seen here; nearest to it, "
    sentence = f"{subject} {_verb(scene)}: {hedge}{where}{cause.text}"
    evidence = list(cause.evidence) or _last_lines(scene, cause.pod)
    return Answer("podtune.why/1", subject, sentence, certain, cause, evidence, others)


def _well(scene: Scene) -> str:
    """The end of the sentence about a job that runs or has succeeded, or ""."""
    if scene.jobs:
        well = {"Succeeded": "succeeded", "Running": "runs, and nothing is wrong with its pods"}
        return well.get(state(scene.jobs[0], scene.pods)[0], "")
    if scene.pods and all(phase(pod) == "Succeeded" for pod in scene.pods):
        return "succeeded"
    if scene.folder:
        status, beat = record_of(scene.folder).get("status"), read_beat(scene.folder)
        if status == "running" and beat and life(scene.folder) == "alive":
            return f"runs, at step {beat.step}" if time.time() - beat.step_at <= HANGS_S else ""
        return "succeeded" if status == "ok" else ""
    return ""


def _verb(scene: Scene) -> str:
    condition = state(scene.jobs[0])[0] if scene.jobs else "Failed"
    if condition in ("Pending", "Created", "Suspended") and not any(map(has_failed, scene.pods)):
        return "does not start"
    return "failed" if condition == "Failed" else "does not run well"


def _last_lines(scene: Scene, *pods: str) -> list[str]:
    lines = [line for pod in pods for line in scene.logs.get(pod, []) if line.strip()]
    return lines[-EVIDENCE:]
