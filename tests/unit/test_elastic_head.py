"""A head that replaces one that was lost: what it makes of the attempt that nobody has judged.

In: records as a lost head leaves them. Out: an attempt that has ended, or the failures so far.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from doubles.memory_store import MemoryStore
from manifest_cases import PLACE, planned

from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent, parse
from kinetic._core.exits import Exit
from kinetic._core.gang.picture import picture_of
from kinetic._core.options import Elastic
from kinetic._core.outcome import HostReport, Outcome, Verdict
from kinetic._host import leader
from kinetic._host.agent.identity import Identity
from kinetic._host.elastic_program import Head

PLAN = planned("cpu:2", slices=(1, 2), place=PLACE)
WHO = Identity(
    "memory://", PLAN.job_id, 0, 2, "", "t", "10.0.0.1", "scratch", role="head", is_pod=True
)


@pytest.fixture
def store():
    return MemoryStore()


def head(store, max_failures=5):
    return Head(WHO, PLAN, Elastic(1, 2, max_failures, 60.0), store)


def left(store, attempt, *reports, hosts=2):
    """What a head and its hosts leave of an attempt that runs."""
    event = GangEvent(EventKind.FORMED, hosts=tuple(range(hosts)), slices=(0, 1)[:hosts])
    leader.write_event(store, PLAN.job_id, attempt, event)
    for report in reports:
        key = layout.report(PLAN.job_id, attempt, report.host)
        store.put(key, json.dumps(report.to_json()).encode())


def test_the_first_head_begins(store):
    assert head(store)._judge_lost() is None
    assert head(store)._read_history() == (1, (), 0)


def test_an_attempt_that_was_left_is_a_failure_and_the_next_one_follows(store, monkeypatch):
    left(store, 1, HostReport(1, Exit.STOPPED, "The coordinator does not answer."))
    begun = []
    monkeypatch.setattr(Head, "_lead", lambda self, *told: begun.append(told))
    head(store)._attempt()
    ((attempt, (failure,), _),) = begun
    assert (attempt, failure.attempt, failure.slices) == (2, 1, ())
    assert failure.why == "the head, which led the job, was lost"


def test_an_attempt_that_was_left_has_its_times_and_its_end(store, monkeypatch):
    left(store, 1)
    leader.write_event(store, PLAN.job_id, 1, GangEvent(EventKind.READY))
    monkeypatch.setattr(Head, "_lead", lambda self, *told: None)
    head(store)._attempt()
    attempt = picture_of(parse(store.get(layout.events(PLAN.job_id))), 2).attempts[0]
    assert attempt.began_at <= attempt.ready_at <= attempt.ended_at
    assert attempt.verdict is Verdict.FAILED
    assert attempt.reason == "the head, which led the job, was lost"


def test_an_exception_that_nobody_has_told_ends_the_job(store):
    left(store, 1, HostReport(1, Exit.RAISED, "on purpose"), HostReport(0, Exit.STOPPED))
    outcome = head(store)._attempt().outcome
    assert outcome.verdict is Verdict.FAILED
    assert outcome.first.exit is Exit.RAISED


def test_a_value_that_nobody_has_told_is_the_jobs_also_of_fewer_hosts(store):
    lost = HostReport(1, Exit.AGENT_LOST, "killed")
    first = Outcome(Verdict.FAILED, (1,), "killed", (lost,), attempt=1)
    leader.repeat(store, PLAN.job_id, first)
    left(store, 2, HostReport(0, Exit.RETURNED, result_digest="00"), hosts=1)
    outcome = head(store)._attempt().outcome
    assert (outcome.ok, outcome.attempt) == (True, 2)


def test_one_too_many_ends_it_with_the_whole_history(store):
    lost = HostReport(1, Exit.AGENT_LOST, "killed")
    leader.repeat(store, PLAN.job_id, Outcome(Verdict.FAILED, (1,), "killed", (lost,), attempt=1))
    left(store, 2)
    outcome = head(store, max_failures=1)._attempt().outcome
    assert outcome.verdict is Verdict.FAILED
    assert "attempt 1: killed; attempt 2: the head, which led the job, was lost" in outcome.given_up


def test_retries_that_are_used_up_are_known_to_the_next_head(store, monkeypatch):
    raised = HostReport(0, Exit.RAISED, "on purpose")
    stopped = HostReport(1, Exit.STOPPED)
    first = Outcome(Verdict.FAILED, (0,), "on purpose", (raised, stopped), attempt=1)
    leader.repeat(store, PLAN.job_id, first)
    plan = replace(PLAN, options=replace(PLAN.options, retries=2))
    begun = []
    monkeypatch.setattr(Head, "_lead", lambda self, *told: begun.append(told))
    left(store, 2, HostReport(1, Exit.RAISED, "again"), HostReport(0, Exit.STOPPED))
    Head(WHO, plan, Elastic(1, 2, 0, 60.0), store)._attempt()
    assert begun == [(3, (), 0)]
    left(store, 3, HostReport(1, Exit.RAISED, "again"), HostReport(0, Exit.STOPPED))
    assert Head(WHO, plan, Elastic(1, 2, 0, 60.0), store)._attempt().outcome.attempt == 3
    assert len(begun) == 1


def test_room_that_was_made_counts_as_no_failure(store):
    gone = tuple(HostReport(h, Exit.LEFT) for h in range(2))
    leader.repeat(store, PLAN.job_id, Outcome(Verdict.FAILED, (), "left", gone, attempt=1))
    assert head(store)._read_history() == (2, (), 0)
