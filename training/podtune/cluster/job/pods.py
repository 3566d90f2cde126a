"""The job of a manifest, of any of the three kinds, and its pods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podtune.cluster.job import indexed_job, pytorchjob, trainjob
from podtune.cluster.job.manifest import Json, Pod
from podtune.run.errors import DataError


def is_job(document: Json) -> bool:
    """True for a kind of job whose pods are known here."""
    return document.get("kind") in ("PyTorchJob", "TrainJob") or indexed_job.is_indexed(document)


def one_job(documents: Iterable[Json]) -> Json:
    """The only job among ``documents``.

    Raises:
        DataError: there is none, or several.
    """
    jobs = [document for document in documents if is_job(document)]
    if len(jobs) != 1:
        fix = "give one PyTorchJob, TrainJob or Indexed Job"
        raise DataError(f"{len(jobs)} jobs in the manifests", where="manifest", fix=fix)
    return jobs[0]


def pods_of(job: Json, documents: Sequence[Json]) -> list[Pod]:
    """The pods that the job's controller would create."""
    if job["kind"] == "Job":
        return indexed_job.pods(job)
    return trainjob.pods(job, documents) if job["kind"] == "TrainJob" else pytorchjob.pods(job)
