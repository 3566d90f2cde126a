"""All that is known of a job: its objects, its pods' logs and its run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from podtune.cluster.why.flight_recorder import NAME, RankTrace, read_traces

Json = dict[str, Any]

JOBS = ("PyTorchJob", "TrainJob", "Job", "JobSet", "MPIJob", "TFJob")
LAST_BYTES = 4 * 1024**2  # of a log; a job's end is in its last lines
LOGS = (".log", ".txt", ".out", ".err")
#: what kubectl logs --prefix and podtune logs --all put before a line
PREFIX = re.compile(r"^(?:\[pod/([\w.-]+)/[\w.-]+\]|([\w.-]+) \|) ")
STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) ")


@dataclass
class Scene:
    """A job as far as it can be seen."""

    subject: str
    jobs: list[Json] = field(default_factory=list)
    pods: list[Json] = field(default_factory=list)
    events: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    workloads: list[Json] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)  # by pod, or by the file
    folder: Path | None = None  # of a run: it has a run.json
    traces: list[RankTrace] = field(default_factory=list)

    def add_objects(self, objects: Iterable[Json]) -> None:
        """Sort objects of Kubernetes into their lists; those of other kinds are left out."""
        for each in objects:
            kind = str(each.get("kind") or "")
            parts = [each.get(key) or {} for key in ("metadata", "spec", "status")]
            if not all(isinstance(part, dict) for part in parts) or not parts[0].get("name"):
                continue
            lists = {"Pod": self.pods, "Event": self.events, "PersistentVolumeClaim": self.claims}
            target = {**lists, "Workload": self.workloads}.get(kind, self.jobs if kind in JOBS else None)
            if target is not None:
                target.append(each)

    def add_log(self, name: str, text: str) -> None:
        """Take up a log, of one pod or of several with their names before the lines."""
        for line in text[-LAST_BYTES:].splitlines():
            match = PREFIX.match(line)
            pod = (match[1] or match[2]) if match else name
            self.logs.setdefault(pod, []).append(STAMP.sub("", line[match.end() :] if match else line))

    def by_job(self) -> list[Scene]:
        """A scene for each job, by the names of pods, events and logs, which begin with the job's."""
        if len(self.jobs) < 2:
            return [self]
        names = sorted((str(job["metadata"]["name"]) for job in self.jobs), key=len, reverse=True)

        def owner(name: str) -> str:
            return next((job for job in names if name == job or name.startswith(f"{job}-")), "")

        def of(job: str, objects: list[Json]) -> list[Json]:
            return [each for each in objects if owner(str(each["metadata"]["name"])) == job]

        return [
            replace(
                self,
                jobs=[job],
                pods=of(name, self.pods),
                events=[
                    each
                    for each in self.events
                    if owner(str((each.get("involvedObject") or {}).get("name"))) in ("", name)
                ],
                logs={pod: lines for pod, lines in self.logs.items() if owner(pod) == name},
            )
            for job in self.jobs
            for name in [str(job["metadata"]["name"])]
        ]


def from_files(path: Path) -> Scene:
    """Read a folder, of a run or of what somebody saved, or one file: a log, or objects as YAML or JSON."""
    scene = Scene(str(path))
    files = [path]
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*") if file.is_file() and len(file.parts) <= len(path.parts) + 2
        )
        scene.folder = path if (path / "run.json").is_file() else None
    scene.traces = read_traces(files)
    for file in files:
        whole = not path.is_dir()
        if NAME.search(file.name) or (scene.folder and file.suffix not in LOGS):
            continue
        if whole or file.suffix in (*LOGS, ".yaml", ".yml", ".json"):
            _add_file(scene, file)
    return scene


def _add_file(scene: Scene, file: Path) -> None:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix not in LOGS and re.search(r"^\s*[\"']?kind[\"']?:", text, re.MULTILINE):
        from podtune.cluster.lint.documents import read

        documents, errors = read(text, str(file))
        if documents and not errors:
            scene.add_objects(document.content for document in documents)
            return
    scene.add_log(file.stem, text)
