"""The queue of a session's calls in the store.

A request is an object whose key says when the call was submitted; calls run in this order. The
request is deleted after the call has a verdict, so a leader that replaces a lost one finds the call
that was running.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from kinetic._core import events, layout
from kinetic._core.gang.formation import make_policy
from kinetic._core.gang.policy import AttemptPolicy
from kinetic._core.outcome import Outcome, Verdict, judge_leaderless
from kinetic._core.plan import Plan
from kinetic._core.session import CANCELLED_WAITING
from kinetic._core.values import dataclass
from kinetic._host.story import Story
from kinetic._store import attempts, index
from kinetic._store.base import Store
from kinetic._store.many import get_many
from kinetic._system import memory_folder
from kinetic.errors import CorruptRecord, UnsupportedVersion


@dataclass(frozen=True)
class Call:
    """A call that the leader has taken from the queue.

    Attributes:
        key: key of its request.
        plan: its plan.
        policy: the state of its attempts, which form on all slices of the session.
        story: its events.
    """

    key: str
    plan: Plan
    policy: AttemptPolicy
    story: Story

    @property
    def job_id(self) -> str:
        """Id of the call's job."""
        return self.plan.job_id


class CallQueue:
    """The calls that wait for a session. Every call that leaves the queue gets a verdict."""

    def __init__(self, store: Store, session_id: str) -> None:
        self._store = store
        self._prefix = layout.JobKeys(session_id).calls

    def take(self, hosts_per_slice: int) -> Call | None:
        """Return the first call that is to run, or None. On the way, write the verdicts of calls
        that were cancelled while they waited, and drop the requests of removed ones."""
        for key, job_id in self._list_requests():
            keys = layout.JobKeys(job_id)
            wanted = (keys.outcome, keys.cancellation, keys.plan, keys.events)
            records = get_many(self._store, wanted)
            if keys.outcome in records or keys.plan not in records:  # Ended, or removed.
                self._store.delete(key)
                continue
            if keys.cancellation in records:
                self._refuse(key, job_id, Verdict.CANCELLED, CANCELLED_WAITING)
                continue
            try:
                plan = Plan.read(records[keys.plan])
            except (CorruptRecord, UnsupportedVersion) as error:
                self._refuse(key, job_id, Verdict.FAILED, str(error))
                continue
            begun = events.parse(records.get(keys.events, b""))
            if (lost := self._judge_begun(plan, begun)) is not None:
                self._end(key, job_id, lost)
                continue
            policy = make_policy(plan)
            story = Story(self._store, job_id, policy, hosts_per_slice)
            story.resume(records.get(keys.events, b""))
            return Call(key, plan, policy, story)
        return None

    def _judge_begun(self, plan: Plan, begun: Sequence[events.GangEvent]) -> Outcome | None:
        """Return the outcome of a call whose function an earlier leader had started, by its events;
        None if it had not. The function must not run a second time."""
        if not any(event.kind is events.EventKind.READY for event in begun):
            return None
        number = attempts.find_newest(self._store, plan.job_id)
        reports = attempts.read_reports(self._store, plan.job_id, number, plan.hosts)
        return judge_leaderless(
            plan.hosts,
            reports,
            reason="it was replaced while the call ran",
            head=True,
            now=time.time(),
            attempt=number,
        )

    def is_cancelled(self, job_id: str) -> bool:
        """True if somebody has cancelled this call."""
        return self._store.has(layout.JobKeys(job_id).cancellation)

    def conclude(self, call: Call, outcome: Outcome) -> None:
        """Store the verdict on a call, unless its records were removed."""
        call.story.close()
        if self._store.has(layout.JobKeys(call.job_id).plan):
            index.write_outcome(self._store, call.job_id, outcome, if_absent=True)

    def remove(self, call: Call) -> None:
        """Remove a call that has a verdict from the queue."""
        self._store.delete(call.key)
        memory_folder.remove_unused(call.job_id)  # Hosts on other machines have their own.

    def close(self, reason: str) -> None:
        """Fail all calls that still wait, because the session has ended for this reason."""
        for key, job_id in self._list_requests():
            self._refuse(key, job_id, Verdict.FAILED, f"The call did not begin. {reason}")

    def _list_requests(self) -> Iterator[tuple[str, str]]:
        for key in sorted(self._store.list(self._prefix)):
            yield key, layout.JobKeys.call_id_of(key)

    def _refuse(self, key: str, job_id: str, verdict: Verdict, reason: str) -> None:
        self._end(key, job_id, Outcome(verdict, reason=reason, ended_at=time.time()))

    def _end(self, key: str, job_id: str, outcome: Outcome) -> None:
        index.write_outcome(self._store, job_id, outcome, if_absent=True)
        self._store.delete(key)
