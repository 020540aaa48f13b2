"""What a verdict comes to for the caller: the leader's value, or the exception to raise.

In: a store, a reference, the outcome. Out: a value, an exception. Called by handle.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

from kinetic.errors import CorruptRecord, NotFound, ResultUnavailable
from kinetic.job import paths
from kinetic.job.failure import Evidence, exception_of
from kinetic.job.outcome import Exit, Outcome
from kinetic.job.ref import JobRef
from kinetic.storage.base import Store

_log = logging.getLogger("kinetic.collecting")


def value(store: Store, ref: JobRef, outcome: Outcome) -> Any:
    """Return what the leader returned. Nothing is unpickled that is not what the leader wrote.

    Raises:
        ResultUnavailable: it was removed, or cannot be rebuilt here.
        CorruptRecord: it was changed.
    """
    from kinetic.packaging import payload

    try:
        data = store.get(paths.result(ref.job_id))
    except NotFound as error:
        raise ResultUnavailable(
            f"{ref.job_id} succeeded, but its value was removed from the store.", job_id=ref.job_id
        ) from error
    if hashlib.sha256(data).hexdigest() != outcome.result_digest:
        raise CorruptRecord(
            f"The stored value of {ref.job_id} is not what the leader wrote; it was not unpickled. Run the job again."
        )
    try:
        return payload.unpack_value(data)
    except ResultUnavailable as error:
        raise ResultUnavailable(f"{ref.display_name} ({ref.job_id}): {error}", job_id=ref.job_id) from error.__cause__


def error(store: Store, ref: JobRef, outcome: Outcome, last_lines: Callable[[int], str]) -> BaseException:
    """Return what to raise for a job that failed: the function's own exception, where it can be rebuilt here.

    Args:
        store: where the job's records are.
        ref: the job.
        outcome: its verdict.
        last_lines: gives the last lines that a host printed.
    """
    first = outcome.first
    if first is None:
        return exception_of(Evidence(ref.job_id, ref.display_name, outcome))
    evidence = Evidence(
        ref.job_id,
        ref.display_name,
        outcome,
        original=_original(store, ref, first.error.key) if first.error is not None and first.error.key else None,
        tail=last_lines(first.host),
        stacks=_stacks(outcome) if first.exit is Exit.HANG else "",
    )
    return exception_of(evidence)


def _original(store: Store, ref: JobRef, key: str) -> BaseException | None:
    from kinetic.packaging import payload

    try:
        return payload.unpack_exception(store.get(key))
    except Exception as problem:  # noqa: BLE001 - unpickling runs the user's code; the text of the error is still there
        _log.info("the exception of %s cannot be rebuilt here: %s", ref.job_id, problem)
        return None


def _stacks(outcome: Outcome) -> str:
    from kinetic.coordinator.blame import summarize_groups

    stacks = {r.host: r.stacks for r in outcome.reports if r.stacks or r.exit is Exit.HANG}
    return summarize_groups(stacks, outcome.blamed) if stacks else ""
