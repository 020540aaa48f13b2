"""Evictions of hosts by a cluster: which hosts are blamed, and which attempts do not count."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from doubles.memory_store import MemoryStore
from gang_cases import ended, exits, gang_of, let_pass, raised
from manifest_cases import planned

from kinetic._core import layout
from kinetic._core.events import EventKind
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import GangPhase
from kinetic._core.gang.policy import MOST_TAKEN_AWAY
from kinetic._core.outcome import judge, judge_leaderless
from kinetic._host import pod
from kinetic._store import attempts

WHY = "The cluster asked its pod to end."


def evicted(host: int):
    return ended(host, Exit.EVICTED, detail=WHY)


def test_a_host_that_is_taken_away_ends_the_gang_within_seconds():
    gang = gang_of(4)
    now = let_pass(gang, 0.0, 5.0, beating=range(4))
    gang.report(evicted(2), now)
    assert gang.phase is GangPhase.RUNNING  # Another host may have been lost before.
    let_pass(gang, now, 2.0, beating=(0, 1, 3))
    assert gang.first_failure == (2,)
    assert gang.stop_reason == f"host 2 of 4: {WHY}"
    assert gang.view(0).stop_exit is Exit.STOPPED


def test_of_hosts_that_are_all_taken_away_the_silent_one_is_to_blame():
    gang = gang_of(4)
    now = let_pass(gang, 0.0, 5.0, beating=range(4))
    for host in (0, 1, 3):
        gang.report(evicted(host), now + 0.5)
    let_pass(gang, now, 5.0)
    assert gang.first_failure == (2,)
    assert exits(gang) == [Exit.EVICTED, Exit.EVICTED, Exit.AGENT_LOST, Exit.EVICTED]


def test_a_host_that_never_joined_is_to_blame_before_those_that_were_stopped_with_it():
    gang = gang_of(2, joined=False)
    gang.join(0, "a", "", 0.5)
    now = let_pass(gang, 0.5, 2.0, beating=(0,))
    gang.report(evicted(0), now)
    let_pass(gang, now, 3.0)
    assert gang.first_failure == (1,)
    assert exits(gang) == [Exit.EVICTED, Exit.AGENT_LOST]
    assert "had not joined when the cluster asked the pod of host 0 to end" in gang.stop_reason


@pytest.mark.parametrize("slices", [(), (0, 1, 2)])
def test_hosts_that_are_there_are_not_to_blame_because_they_have_not_joined_yet(slices):
    gang = gang_of(3, joined=False, first_sign_s=60.0, slices=slices)
    gang.report(evicted(1), 0.5)
    let_pass(gang, 0.5, 3.0)
    assert gang.first_failure == (1,)
    assert exits(gang) == [Exit.STOPPED, Exit.EVICTED, Exit.STOPPED]


def test_hosts_that_are_all_taken_away_at_once_are_all_named():
    gang = gang_of(4)
    for host in range(4):
        gang.report(evicted(host), 1.0)
    assert gang.phase is GangPhase.FINISHED
    assert gang.stop_reason == f"all 4 hosts: {WHY}"


@pytest.mark.parametrize("says", [evicted, lambda host: replace(evicted(host), announced=True)])
def test_hosts_that_are_asked_to_end_after_one_is_gone_are_not_named(says):
    """The first evicted hosts alone are blamed: a Job deletes its other pods a second later."""
    gang = gang_of(4)
    now = let_pass(gang, 0.0, 5.0, beating=range(4))
    gang.report(says(2), now)
    gang.report(says(3), now + 0.2)
    gang.report(says(0), now + 0.9)
    let_pass(gang, now + 0.9, 2.0, beating=range(4))
    gang.report(evicted(0), now + 3.0)
    assert gang.first_failure == (2, 3)
    assert gang.stop_reason == f"hosts 2-3 of 4: {WHY}"


def test_a_broken_collective_after_an_eviction_is_not_blamed():
    gang = gang_of(4)
    now = let_pass(gang, 0.0, 5.0, beating=range(4))
    gang.report(raised(1, consequence=True), now)
    gang.report(evicted(2), now + 0.1)
    let_pass(gang, now, 3.0, beating=(0, 3))
    assert gang.first_failure == (2,)


def test_an_exception_is_blamed_before_an_eviction_at_the_same_time():
    gang = gang_of(4)
    gang.report(evicted(2), 1.0)
    gang.report(raised(1), 1.1)
    assert gang.first_failure == (1,)


@pytest.mark.parametrize("second", [Exit.EVICTED, Exit.STOPPED, Exit.RETURNED])
def test_a_second_report_of_an_evicted_host_changes_nothing(second):
    gang = gang_of(2)
    gang.report(evicted(1), 1.0)
    gang.report(ended(1, second), 1.5)
    let_pass(gang, 1.0, 3.0, beating=(0,))
    assert gang.first_failure == (1,)
    assert gang.reports[0].exit is Exit.EVICTED


def test_a_job_that_is_cancelled_meanwhile_is_cancelled():
    gang = gang_of(4)
    gang.report(evicted(2), 1.0)
    gang.cancel("The job was cancelled.", 1.2)
    for host in range(4):
        gang.report(ended(host, Exit.CANCELLED), 1.5)
    outcome = judge(4, gang.reports, blamed=gang.first_failure, reason=gang.stop_reason, now=2.0)
    assert outcome.verdict == "cancelled"


def test_a_leader_that_reported_its_own_eviction_is_blamed_for_it():
    outcome = judge_leaderless(1, [evicted(0)], now=1.0)
    assert (outcome.blamed, outcome.first.exit, outcome.first.detail) == ((0,), Exit.EVICTED, WHY)


def failed(store, attempt, how):
    outcome = judge(1, [ended(0, how)], now=1.0, attempt=attempt)
    store.put(layout.AttemptKeys("job-1", attempt).outcome, json.dumps(outcome.to_json()).encode())


@pytest.mark.parametrize(
    ("before", "retries", "taken_away", "follows"),
    [
        ([], 0, True, False),  # A job without retries gets none for evictions.
        ([], 1, False, True),
        ([Exit.SIGNAL], 1, False, False),
        ([Exit.SIGNAL], 1, True, True),
        ([Exit.EVICTED, Exit.EVICTED], 1, False, True),
        ([Exit.EVICTED, Exit.SIGNAL], 1, False, False),
        ([Exit.EVICTED, Exit.SIGNAL], 1, True, True),
        ([Exit.EVICTED, Exit.SIGNAL], 2, False, True),
        ([Exit.EVICTED] * MOST_TAKEN_AWAY, 1, True, False),
    ],
)
def test_what_the_cluster_takes_away_does_not_count(before, retries, taken_away, follows):
    store = MemoryStore()
    for attempt, how in enumerate(before, 1):
        failed(store, attempt, how)
    attempt, plan = len(before) + 1, planned("cpu", retries=retries)
    plan = replace(plan, job_id="job-1")
    how = Exit.EVICTED if taken_away else Exit.SIGNAL
    outcome = judge(1, [ended(0, how)], now=1.0, attempt=attempt)
    assert pod.read_policy(plan, store, attempt).may_repeat(outcome) is follows
    if not taken_away:
        assert attempts.may_follow(store, "job-1", attempt, retries) is follows


def test_hosts_that_had_to_end_because_another_one_failed_were_not_evicted():
    lost = ended(2, Exit.AGENT_LOST, detail="its connection broke")
    reports = [evicted(0), evicted(1), lost, evicted(3)]
    outcome = judge(4, reports, blamed=(2,), reason="host 2 of 4: its connection broke", now=1.0)
    excuse = "Its cluster asked it to end after host 2 had failed."
    assert [r.detail for r in outcome.reports] == [excuse, excuse, "its connection broke", excuse]
    assert exits_of(outcome) == [Exit.EVICTED, Exit.EVICTED, Exit.AGENT_LOST, Exit.EVICTED]
    leaderless = judge_leaderless(2, [evicted(1)], now=1.0)
    assert leaderless.reports[1].detail == "Its cluster asked it to end after host 0 had failed."
    both = judge(2, [evicted(0), evicted(1)], blamed=(1,), now=1.0)
    assert [r.detail for r in both.reports] == [WHY, WHY]


def exits_of(outcome):
    return [report.exit for report in outcome.reports]


# -- hosts that announce their end -----------------------------------------------------------------


def announced(host: int):
    return replace(evicted(host), announced=True)


def test_all_hosts_are_told_at_once_and_may_save():
    gang = gang_of(4)
    now = let_pass(gang, 0.0, 5.0, beating=range(4))
    assert not gang.view(0).preempted
    before = gang.version
    gang.report(announced(2), now)
    assert gang.version > before
    assert all(gang.view(host).preempted for host in range(4))
    assert not any(gang.view(host).stop or gang.view(host).all_done for host in range(4))


def test_the_gang_waits_for_the_host_that_is_taken_away():
    gang = gang_of(4)
    now = let_pass(gang, 0.0, 5.0, beating=range(4))
    gang.report(announced(2), now)
    for host in (0, 1, 3):
        gang.report(ended(host, Exit.STOPPED), now + 0.5)
    now = let_pass(gang, now, 2.5, beating=(2,))
    assert gang.phase is GangPhase.STOPPING
    assert gang.view(0).preempted, "host 2 still saves, and may need the process of host 0"
    gang.report(evicted(2), now)
    assert gang.phase is GangPhase.FINISHED
    assert not gang.view(0).preempted
    assert not gang.view(0).all_done
    assert gang.first_failure == (2,)
    assert exits(gang) == [Exit.STOPPED, Exit.STOPPED, Exit.EVICTED, Exit.STOPPED]


def test_a_host_that_announced_its_eviction_and_vanished_was_evicted():
    gang = gang_of(2)
    gang.report(announced(1), 1.0)
    gang.report(ended(0, Exit.STOPPED), 1.2)
    let_pass(gang, 1.0, 30.0)
    assert gang.phase is GangPhase.FINISHED
    assert exits(gang) == [Exit.STOPPED, Exit.EVICTED]
    assert gang.first_failure == (1,)


def test_an_eviction_announced_before_the_host_has_joined_ends_the_gang():
    gang = gang_of(2, joined=False)
    gang.join(0, "a", "", 0.5)
    gang.report(announced(1), 1.0)
    let_pass(gang, 1.0, 3.0, beating=(0,))
    gang.report(ended(0, Exit.STOPPED), 5.0)
    assert gang.phase is GangPhase.FINISHED
    assert gang.first_failure == (1,)


def test_repeated_announcements_of_an_eviction_are_one_event():
    gang = gang_of(2)
    for _ in range(3):
        gang.report(announced(1), 1.0)
    kinds = [event.kind for event in gang.sweep(1.1) if event.kind is EventKind.FAILURE]
    assert kinds == [EventKind.FAILURE]


def test_the_job_may_be_cancelled_while_hosts_save():
    gang = gang_of(2)
    gang.report(announced(1), 1.0)
    gang.cancel("The job was cancelled.", 1.2)
    assert gang.view(1).stop_exit is Exit.CANCELLED
    gang.report(ended(0, Exit.CANCELLED), 1.5)
    let_pass(gang, 1.5, 30.0)
    assert exits(gang) == [Exit.CANCELLED, Exit.CANCELLED]
