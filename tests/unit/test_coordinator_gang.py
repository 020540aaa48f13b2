"""The gang's state machine, with time as an argument."""

from __future__ import annotations

import itertools

import pytest
from gang_cases import ended, exits, gang_of, let_pass, raised

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, GangPhase, Heartbeat
from kinetic._core.outcome import Verdict, judge


def kinds(events) -> list[str]:
    return [e.kind for e in events]


# --- joining


def test_nobody_is_ready_before_everybody_has_joined():
    gang = gang_of(3, joined=False)
    for host in (2, 0):
        gang.join(host, "a", f"h{host}", 1.0)
        assert not any(gang.view(h).ready for h in range(3))
        assert gang.view(0).addresses == ()
    gang.join(1, "a", "h1", 2.0)
    assert all(gang.view(h).ready for h in range(3))
    assert gang.view(2).addresses == ("h0", "h1", "h2")
    assert kinds(gang.sweep(2.0)) == ["joined", "joined", "joined", "ready"]
    assert gang.phase is GangPhase.RUNNING


def test_joining_twice_is_joining_once():
    gang = gang_of(2, joined=False)
    gang.join(0, "a", "h0", 1.0)
    gang.join(0, "a", "h0", 2.0)
    assert not gang.ready
    assert gang.snapshot()["joined"] == 1
    assert gang.phase is GangPhase.JOINING


def test_a_second_agent_in_a_hosts_place_means_that_the_first_has_died():
    gang = gang_of(2)
    gang.join(1, "another", "h1", 3.0)
    assert gang.first_failure == (1,)
    assert gang.reports[0].exit is Exit.AGENT_LOST
    assert "restarted" in gang.stop_reason
    assert gang.view(0).stop_exit is Exit.STOPPED


def test_hosts_that_never_join_are_named_and_nothing_runs():
    gang = gang_of(8, joined=False, start_timeout_s=30.0)
    for host in (0, 1, 3, 4, 6, 7):
        gang.join(host, "a", "h", 1.0)
    gang.heartbeat(Heartbeat(5, Activity.PREPARING), 9.0)
    let_pass(gang, 1.0, 28.8, beating=(0, 1, 3, 4, 6, 7), state="waiting")
    assert gang.phase is GangPhase.JOINING
    gang.sweep(30.0)
    assert gang.first_failure == (2, 5)
    assert gang.stop_reason == "hosts 2, 5 of 8 did not join within 30 s"
    assert not gang.ready
    assert [(r.host, r.exit) for r in gang.reports] == [
        (2, Exit.NEVER_JOINED),
        (5, Exit.NEVER_JOINED),
    ]
    assert "nothing was heard" in gang.reports[0].detail
    assert "preparing" in gang.reports[1].detail
    assert gang.view(0).stop_exit is Exit.STOPPED
    assert not gang.finished
    for host in (0, 1, 3, 4, 6, 7):
        gang.report(ended(host, Exit.STOPPED), 30.5)
    assert gang.finished


@pytest.mark.parametrize("host", [0, 1])
def test_an_agent_that_dies_while_others_join_fails_the_gang_at_once(host):
    gang = gang_of(3, joined=False)
    gang.join(0, "a", "h0", 0.0)
    gang.mark_lost(host, "killed by SIGKILL", 1.0)
    assert gang.first_failure == (host,)
    assert gang.stop_reason == f"host {host} of 3: killed by SIGKILL"
    gang.report(ended(0, Exit.STOPPED), 1.1)
    assert gang.finished  # It waits for no host that never joined.


def test_a_host_that_falls_silent_while_others_join_is_lost():
    gang = gang_of(2, joined=False)
    gang.join(1, "a", "h1", 0.0)
    let_pass(gang, 0.0, 10.5)
    assert gang.first_failure == (1,)


def test_a_failed_preparation_stops_the_gang_before_it_starts():
    gang = gang_of(2, joined=False)
    gang.report(ended(1, Exit.SETUP_FAILED, detail="the bundle is damaged"), 1.0)
    assert (gang.finished, gang.ready) == (True, False)
    assert gang.stop_reason == "host 1 of 2: the bundle is damaged"
    gang.join(0, "a", "h0", 2.0)
    assert gang.view(0).stop
    assert not gang.view(0).ready


# --- ending well


def test_all_done_only_when_all_have_returned():
    gang = gang_of(2)
    gang.report(ended(0), 5.0)
    assert not gang.view(0).all_done
    gang.report(ended(1), 500.0)
    assert gang.view(0).all_done
    assert gang.finished
    assert gang.first_failure == ()
    assert kinds(gang.sweep(500.0))[-1] == "finished"


