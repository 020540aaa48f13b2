"""Find sessions by name. A session's name is a record in the store that holds the id of its job."""

from __future__ import annotations

import json
from contextlib import suppress

from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._store import index
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound


def find(store: Store, name: str) -> JobRef | None:
    """Return the job of the last session with this name; None if it was removed, or never was."""
    with suppress(NotFound, CorruptRecord, LookupError):
        job_id = record.parse(store.get(layout.session(name)))["job_id"]
        return index.find(store, str(job_id))
    return None


def claim(store: Store, name: str, job_id: str, ended: JobRef | None) -> bool:
    """Give a name to a new session; return False if another caller was quicker.

    Args:
        store: the store of the session.
        name: its name.
        job_id: id of its job.
        ended: the session that had the name and has ended; None for none.
    """
    if ended is not None or find(store, name) is None:
        store.delete(layout.session(name))
    return store.put(
        layout.session(name), json.dumps({"job_id": job_id}).encode() + b"\n", if_absent=True
    )


def release(store: Store, name: str) -> None:
    """Free the name of a session that could not be started."""
    store.delete(layout.session(name))


def list_sessions(store: Store) -> list[JobRef]:
    """Return the jobs of the sessions that have a name in this store, in the order of names."""
    names = sorted(
        key.rpartition("/")[2].removesuffix(".json") for key in store.list(layout.SESSIONS)
    )
    return [ref for name in names if (ref := find(store, name)) is not None]
