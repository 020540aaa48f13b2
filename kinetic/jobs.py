"""Public: find a job again, list jobs.

In: ids, settings. Out: `JobHandle`s.
"""

from __future__ import annotations

from typing import Any

from kinetic._client.handle import JobHandle
from kinetic._config import settings as configuration
from kinetic._core.tracebacks import own_frames_hidden
from kinetic._store import index
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic.job_status import JobStatus

__all__ = ["JobHandle", "JobStatus", "attach", "list_jobs"]


def attach(job_id: str, project: str | None = None, cluster: str | None = None) -> JobHandle[Any]:
    """Find a job again, from any process. The beginning of its id is enough.

    Raises:
        NotFound: no job has this id; `suggestions` has the nearest ids.
        UsageError: several ids begin like this.
    """
    with own_frames_hidden:
        store = _open_configured_store(project=project, cluster=cluster)
        return JobHandle(index.find(store, job_id), store=store)


def list_jobs(
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
) -> list[JobHandle[Any]]:
    """Return all jobs, newest first, including those that have ended. Damaged references are
    skipped with a warning."""
    store = _open_configured_store(project=project, zone=zone, cluster=cluster, namespace=namespace)
    return [JobHandle(ref, store=store) for ref in index.refs(store)]


def _open_configured_store(**flags: str | None) -> Store:
    return open_store(configuration.load(flags=flags).store)
