"""Find sessions by name. A session's name is a record in the store that holds the id of its job."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import NamedTuple

from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._core.state import STARTING_S
from kinetic._store import index
from kinetic._store.base import Store, Swaps, folder_of
from kinetic._system import locks
from kinetic.errors import CorruptRecord, NotFound


class Claim(NamedTuple):
    """The record of a session's name.

    Attributes:
        content: bytes of the record; b"" if the name is free.
        job_id: id of the session that has the name, or is about to start; "" if unknown.
        since: time of the claim, in seconds since the epoch.
    """

    content: bytes = b""
    job_id: str = ""
    since: float = 0.0


def find(store: Store, name: str) -> JobRef | None:
    """Return the last session with this name; None if there was none, or if its job was removed."""
    with suppress(NotFound, CorruptRecord, LookupError):
        job_id = record.parse(store.get(layout.session(name)))["job_id"]
        return index.find(store, str(job_id))
    return None


def read_claim(store: Store, name: str) -> Claim:
    """Return the record of a name."""
    try:
        content = store.get(layout.session(name))
    except NotFound:
        return Claim()
    with suppress(CorruptRecord, LookupError, TypeError, ValueError):
        document = record.parse(content)
        return Claim(content, str(document["job_id"]), float(document["since"]))
    return Claim(content)


def is_stopped(store: Store, job_id: str) -> bool:
    """True if a user has stopped this session: it takes no more calls, and its name is free."""
    return store.has(layout.JobKeys(job_id).cancellation)


def is_starting(store: Store, claim: Claim) -> bool:
    """True if another caller has just claimed a name, and its session has no reference yet."""
    is_new = abs(time.time() - claim.since) < STARTING_S
    return is_new and not store.has(layout.JobKeys(claim.job_id).ref)


def claim(store: Store, name: str, job_id: str, before: Claim) -> bool:
    """Give a name to a new session, and return True. Change nothing and return False if another
    caller has changed the name's record since `before` was read.

    Args:
        store: the store of the session.
        name: name of the session.
        job_id: id of the session's job.
        before: the record as it was read: that of a session that has ended, or an empty one.
    """
    content = json.dumps({"job_id": job_id, "since": time.time()}).encode() + b"\n"
    if not before.content:
        return store.put(layout.session(name), content, if_absent=True)
    return _swap(store, layout.session(name), before.content, content)


def release(store: Store, name: str, job_id: str) -> None:
    """Free the name of a session that could not be started."""
    if read_claim(store, name).job_id == job_id:
        store.delete(layout.session(name))


def _swap(store: Store, key: str, old: bytes, new: bytes) -> bool:
    """Write `new` if the content of the key is `old`; return whether this call wrote."""
    if (root := folder_of(store)) is None:
        assert isinstance(store, Swaps)
        return store.swap(key, old, new)
    folder = os.open(root / layout.SESSIONS, os.O_RDONLY | os.O_CLOEXEC)
    try:
        locks.hold(folder)
        with suppress(NotFound):
            return store.get(key) == old and store.put(key, new)
        return False
    finally:
        os.close(folder)
