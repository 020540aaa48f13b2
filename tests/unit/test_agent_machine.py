"""The agent's state machine: it takes the events of one attempt and returns acts in order."""

from __future__ import annotations

import pytest

from kinetic._core.agent import (
    LEAST_EXIT_S,
    ORPHAN_S,
    STOPPED_GRACE_S,
    SURVIVOR_GRACE_S,
    Act,
    AgentMachine,
    Eviction,
)
from kinetic._core.exits import Exit
from kinetic._core.gang.messages import Activity, HostView
from kinetic._core.outcome import HostReport

READY = HostView(ready=True)


def stopped(exit=Exit.STOPPED, **more):
    return HostView(ready=True, stop=True, stop_exit=exit, grace_s=5.0, **more)


def report(exit=Exit.RETURNED):
    return HostReport(0, exit)


def running(**options):
    """Return the machine of an agent whose worker has called the function."""
    machine = AgentMachine(**options)
    assert machine.on_prepared() == []
    assert machine.on_armed() == ([Act.START] if options.get("alone") else [])
    if not options.get("alone"):
        assert machine.on_ready(READY) == [Act.START]
    machine.on_called()
    return machine


def end(machine, exit=Exit.RETURNED, now=0.0, *, arrives=False):
    """Report the function's end to the agent's machine; return the acts that follow."""
    assert machine.on_end(returned=exit is Exit.RETURNED) == [Act.CONCLUDE]
    machine.note_report(report(exit), arrives=arrives)
    return machine.on_concluded(now)


# -- the function is called ------------------------------------------------------------------------


def test_the_function_is_called_once_when_the_worker_and_the_gang_are_ready():
    machine = AgentMachine()
    machine.on_prepared()
    assert machine.activity is Activity.WAITING
    assert machine.on_ready(READY) == []
    assert machine.on_armed() == [Act.START]
    assert machine.activity is Activity.STARTING
    assert machine.on_ready(READY) == []


@pytest.mark.parametrize("before", ["stop", "told", "failed"])
def test_it_is_not_called_after_a_stop(before):
    machine = AgentMachine()
    machine.on_prepared(failed=before == "failed")
    if before == "stop":
        assert machine.on_view(stopped(), 0.0) == [Act.KILL]
    if before == "told":
        machine.note_eviction(Eviction(is_known=True))
    assert machine.on_armed() == []
    assert machine.on_ready(READY) == []


# -- the function ends by itself -------------------------------------------------------------------


def test_a_host_that_returns_exits_when_all_have():
    machine = running()
    assert end(machine) == []
    machine.note_delivery()
    machine.settle()
    assert not machine.finished
    assert machine.on_view(HostView(ready=True, all_done=True, grace_s=1.0), 3.0) == [Act.EXIT]
    assert machine.nothing_follows
    assert machine.kill_at == 3.0 + LEAST_EXIT_S
    assert machine.on_death(has_end=True) == [Act.CONCLUDE]
    machine.settle()
    assert machine.finished


def test_an_exit_that_takes_too_long_is_cut_short_and_said():
    machine = running()
    end(machine)
    machine.on_view(HostView(ready=True, all_done=True, grace_s=9.0), 0.0)
    assert machine.tick(8.9) == []
    assert machine.tick(9.0) == [Act.SAY_LATE, Act.KILL]


def test_one_that_is_alone_exits_as_soon_as_its_report_is_stored():
    machine = running(alone=True)
    assert end(machine, arrives=True) == [Act.EXIT]
    machine.on_death(has_end=True)
    machine.settle()
    assert machine.finished


# -- the gang stops --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exit", "is_elastic", "grace_s"),
    [
        (Exit.CANCELLED, False, 5.0),
        (Exit.TIMEOUT, False, 5.0),
        (Exit.STOPPED, False, STOPPED_GRACE_S),
        (Exit.HANG, False, STOPPED_GRACE_S),
        (Exit.STOPPED, True, SURVIVOR_GRACE_S),
    ],
)
def test_a_function_that_runs_is_interrupted_and_killed_after_the_grace(exit, is_elastic, grace_s):
    machine = running(is_elastic=is_elastic)
    assert machine.on_view(stopped(exit), 10.0) == [Act.TERMINATE]
    assert machine.on_view(stopped(exit), 10.1) == [], "once"
    assert machine.tick(10.0 + grace_s) == [Act.KILL]


def test_a_worker_whose_function_has_ended_is_let_go():
    machine = running()
    end(machine)
    assert machine.on_view(stopped(), 0.0) == [Act.RUN_EXIT_HANDLERS], "once"
    assert machine.tick(STOPPED_GRACE_S) == [Act.KILL]


def test_a_function_that_ends_after_the_stop_is_let_go():
    machine = running()
    machine.on_view(stopped(), 0.0)
    assert end(machine, Exit.STOPPED) == [Act.RUN_EXIT_HANDLERS]


# -- the leader is lost ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_final", [True, False])
def test_a_host_whose_leader_is_gone_gives_up(is_final):
    machine = running()
    assert machine.on_lost(is_final=is_final) == [Act.REAP, Act.CONCLUDE]
    assert machine.finished
    assert machine.nothing_follows is is_final


def test_a_host_whose_program_is_gone_reports_first():
    machine = running()
    assert machine.on_program_gone(0.0) == [Act.REAP, Act.CONCLUDE]
    machine.note_reaped()
    machine.note_report(report(Exit.AGENT_LOST), arrives=False)
    machine.settle()
    assert not machine.finished
    machine.note_delivery()
    machine.settle()
    assert machine.finished


def test_a_host_whose_program_and_leader_are_gone_gives_up_soon():
    """Regression: the agent retried its report for ten seconds, although its slice was already free
    for other jobs. It must give up after `ORPHAN_S` seconds."""
    machine = running()
    machine.on_program_gone(5.0)
    assert machine.tick(5.0 + ORPHAN_S - 0.1) == []
    assert not machine.finished
    assert machine.tick(5.0 + ORPHAN_S) == [Act.REAP, Act.CONCLUDE]
    assert machine.finished


# -- the host is preempted -------------------------------------------------------------------------


def test_a_host_that_is_taken_away_says_so_and_goes_on_until_the_gang_stops():
    machine = running()
    assert machine.may_be_taken_away()
    machine.note_eviction(Eviction(is_known=True, is_ours=True, left_s=30.0))
    assert machine.on_taken_away(30.0, 0.0) == [Act.ANNOUNCE]
    assert not machine.may_be_taken_away()
    assert machine.on_view(stopped(preempted=True), 1.0) == [Act.TERMINATE]
    assert machine.kill_at == 31.0


def test_a_function_that_looks_is_not_interrupted():
    machine = running()
    machine.note_eviction(Eviction(is_known=True, function_polls=True, left_s=30.0))
    assert machine.on_view(stopped(preempted=True), 0.0) == []
    assert machine.tick(30.0) == [Act.KILL]


def test_hosts_that_save_together_stay_until_all_have():
    machine = running()
    machine.note_eviction(Eviction(is_known=True, saves_together=True, left_s=30.0))
    machine.on_view(stopped(preempted=True), 0.0)
    assert end(machine) == []
    assert machine.on_view(stopped(), 1.0) == [Act.RUN_EXIT_HANDLERS]


def test_a_slice_that_is_back_is_told_to_a_function_that_runs():
    machine = AgentMachine()
    machine.on_prepared()
    assert machine.on_view(HostView(reform_requested=True), 0.0) == []
    assert running().on_view(HostView(ready=True, reform_requested=True), 0.0) == [
        Act.REQUEST_REFORM
    ]
