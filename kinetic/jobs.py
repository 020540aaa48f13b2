"""Public: find a job again, list jobs.

In: ids, settings. Out: `JobHandle`s.
"""

from __future__ import annotations

import logging
from typing import Any

from kinetic._client import elsewhere
from kinetic._client.handle import JobHandle
from kinetic._core.tracebacks import own_frames_hidden
from kinetic._store import index
from kinetic.errors import StoreError
from kinetic.job_status import JobStatus

_log = logging.getLogger("kinetic.jobs")

__all__ = ["JobHandle", "JobStatus", "attach", "list_jobs"]


def attach(job_id: str, project: str | None = None, cluster: str | None = None) -> JobHandle[Any]:
    """Find a job again, from any process. The beginning of its id is enough.

    Raises:
        NotFound: no job has this id; `suggestions` has the nearest ids.
        UsageError: several ids begin like this.
    """
    with own_frames_hidden:
        return elsewhere.find_in_stores(
            {"project": project, "cluster": cluster},
            lambda store: JobHandle[Any](index.find(store, job_id), store=store),
        )


def list_jobs(
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
) -> list[JobHandle[Any]]:
    """Return all jobs, newest first, including those that have ended. Damaged references are
    skipped with a warning, and clusters that do not answer."""
    flags = {"project": project, "zone": zone, "cluster": cluster, "namespace": namespace}
    store = elsewhere.open_configured(flags)
    found = [JobHandle[Any](ref, store=store) for ref in index.refs(store)]
    for other in map(elsewhere.open_configured, elsewhere.list_flags(flags)):
        try:
            found += [JobHandle[Any](ref, store=other) for ref in index.refs(other)]
        except StoreError as error:
            _log.warning("the jobs of a cluster that was used before are left out: %s", error)
    return sorted(found, key=lambda handle: handle.ref.created_at, reverse=True)
