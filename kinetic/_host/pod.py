"""A host that a cluster started, and may start again: the attempt that it belongs to.

In: an identity, the plan, a store. Out: the number of the attempt; None if the job has ended, so
that a finished function never runs again.

A cluster restarts pods without saying how the earlier ones ended. What they left in the store says
it: a verdict on the job means that it has ended; an attempt that has begun, and has no verdict,
lost its leader.
"""

from __future__ import annotations

import os
import signal
import time

from kinetic._core import events, layout
from kinetic._core.outcome import Outcome, judge_leaderless
from kinetic._core.plan import Plan
from kinetic._host import leader
from kinetic._host.agent.identity import Identity
from kinetic._host.leader import Attempt
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic.errors import CoordinatorLost, NotFound


def attempt_of(who: Identity, plan: Plan, store: Store) -> int | None:
    """Return the attempt that this pod begins (host 0) or joins (the others).

    Raises:
        CoordinatorLost: host 0 did not come up within the start timeout.
    """
    if store.has(layout.outcome(plan.job_id)):
        return None
    if who.host == 0:
        return _begin(plan, store)
    return _attempt_of_leader(who, plan.limits.start_timeout_s) if who.restarts else 1


def is_cancelled(store: Store, job_id: str) -> bool:
    """Whether somebody has cancelled the job; a cluster also stops pods for other reasons."""
    return store.has(layout.cancellation(job_id))


def _begin(plan: Plan, store: Store) -> int | None:
    number = attempts.newest(store, plan.job_id)
    if not _has_begun(plan, store, number):
        return number
    outcome = _outcome_of_lost(plan, store, number)
    leader.write_verdict(store, plan.job_id, outcome)
    attempt = Attempt(outcome)
    if not outcome.ok and attempt.may_repeat(plan, store):
        leader.repeat(store, plan.job_id, outcome)
        return number + 1
    leader.conclude(store, plan.job_id, attempt, plan)
    return None


def _has_begun(plan: Plan, store: Store, number: int) -> bool:
    return any(event.attempt == number for event in _read_events(plan, store))


def count_formed(plan: Plan, store: Store, number: int) -> int | None:
    """Return how many hosts this attempt of an elastic job was to have; None if no head has led
    it."""
    kind = events.EventKind.FORMED
    found = (e for e in _read_events(plan, store) if e.attempt == number and e.kind is kind)
    return next((len(event.hosts) for event in found), None)


def _read_events(plan: Plan, store: Store) -> list[events.GangEvent]:
    try:
        return events.parse(store.get(layout.events(plan.job_id)))
    except NotFound:
        return []


def _outcome_of_lost(plan: Plan, store: Store, number: int) -> Outcome:
    """The verdict on an attempt that lost its leader."""
    reports = attempts.reports(store, plan.job_id, number, plan.hosts)
    return judge_leaderless(plan.hosts, reports, now=time.time(), attempt=number)


def _attempt_of_leader(who: Identity, start_timeout_s: float) -> int:
    """Ask host 0, which knows from the store, and waits for this host."""
    from dataclasses import replace

    from kinetic._rpc.client import ControlClient

    give_up_at = time.monotonic() + start_timeout_s
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # Also for gRPC's threads.
    while True:
        if signal.SIGTERM in signal.sigpending():
            os._exit(128 + signal.SIGTERM)
        try:
            with ControlClient(replace(who.endpoint, attempt=0)) as client:
                return int(client.snapshot()["attempt"])
        except CoordinatorLost:
            if time.monotonic() >= give_up_at:
                raise
