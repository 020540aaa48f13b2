"""The record of a cancellation: `jobs/<job_id>/cancelled.json`.

Clusters stop pods for many reasons and never say which. This record says that a user cancelled the
job. It is written before the cluster is asked to stop the job, and marked as agreed once the
cluster has accepted. If the cluster refuses, the record is removed: otherwise the job would count
as cancelled when the cluster next evicts its pods.
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
"""The longest wait for the mark, in seconds: the cluster may stop a job's pods before the process
that cancelled the job gets the cluster's answer and writes the mark."""
_POLL_S = 0.25
_REQUESTED, _AGREED = b'{"agreed": false}\n', b'{"agreed": true}\n'
_log = logging.getLogger("kinetic.following")


def request(store: Store, job_id: str, stop: Callable[[], object]) -> None:
    """Stop a job that has not ended by calling `stop`, and record that this is a cancellation.

    The record is removed if `stop` raises. If the store is full the job is stopped all the same,
    but it does not end as cancelled.
    """
    key = layout.JobKeys(job_id).cancellation
    try:
        if store.has(layout.JobKeys(job_id).outcome):
            return
        store.put(key, _REQUESTED, if_absent=True)
    except StoreError as error:
        _log.warning(
            "%s is stopped, but this could not be recorded, so it may be listed as failed instead "
            "of cancelled. The error: %s",
            job_id,
            error,
        )
    try:
        stop()
    except BaseException:
        with contextlib.suppress(StoreError, NotFound):
            if store.get(key) == _REQUESTED:  # Keep the mark if another caller's request succeeded.
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
    """True if the job was cancelled and its cluster has accepted the request. Waits up to
    `AGREED_WITHIN_S` for the answer to a request that is under way."""
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
