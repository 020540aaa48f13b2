"""Public: find a job again, list jobs.

In: ids, settings. Out: `JobHandle`s.
"""

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
    """Find a job again, from any process. The beginning of its id is enough.

    Raises:
        NotFound: no job has this id; `suggestions` has the nearest ids.
        UsageError: several ids begin like this.
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
    """Return all jobs, newest first, including those that have ended. Damaged references are
    skipped with a warning."""
    flags = {"project": project, "zone": zone, "cluster": cluster, "namespace": namespace}
    store = open_store(settings.load(flags=flags).store)
    return [JobHandle[Any](ref, store=store) for ref in index.refs(store)]
