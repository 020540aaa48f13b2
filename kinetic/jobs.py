"""Public: attach to a job by its id, list jobs."""

from __future__ import annotations

from typing import Any

from kinetic._client.handle import JobHandle
from kinetic._config import settings
from kinetic._core.tracebacks import hide_frames
from kinetic._store import index
from kinetic._store.open import open_store
from kinetic.job_status import JobStatus

__all__ = ["JobHandle", "JobStatus", "attach", "list_jobs"]


@hide_frames
def attach(job_id: str, project: str | None = None, cluster: str | None = None) -> JobHandle[Any]:
    """Return the handle of a job that this or any other process submitted.

    Args:
        job_id: The job's id; its first characters are enough if no other id starts with them.
        project: The project whose jobs to search, instead of the configured one.
        cluster: The cluster whose jobs to search, instead of the configured one.

    Raises:
        NotFound: No job has this id; `suggestions` has the nearest ids.
        UsageError: Several ids start with `job_id`.

    Example:
        ```python
        loss = kinetic.attach("job-1a2b3c4d").result()
        ```
    """
    chosen = settings.load(flags={"project": project, "cluster": cluster})
    store = open_store(chosen.store)
    return JobHandle[Any](index.find(store, job_id), store=store)


def list_jobs(
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
) -> list[JobHandle[Any]]:
    """Return the handles of all jobs in the store, newest first, including ended ones.

    `project`, `zone`, `cluster` and `namespace` replace the configured ones, and so decide which
    store is read. A job whose reference is damaged is skipped with a warning.

    Example:
        ```python
        running = [job for job in kinetic.list_jobs() if not job.status().ended]
        ```
    """
    flags = {"project": project, "zone": zone, "cluster": cluster, "namespace": namespace}
    store = open_store(settings.load(flags=flags).store)
    return [JobHandle[Any](ref, store=store) for ref in index.list_refs(store)]
