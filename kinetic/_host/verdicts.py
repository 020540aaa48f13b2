"""The leader's records in the store: events, the outcome of each attempt, the outcome of the job.

Each record is written once.
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
    """The end of one attempt.

    Attributes:
        outcome: outcome of the attempt.
        unwanted: the job was cancelled, perhaps too late to change the outcome.
        removed: the job's records were removed while it ran.
        needs_programs: another attempt follows once all programs of the job were started again.
    """

    outcome: Outcome
    unwanted: bool = False
    removed: bool = False
    needs_programs: bool = False

    @property
    def is_taken_away(self) -> bool:
        """True if the attempt ended because the cluster took a host away."""
        first = self.outcome.first
        return first is not None and first.exit is Exit.EVICTED

    def mark_given_up(self, reason: str) -> Attempt:
        """Return this attempt as the last one of a job that gives up for `reason`."""
        return replace(self, outcome=replace(self.outcome, reason=reason, given_up=reason))

    def mark_cancelled(self) -> Attempt:
        """Return this attempt as the last one of a job that was cancelled before the next one."""
        reason = f"{CANCELLED} {self.outcome.reason}"
        ended = replace(self.outcome, verdict=Verdict.CANCELLED, blamed=(), reason=reason)
        return replace(self, outcome=ended)


def judge_gang(gang: Gang) -> Outcome:
    """Return the outcome of an attempt whose gang has finished."""
    return judge(
        gang.spec.hosts,
        gang.reports,
        blamed=gang.first_failure,
        reason=gang.stop_reason,
        now=time.time(),
        attempt=gang.spec.attempt,
    )


def write_event(store: Store, job_id: str, attempt: int, event: GangEvent) -> None:
    """Append an event to the job's events."""
    with contextlib.closing(EventLog(store, layout.JobKeys(job_id).events)) as events:
        events.write(line_of(attempt, event))


def write_verdict(store: Store, job_id: str, outcome: Outcome) -> None:
    """Write the end event of an attempt on behalf of a leader that died before it could."""
    write_event(store, job_id, outcome.attempt, end_event(outcome))


def end_event(outcome: Outcome) -> GangEvent:
    """Return the event for the end of an attempt. The event has no verdict if the function has only
    made room for another gang (`has_left`)."""
    reason, blamed = outcome.reason, outcome.blamed
    verdict = None if has_left(outcome) else outcome.verdict
    return GangEvent(EventKind.ENDED, detail=reason, hosts=blamed, verdict=verdict)


def has_left(outcome: Outcome) -> bool:
    """True if, on all hosts, the function ended only so that the gang can form again."""
    departures = [report.exit is Exit.REFORMED for report in outcome.reports]
    return bool(departures) and all(departures)


def line_of(attempt: int, event: GangEvent) -> str:
    """Return the JSON line of an event that happened `event.ago_s` seconds before now."""
    at = time.time() - event.ago_s
    return json.dumps(event._replace(time=at, attempt=attempt).to_json()) + "\n"


def repeat(store: Store, job_id: str, outcome: Outcome) -> None:
    """Record that the attempt is repeated, on behalf of a leader that died before it could."""
    write_event(store, job_id, outcome.attempt, retry_event(outcome))
    write_outcome(store, job_id, outcome)


def retry_event(outcome: Outcome) -> GangEvent:
    """Return the event that says why another attempt follows."""
    return GangEvent(EventKind.RETRY, detail=outcome.reason)


def write_outcome(
    store: Store,
    job_id: str,
    outcome: Outcome,
    *,
    free_space: Callable[[], None] = lambda: None,
) -> None:
    """Write the outcome of an attempt that is repeated; the job is then in its next attempt. An
    outcome that is already stored stays: this leader may come back from a network partition."""
    key, data = layout.AttemptKeys(job_id, outcome.attempt).outcome, json.dumps(outcome.to_json())
    try:
        store.put(key, data.encode(), if_absent=True)
    except StoreFull:
        free_space()
        store.put(key, data.encode(), if_absent=True)


def conclude(store: Store, job_id: str, attempt: Attempt, plan: Plan | None) -> None:
    """Write the outcome of the job, its last record; clean up if the job's records were removed.
    A job without a supervisor may already have been judged from outside: that outcome stays."""
    if attempt.removed and not store.has(layout.JobKeys(job_id).plan):
        store.delete(layout.JobKeys(job_id).prefix)
        return
    if_absent = plan is not None and not plan.place.is_supervised
    index.write_outcome(store, job_id, attempt.outcome, if_absent=if_absent)
