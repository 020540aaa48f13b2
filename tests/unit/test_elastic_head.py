"""The head (separate leader) of an elastic job is replaced and takes over the running attempt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from doubles.memory_store import MemoryStore
from manifest_cases import planned

from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent, parse
from kinetic._core.exits import Exit
from kinetic._core.gang.picture import picture_of
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._host import pod, verdicts

PLAN = planned("cpu:2", slices=(1, 2))


def plan_with(**options):
    return replace(PLAN, options=replace(PLAN.options, **options))


@pytest.fixture
def store():
    return MemoryStore()


def leave_attempt(store, attempt, *reports, hosts=2):
    """Write the records of an attempt that was running when its head was lost."""
    event = GangEvent(EventKind.FORMED, hosts=tuple(range(hosts)), slices=(0, 1)[:hosts])
    verdicts.write_event(store, PLAN.job_id, attempt, event)
    for report in reports:
        key = layout.HostKeys(PLAN.job_id, attempt, report.host).report
        store.put(key, json.dumps(report.to_json()).encode())


def test_the_first_head_begins(store):
    policy = pod.take_up(PLAN, store)
    assert (policy.attempt, policy.failures, policy.retries_left) == (1, (), 0)


def test_an_attempt_that_was_left_is_a_failure_and_the_next_one_follows(store):
    leave_attempt(store, 1, HostReport(1, Exit.STOPPED, "The coordinator does not answer."))
    policy = pod.take_up(PLAN, store)
    (failure,) = policy.failures
    assert (policy.attempt, failure.attempt, failure.slices) == (2, 1, ())
    assert failure.why == "the head, which led the job, was lost"


def test_an_attempt_that_was_left_has_its_times_and_its_end(store):
    leave_attempt(store, 1)
    verdicts.write_event(store, PLAN.job_id, 1, GangEvent(EventKind.READY))
    pod.take_up(PLAN, store)
    attempt = picture_of(parse(store.get(layout.JobKeys(PLAN.job_id).events)), 2).attempts[0]
    assert attempt.began_at <= attempt.ready_at <= attempt.ended_at
    assert attempt.verdict is Verdict.FAILED
    assert attempt.reason == "the head, which led the job, was lost"


def test_an_exception_reported_while_there_was_no_head_fails_the_job(store):
    leave_attempt(store, 1, HostReport(1, Exit.RAISED, "on purpose"), HostReport(0, Exit.STOPPED))
    outcome = pod.take_up(PLAN, store).outcome
    assert outcome.verdict is Verdict.FAILED
    assert outcome.first.exit is Exit.RAISED


def test_a_value_returned_while_there_was_no_head_is_the_value_of_the_job(store):
    lost = HostReport(1, Exit.AGENT_LOST, "killed")
    first = Outcome(Verdict.FAILED, (1,), "killed", (lost,), attempt=1)
    verdicts.repeat(store, PLAN.job_id, first)
    leave_attempt(store, 2, HostReport(0, Exit.RETURNED, result_digest="00"), hosts=1)
    outcome = pod.take_up(PLAN, store).outcome
    assert (outcome.ok, outcome.attempt) == (True, 2)


def test_the_loss_of_a_head_beyond_max_failures_ends_the_job_and_names_every_failure(store):
    lost = HostReport(1, Exit.AGENT_LOST, "killed")
    verdicts.repeat(store, PLAN.job_id, Outcome(Verdict.FAILED, (1,), "killed", (lost,), attempt=1))
    leave_attempt(store, 2)
    outcome = pod.take_up(plan_with(max_failures=1), store).outcome
    assert outcome.verdict is Verdict.FAILED
    assert "attempt 1: killed; attempt 2: the head, which led the job, was lost" in outcome.given_up


def test_retries_that_are_used_up_are_known_to_the_next_head(store):
    raised = HostReport(0, Exit.RAISED, "on purpose")
    stopped = HostReport(1, Exit.STOPPED)
    first = Outcome(Verdict.FAILED, (0,), "on purpose", (raised, stopped), attempt=1)
    verdicts.repeat(store, PLAN.job_id, first)
    plan = plan_with(retries=2, max_failures=0)
    leave_attempt(store, 2, HostReport(1, Exit.RAISED, "again"), HostReport(0, Exit.STOPPED))
    policy = pod.take_up(plan, store)
    assert (policy.attempt, policy.failures, policy.retries_left) == (3, (), 0)
    leave_attempt(store, 3, HostReport(1, Exit.RAISED, "again"), HostReport(0, Exit.STOPPED))
    assert pod.take_up(plan, store).outcome.attempt == 3


def test_room_that_was_made_counts_as_no_failure(store):
    reports = tuple(HostReport(h, Exit.REFORMED) for h in range(2))
    verdicts.repeat(store, PLAN.job_id, Outcome(Verdict.FAILED, (), "left", reports, attempt=1))
    policy = pod.take_up(PLAN, store)
    assert (policy.attempt, policy.failures) == (2, ())
