"""All that is known of a job: its objects, its pods' logs and its run's folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.why.flight_recorder import NAME, RankTrace, read_traces

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
        lists = {"Pod": self.pods, "Event": self.events, "PersistentVolumeClaim": self.claims}
        lists |= {"Workload": self.workloads, **dict.fromkeys(JOBS, self.jobs)}
        for each in objects:
            whole = all(isinstance(each.get(key) or {}, dict) for key in ("metadata", "spec", "status"))
            if whole and dig(each, "metadata").get("name") and each.get("kind") in lists:
                lists[each["kind"]].append(each)

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
        jobs = {name_of(job): replace(self, jobs=[job], pods=[], events=[], logs={}) for job in self.jobs}
        # those about a claim are everybody's
        events = [event for event in self.events if not _owner(about_of(event), jobs)]
        for name, job in jobs.items():
            job.pods = [pod for pod in self.pods if _owner(name_of(pod), jobs) == name]
            job.events = [*events, *(each for each in self.events if _owner(about_of(each), jobs) == name)]
            job.logs = {pod: lines for pod, lines in self.logs.items() if _owner(pod, jobs) == name}
        return list(jobs.values())


def about_of(event: Json) -> str:
    """The name of the object that the event is about."""
    return str(dig(event, "involvedObject").get("name") or "")


def _owner(name: str, jobs: Iterable[str]) -> str:
    """The job of a pod, event or log of that name; of `run` and `run-2` the longer one that fits."""
    fitting = [job for job in jobs if name == job or name.startswith(f"{job}-")]
    return max(fitting, key=len, default="")


def from_files(path: Path) -> Scene:
    """Read a folder, of a run or of what somebody saved, or one file: a log, or objects as YAML or JSON."""
    scene = Scene(str(path))
    files = [path]
    if path.is_dir():
        files = sorted(file for pattern in ("*", "*/*") for file in path.glob(pattern) if file.is_file())
        scene.folder = path if (path / "run.json").is_file() else None
    scene.traces = read_traces(files)
    # the YAML and JSON of a run's folder are the run's, not Kubernetes'
    suffixes = LOGS if scene.folder else (*LOGS, ".yaml", ".yml", ".json")
    for file in files:
        if (file == path or file.suffix in suffixes) and not NAME.search(file.name):
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
