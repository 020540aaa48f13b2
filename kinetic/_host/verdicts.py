"""What the leader of a job leaves in the store: events, the outcome of each attempt and of the job.

In: what has happened in an attempt. Out: records, each written once.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace

from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang
from kinetic._core.outcome import Outcome, Verdict, judge
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass
from kinetic._store import index
from kinetic._store.base import Store
from kinetic._store.event_log import EventLog
from kinetic.errors import StoreFull

CANCELLED = "The job was cancelled before its next attempt. The last one:"


@dataclass(frozen=True)
class Attempt:
    """How one attempt ended.

    Attributes:
        outcome: its verdict.
        unwanted: the job was cancelled, perhaps too late to change the verdict.
        removed: the job's records were removed while it ran.
        needs_programs: another attempt follows once all programs of the job were started again.
    """

    outcome: Outcome
    unwanted: bool = False
    removed: bool = False
    needs_programs: bool = False

    @property
    def is_taken_away(self) -> bool:
        """Whether it ended because the cluster took a host away."""
        first = self.outcome.first
        return first is not None and first.exit is Exit.EVICTED

    def mark_given_up(self, reason: str) -> Attempt:
        """The same attempt, of a job that goes on no more."""
        return replace(self, outcome=replace(self.outcome, reason=reason, given_up=reason))

    def mark_cancelled(self) -> Attempt:
        """The same attempt, of a job that was cancelled before the next one."""
        reason = f"{CANCELLED} {self.outcome.reason}"
        ended = replace(self.outcome, verdict=Verdict.CANCELLED, blamed=(), reason=reason)
        return replace(self, outcome=ended)


def judge_gang(gang: Gang) -> Outcome:
    """Return the verdict on an attempt whose gang has finished."""
    return judge(
        gang.spec.hosts,
        gang.reports,
        blamed=gang.first_failure,
        reason=gang.stop_reason,
        now=time.time(),
        attempt=gang.spec.attempt,
    )


def write_event(store: Store, job_id: str, attempt: int, event: GangEvent) -> None:
    """Add to the job's events."""
    with contextlib.closing(EventLog(store, layout.JobKeys(job_id).events)) as events:
        events.write(line_of(attempt, event))


def write_verdict(store: Store, job_id: str, outcome: Outcome) -> None:
    """Add to the events of a job how an attempt has ended, for a leader that could not."""
    write_event(store, job_id, outcome.attempt, end_event(outcome))


def end_event(outcome: Outcome) -> GangEvent:
    """Return the event that tells how an attempt has ended: without a verdict where the function
    has left, to make room."""
    reason, blamed = outcome.reason, outcome.blamed
    verdict = None if has_left(outcome) else outcome.verdict
    return GangEvent(EventKind.ENDED, detail=reason, hosts=blamed, verdict=verdict)


def has_left(outcome: Outcome) -> bool:
    """Whether the function has left on all hosts, to make room."""
    departures = [report.exit is Exit.LEFT for report in outcome.reports]
    return bool(departures) and all(departures)


def line_of(attempt: int, event: GangEvent) -> str:
    """Return the line of an event that happens now, or has happened `ago_s` before."""
    at = time.time() - event.ago_s
    return json.dumps(event._replace(time=at, attempt=attempt).to_json()) + "\n"


def repeat(store: Store, job_id: str, outcome: Outcome) -> None:
    """Have another attempt follow one that has ended like this, for a leader that could not."""
    write_event(store, job_id, outcome.attempt, retry_event(outcome))
    write_outcome(store, job_id, outcome)


def retry_event(outcome: Outcome) -> GangEvent:
    """Return the event that tells why another attempt follows."""
    return GangEvent(EventKind.RETRY, detail=outcome.reason)


def write_outcome(
    store: Store,
    job_id: str,
    outcome: Outcome,
    *,
    free_space: Callable[[], None] = lambda: None,
) -> None:
    """Write the outcome of an attempt that is repeated; from then on the job is in the next one.
    Another leader's outcome stands: this one may come back from a network partition."""
    key, data = layout.AttemptKeys(job_id, outcome.attempt).outcome, json.dumps(outcome.to_json())
    try:
        store.put(key, data.encode(), if_absent=True)
    except StoreFull:
        free_space()
        store.put(key, data.encode(), if_absent=True)


def conclude(store: Store, job_id: str, attempt: Attempt, plan: Plan | None) -> None:
    """Write the outcome, the last record of a job; clean up after a job whose records were removed.
    Without a supervisor, a process that saw the job's end from outside may have judged it before:
    that verdict stands."""
    if attempt.removed and not store.has(layout.JobKeys(job_id).plan):
        store.delete(layout.JobKeys(job_id).prefix)
        return
    if_absent = plan is not None and not plan.place.is_supervised
    index.write_outcome(store, job_id, attempt.outcome, if_absent=if_absent)
