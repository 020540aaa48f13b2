"""The names, labels and selectors of kinetic's objects in a cluster. Pure."""

from __future__ import annotations

from collections.abc import Collection

from kinetic._backends.kubernetes.observed import JOB_LABEL, Document, labels

_MANAGED_BY = "app.kubernetes.io/managed-by"


def workload_of(job_id: str) -> str:
    """Return the name of a job's workload, and of its Secret."""
    return f"kinetic-{job_id}"


def labels_of(job_id: str) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {"app": "kinetic", _MANAGED_BY: "kinetic", "job-id": job_id, JOB_LABEL: job_id}


def selector(job_ids: Collection[str]) -> str:
    """Return a label selector for the objects of one job. For several ids, return a selector for
    the objects of all jobs: a list of ids could be too long for a URL."""
    if len(job_ids) == 1:
        return f"{JOB_LABEL}={next(iter(job_ids))}"
    return f"{_MANAGED_BY}=kinetic"


def job_of(thing: Document) -> str:
    """Return the id of the job that an object belongs to, or ""."""
    return labels(thing).get(JOB_LABEL, "")
