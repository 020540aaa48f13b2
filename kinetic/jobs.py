"""Public: find a job again, list jobs.

In: ids, settings. Out: `JobHandle`s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from kinetic._client import elsewhere
from kinetic._client.handle import JobHandle
from kinetic._config import settings as configuration
from kinetic._core.tracebacks import own_frames_hidden
from kinetic._store import index
from kinetic._store.base import Store
from kinetic._store.open import open_store
from kinetic.errors import NotFound, StoreError
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
        flags = {"project": project, "cluster": cluster}
        store = _open_store(flags)
        try:
            return JobHandle(index.find(store, job_id), store=store)
        except NotFound:
            for other in map(_open_store, elsewhere.list_flags(flags)):
                with contextlib.suppress(NotFound, StoreError):
                    return JobHandle(index.find(other, job_id), store=other)
            raise


def list_jobs(
    project: str | None = None,
    zone: str | None = None,
    cluster: str | None = None,
    namespace: str | None = None,
) -> list[JobHandle[Any]]:
    """Return all jobs, newest first, including those that have ended. Damaged references are
    skipped with a warning, and clusters that do not answer."""
    flags = {"project": project, "zone": zone, "cluster": cluster, "namespace": namespace}
    store = _open_store(flags)
    found = [JobHandle[Any](ref, store=store) for ref in index.refs(store)]
    for other in map(_open_store, elsewhere.list_flags(flags)):
        try:
            found += [JobHandle[Any](ref, store=other) for ref in index.refs(other)]
        except StoreError as error:
            _log.warning("the jobs of a cluster that was used before are left out: %s", error)
    return sorted(found, key=lambda handle: handle.ref.created_at, reverse=True)


def _open_store(flags: Mapping[str, str | None]) -> Store:
    return open_store(configuration.load(flags=flags).store)
