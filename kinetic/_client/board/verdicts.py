"""The verdict on a job: read from the store, rebuilt from the hosts' reports if it is damaged, or
judged here if the leader died. The only module that judges orphaned jobs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from kinetic._backends import stored
from kinetic._backends.base import Backend, Explains, Status
from kinetic._core import events, layout
from kinetic._core.events import EventKind
from kinetic._core.exits import Exit, ProgramCode
from kinetic._core.outcome import (
    HostReport,
    Outcome,
    Verdict,
    judge,
    judge_leaderless,
    program_code,
)
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._core.session import ENDED_WAITING
from kinetic._core.state import JobStatus
from kinetic._store import attempts, index
from kinetic._store.base import Store
from kinetic._store.open import as_existing
from kinetic.errors import CorruptRecord, KineticError, NotFound, StoreError

_log = logging.getLogger("kinetic.following")
KNOWN_FOR_S = 3600.0
"""For this many seconds after a job's end, its backend may still know why a host was lost."""


def read_verdict(store: Store, ref: JobRef, now: float) -> Outcome | None:
    """Return the stored verdict, or None. Rebuild a damaged verdict from the hosts' reports."""
    try:
        return Outcome.read(store.get(layout.JobKeys(ref.job_id).outcome))
    except NotFound:
        return None
    except CorruptRecord as damage:
        _log.warning(
            "the stored outcome of %s is damaged, so it is computed again from the reports of the "
            "job's hosts. The error: %s",
            ref.job_id,
            damage,
        )
    rebuilt = _judge(store, ref, now)
    return (
        rebuilt
        if rebuilt.ok
        else replace(rebuilt, reason=f"{rebuilt.reason} (the stored outcome is damaged)")
    )


PlanOf = Callable[[JobRef], Plan | None]


def judge_orphan(
    store: Store, ref: JobRef, plan_of: PlanOf, status: Status, now: float
) -> Outcome | None:
    """Decide the verdict on a job whose leader died, and store it unless another process has stored
    one. Return the stored verdict. If the job was removed, write nothing and return None."""
    if not store.has(layout.JobKeys(ref.job_id).ref):
        return None
    outcome = _decide_orphan(store, ref, plan_of, status, now)
    # If another process is removing the job's folder, writing must not create it again.
    existing = as_existing(store)
    try:
        first = index.write_outcome(existing, ref.job_id, outcome, if_absent=True)
    except StoreError as error:
        if not store.has(layout.JobKeys(ref.job_id).ref):
            return None
        _log.warning(
            "the outcome of %s could not be stored; it is computed again when it is next needed. "
            "The error: %s",
            ref.job_id,
            error,
        )
        return outcome
    if not store.has(layout.JobKeys(ref.job_id).ref):
        store.delete(layout.JobKeys(ref.job_id).prefix)  # The job was removed while it was judged.
        return None
    return outcome if first else read_verdict(store, ref, now) or outcome


def _judge(store: Store, ref: JobRef, now: float, reason: str = "") -> Outcome:
    reports, attempt = _read_last_attempt(store, ref)
    # The newest file that hosts wrote is the best guess for an end that was not recorded.
    entries = store.entries(layout.JobKeys(ref.job_id).attempts)
    ended_at = min(max((entry.written_at for entry in entries), default=ref.created_at), now)
    return judge(ref.hosts, reports, reason=reason, now=ended_at, attempt=attempt)


def _read_last_attempt(store: Store, ref: JobRef) -> tuple[list[HostReport], int]:
    attempt = attempts.find_newest(store, ref.job_id)
    return attempts.read_reports(store, ref.job_id, attempt, ref.hosts), attempt


