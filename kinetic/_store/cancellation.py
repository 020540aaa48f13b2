"""The request to end a job that a cluster stops: `jobs/<job_id>/cancelled.json`.

Clusters stop pods for many reasons and never say which. The record says that somebody has cancelled
the job, so it must not outlive a cancellation that the cluster refused: the job would end as
cancelled at its next eviction. It is written before the cluster is asked, marked as agreed when the
cluster has taken the request, and removed if it has not.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from kinetic._core import layout, record
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound, StoreError

AGREED_WITHIN_S = 5.0
"""A cluster has stopped the pods of a job when the answer to its caller, and the record's second
version, may still be on their way."""
_POLL_S = 0.25
_REQUESTED, _AGREED = b'{"agreed": false}\n', b'{"agreed": true}\n'
_log = logging.getLogger("kinetic.following")


def request(store: Store, job_id: str, stop: Callable[[], object]) -> None:
    """Have a job stopped that has not ended, and record that this is a cancellation.

    If `stop` raises, the record is taken back. A job that has filled its store can be ended, too:
    then as one that was stopped from outside.
    """
    key = layout.JobKeys(job_id).cancellation
    try:
        if store.has(layout.JobKeys(job_id).outcome):
            return
        store.put(key, _REQUESTED, if_absent=True)
    except StoreError as error:
        _log.warning("%s is stopped; that it was cancelled is not kept: %s", job_id, error)
    try:
        stop()
    except BaseException:
        with contextlib.suppress(StoreError, NotFound):
            if store.get(key) == _REQUESTED:  # Nobody else's request was agreed to meanwhile.
                store.delete(key)
        raise
    with contextlib.suppress(StoreError):
        store.put(key, _AGREED)


def is_agreed(
    store: Store,
    job_id: str,
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """True if the job was cancelled and its cluster has taken the request; waits a moment for the
    answer to a request that is under way."""
    give_up_at = clock() + AGREED_WITHIN_S
    while True:
        try:
            if record.parse(store.get(layout.JobKeys(job_id).cancellation)).get("agreed"):
                return True
        except (NotFound, CorruptRecord):
            return False
        if clock() >= give_up_at:
            return False
        pause(_POLL_S)