def test_a_host_that_dies_after_it_returned_fails_the_gang_while_others_run():
    gang = gang_of(2)
    gang.report(ended(0), 1.0)
    gang.mark_lost(0, "its agent died", 2.0)
    assert gang.first_failure == (0,)
    assert "had returned" in gang.stop_reason
    gang.report(ended(1, Exit.STOPPED), 3.0)
    assert exits(gang) == [Exit.AGENT_LOST, Exit.STOPPED]


def test_an_agent_that_ends_when_all_are_done_is_not_lost():
    gang = gang_of(1)
    gang.report(ended(0), 1.0)
    gang.mark_lost(0, "exited", 2.0)
    assert exits(gang) == [Exit.RETURNED]


# --- the first failure


def test_a_cause_stops_the_gang_at_once():
    gang = gang_of(4)
    gang.report(raised(2), 5.0)
    assert gang.first_failure == (2,)
    assert [gang.view(h).stop_exit for h in (0, 1, 3)] == [Exit.STOPPED] * 3
    assert gang.stop_reason == "host 2 of 4: ValueError: on 2"
    assert kinds(gang.sweep(5.0))[-3:] == ["report", "failure", "stop"]


def test_a_consequence_waits_for_its_cause():
    gang = gang_of(3)
    gang.report(raised(0, consequence=True), 5.0)
    gang.sweep(5.5)
    assert not gang.view(1).stop
    gang.report(ended(2, Exit.SIGNAL, signal=9, detail="killed by SIGKILL"), 5.9)
    assert gang.first_failure == (2,)


def test_a_host_that_aborts_waits_for_the_death_of_the_one_that_it_lost():
    gang = gang_of(3)
    gang.report(ended(1, Exit.SIGNAL, signal=6, detail="killed by SIGABRT"), 5.0)
    assert not gang.view(2).stop
    gang.report(ended(0, Exit.SIGNAL, signal=9, detail="killed by SIGKILL"), 5.1)
    assert gang.first_failure == (0,)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("late_s", [0.1, 2.0])
def test_hosts_that_jax_aborts_because_host_0_aborted_are_not_blamed(order, late_s):
    gang = gang_of(3, sees_deaths=True)
    for n, host in enumerate(order):
        now = 5.0 + late_s * n
        gang.sweep(now)
        how = f"killed by SIGABRT (peak memory {host} MiB)"
        gang.report(ended(host, Exit.SIGNAL, signal=6, detail=how, joined_jax=True), now)
    assert gang.first_failure == (0,)
    assert gang.stop_reason == "host 0 of 3: killed by SIGABRT (peak memory 0 MiB)"
    assert judge(3, gang.reports, now=9.0).blamed == (0,)


def test_hosts_that_abort_outside_of_jaxs_world_are_blamed_together():
    gang = gang_of(2)
    for host in (1, 0):
        gang.report(ended(host, Exit.SIGNAL, signal=6, detail="killed by SIGABRT"), 5.0)
    assert gang.first_failure == (1, 0)
    assert gang.stop_reason == "all 2 hosts: killed by SIGABRT"


def test_a_host_that_aborts_is_blamed_before_those_whose_collectives_it_broke():
    gang = gang_of(3)
    gang.report(raised(0, consequence=True), 5.0)
    gang.report(ended(1, Exit.SIGNAL, signal=6, detail="killed by SIGABRT"), 5.1)
    gang.report(raised(2, consequence=True), 5.2)
    assert gang.first_failure == (1,)


def test_a_consequence_is_blamed_when_everybody_else_is_alive():
    gang = gang_of(3)
    now = let_pass(gang, 0.0, 5.0, beating=(0, 1, 2))
    gang.report(raised(0, consequence=True), now)
    now = let_pass(gang, now, 1.1, beating=(1, 2))
    assert gang.first_failure == (0,)
    assert gang.phase is GangPhase.STOPPING


def test_a_host_that_is_silent_since_the_consequence_is_blamed_instead():
    gang = gang_of(3)
    now = let_pass(gang, 0.0, 5.0, beating=(0, 1, 2))
    gang.report(raised(0, consequence=True), now)
    now = let_pass(gang, now, 2.0, beating=(1,))
    assert gang.phase is GangPhase.RUNNING  # The gang waits for a sign of host 2.
    let_pass(gang, now, 1.5, beating=(1,))
    assert gang.first_failure == (2,)
    assert gang.reports[1].exit is Exit.AGENT_LOST


def test_when_all_complain_of_each_other_nobody_waits():
    gang = gang_of(2)
    gang.report(raised(1, consequence=True), 5.0)
    gang.report(raised(0, consequence=True), 5.1)
    assert gang.first_failure == (1, 0)
    assert gang.finished


