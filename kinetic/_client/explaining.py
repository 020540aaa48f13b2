"""Why a host was lost or never came, according to its backend: asked once, stored with the verdict.

In: a verdict, a backend, a store. Out: the verdict with the reason. A backend's knowledge is gone
soon after a job's end: pods are removed, events are forgotten.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from kinetic._backends.base import Backend, Explains
from kinetic._core.exits import Exit
from kinetic._core.outcome import Outcome
from kinetic._core.ref import JobRef
from kinetic._store import index
from kinetic._store.base import Store
from kinetic.errors import KineticError, StoreError

KNOWN_FOR_S = 3600.0
"""After this time the backend is no longer asked."""


def explain_verdict(
    backend: Backend, store: Store, ref: JobRef, outcome: Outcome, now: float
) -> Outcome:
    """Return the verdict with what the backend knows of the host that was lost first, and store it.
    The first caller does this for all others."""
    first = outcome.first
    if outcome.explained or first is None:
        return outcome
    unready = first.exit is Exit.NEVER_JOINED
    if not (unready or first.exit.kind.hearsay):
        return outcome
    if ref.place.is_supervised or abs(now - outcome.ended_at) > KNOWN_FOR_S:
        return outcome
    if not isinstance(backend, Explains):
        return outcome
    if ref.place.has_head and not unready:
        return outcome  # The head has told of each loss; hosts have other numbers in each attempt.
    try:
        why = backend.why_unready(ref) if unready else backend.why_lost(ref, first.host)
    except KineticError:
        return outcome  # The next caller may learn it.
    if unready and not why:
        return outcome  # Another process may have seen it.
    told = replace(outcome, explained=True)
    if why and not _says(outcome.reason, why):
        told = replace(told, reason=f"{outcome.reason.rstrip('.')}. {why}")
    if why and not _says(first.detail, why):
        told = told.add_detail(first.host, why)
    with contextlib.suppress(StoreError):
        index.write_outcome(store, ref.job_id, told)
    return told


def _says(told: str, why: str) -> bool:
    """Whether a sentence is a part of what was told, perhaps with another first letter."""
    return why.rstrip(".")[1:] in told