def _decide_orphan(
    store: Store, ref: JobRef, plan_of: PlanOf, status: Status, now: float
) -> Outcome:
    is_unknown = status.phase is JobStatus.NOT_FOUND
    if not is_unknown and ref.place.session and not stored.has_begun(store, ref):
        return Outcome(Verdict.FAILED, reason=ENDED_WAITING, ended_at=now)
    if not is_unknown and not ref.place.is_supervised:
        reports, attempt = _read_last_attempt(store, ref)
        verdict = judge_leaderless(
            ref.hosts,
            reports,
            backend_reports=[
                host.as_report() for host in status.hosts if host.phase is not JobStatus.RUNNING
            ],
            reason=status.reason,
            led=store.has(layout.JobKeys(ref.job_id).events),
            head=ref.has_head,
            now=now,
            attempt=attempt,
        )
        given_up = verdict.given_up and f"attempt {attempt}: {verdict.given_up}"
        return replace(verdict, reason=given_up or verdict.reason, given_up=given_up)
    reason = (
        "the job was never started: its submission was interrupted"
        if is_unknown
        else (ref.place.session and status.reason) or "the job's supervisor was killed"
    )
    outcome = replace(_judge(store, ref, now, reason), supervisor_lost=True)
    first = outcome.first
    if first is not None and program_code(first) is not ProgramCode.CODE_FAILED:
        plan = plan_of(ref)
        if plan is not None and plan.elastic_gang is not None:
            # Blame no host: a living supervisor would have begun a new attempt after the loss.
            outcome = replace(outcome, blamed=())
    if not (is_unknown or outcome.ok) and all(r.ok or r.exit.kind.hearsay for r in outcome.reports):
        stopped = [r for r in outcome.reports if r.exit is Exit.STOPPED and r.detail]
        # The first agent that gave up ended the supervisor, and so the others.
        first_why = min(stopped, key=lambda r: r.ended_at).detail if stopped else ""
        why = _read_stop(store, ref, outcome.attempt) or first_why
        outcome = replace(outcome, reason=why or reason)
    return outcome


def _read_stop(store: Store, ref: JobRef, attempt: int) -> str:
    """Return why the leader was stopping the attempt when it died; "" if it was not stopping it."""
    with contextlib.suppress(NotFound, CorruptRecord):
        for event in events.parse(store.get(layout.JobKeys(ref.job_id).events)):
            if event.kind is EventKind.STOP and event.attempt == attempt:
                return event.detail
    return ""


def release(backend: Backend, ref: JobRef) -> None:
    """Free the backend's resources of a job whose leader died, such as pods that wait for nodes."""
    if ref.place.is_supervised:
        return
    try:
        backend.cleanup(ref)
    except KineticError as error:
        _log.warning(
            "%s has ended, but its resources on the backend could not be freed; `kinetic jobs "
            "cleanup %s` tries again. The error: %s",
            ref.job_id,
            ref.job_id,
            error,
        )


def explain(backend: Backend, store: Store, ref: JobRef, outcome: Outcome, now: float) -> Outcome:
    """Return the verdict, completed with the backend's explanation of the first lost host. Store it
    for later callers, since the backend forgets the reason soon after a job's end."""
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
    if ref.has_head and not unready:
        return outcome  # The head has explained each loss; hosts' indices change between attempts.
    try:
        why = backend.why_unready(ref) if unready else backend.why_lost(ref, first.host)
    except KineticError:
        return outcome  # Leave it unexplained: a later caller may get an answer.
    if unready and not why:
        return outcome  # A later caller may get an explanation.
    explained = replace(outcome, explained=True)
    if why and not _contains(outcome.reason, why):
        explained = replace(explained, reason=f"{outcome.reason.rstrip('.')}. {why}")
    if why and not _contains(first.detail, why):
        explained = explained.add_detail(first.host, why)
    with contextlib.suppress(StoreError):
        index.write_outcome(store, ref.job_id, explained)
    return explained


def _contains(text: str, sentence: str) -> bool:
    """True if the text contains the sentence, whatever the case of its first letter."""
    return sentence.rstrip(".")[1:] in text