def test_a_cause_that_comes_after_the_window_still_explains_the_consequence():
    gang = gang_of(3)
    gang.report(raised(0, consequence=True), 0.0)
    now = let_pass(gang, 0.0, 1.1, beating=(1, 2))
    assert gang.first_failure == (0,)
    version = gang.version
    gang.report(raised(1), now)
    assert gang.first_failure == (1,)
    assert gang.stop_reason == "host 1 of 3: ValueError: on 1"
    assert gang.version > version


def test_a_real_cause_replaces_lost_but_not_another_hosts_silence():
    gang = gang_of(3)
    gang.mark_lost(1, "gone", 1.0)
    gang.report(raised(2), 1.1)
    assert gang.first_failure == (1,)
    gang.report(ended(1, Exit.OUT_OF_MEMORY, detail="out of memory"), 1.2)
    assert gang.reports[0].exit is Exit.OUT_OF_MEMORY
    assert gang.stop_reason == "host 1 of 3: out of memory"


@pytest.mark.parametrize("second", [Exit.RETURNED, Exit.SIGNAL, Exit.STOPPED])
def test_the_first_report_of_a_host_counts(second):
    gang = gang_of(2)
    gang.report(raised(0), 1.0)
    gang.report(ended(0, second), 2.0)
    assert gang.reports[0].exit is Exit.RAISED


def test_a_silent_host_is_lost_after_the_heartbeat_timeout():
    gang = gang_of(4)
    let_pass(gang, 0.0, 9.9, beating=(0, 1, 3))
    assert gang.phase is GangPhase.RUNNING
    let_pass(gang, 9.9, 0.3)
    assert gang.first_failure == (2,)
    assert "fell silent" in gang.stop_reason


def test_the_longest_silence_comes_first():
    gang = gang_of(3)
    now = let_pass(gang, 0.0, 1.0, beating=(0, 2))
    now = let_pass(gang, now, 9.0, beating=(2,))
    gang.sweep(now + 1.9)  # The sweep comes late: both hosts have exceeded their time.
    assert gang.first_failure == (1, 0)


def test_a_frozen_coordinator_blames_nobody_for_its_own_sleep():
    gang = gang_of(2)
    now = let_pass(gang, 0.0, 5.0, beating=(0, 1))
    gang.sweep(now + 3600)
    assert gang.phase is GangPhase.RUNNING
    let_pass(gang, now + 3600, 9.0)
    assert gang.first_failure == (0, 1)  # The silence goes on counting.


def test_time_that_runs_backwards_stands_still():
    gang = gang_of(2, timeout_s=10.0)
    gang.sweep(5.0)
    gang.sweep(-1000.0)
    gang.heartbeat(Heartbeat(0, Activity.RUNNING), 1.0)
    assert gang.snapshot()["running_s"] == 5.0
    gang.sweep(10.0)
    assert gang.view(0).stop_exit is Exit.TIMEOUT


# --- stop


def test_the_timeout_counts_from_ready():
    gang = gang_of(1, joined=False, timeout_s=30.0, timeout="timeout of 60 s")
    gang.join(0, "a", "h", 100.0)
    now = let_pass(gang, 100.0, 29.0, beating=(0,))
    assert gang.phase is GangPhase.RUNNING
    gang.sweep(now + 1.0)
    assert gang.view(0).stop_exit is Exit.TIMEOUT
    assert gang.stop_reason == "the job ran longer than its timeout of 60 s"


@pytest.mark.parametrize("joined", [True, False])
def test_a_cancelled_gang_is_cancelled_even_if_its_agents_say_nothing(joined):
    gang = gang_of(3, joined=joined)
    gang.cancel("by ann", 1.0)
    assert gang.view(0).stop_exit is Exit.CANCELLED
    for step in range(200):
        gang.sweep(1.0 + step)
    assert gang.finished
    outcome = judge(3, gang.reports, blamed=gang.first_failure, reason=gang.stop_reason, now=0.0)
    assert outcome.verdict is Verdict.CANCELLED
    assert outcome.reason == "by ann"


def test_cancelling_a_stopped_gang_changes_nothing():
    gang = gang_of(2)
    gang.report(raised(0), 1.0)
    gang.cancel("late", 2.0)
    assert gang.view(1).stop_exit is Exit.STOPPED
    assert gang.first_failure == (0,)


def test_hosts_that_do_not_report_after_a_stop_are_given_up():
    gang = gang_of(2, grace_s=5.0)
    gang.report(raised(0), 1.0)
    now = let_pass(gang, 1.0, 14.9, beating=(1,))
    assert not gang.finished
    gang.sweep(now + 0.2)
    assert gang.finished
    assert gang.reports[1].exit is Exit.AGENT_LOST
    assert gang.first_failure == (0,)
