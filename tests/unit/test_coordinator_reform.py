"""A gang whose function returns early, so that a slice that is back can join the next attempt."""

from __future__ import annotations

from gang_cases import ended, exits, gang_of

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import GangPhase


def test_hosts_are_told_once_that_there_should_be_room():
    gang = gang_of(2)
    before = gang.version
    assert not gang.view(0).reform_requested
    gang.request_reform()
    gang.request_reform()
    assert gang.version == before + 1
    assert gang.view(0).reform_requested
    assert gang.view(1).reform_requested


def test_only_a_gang_that_runs_is_told():
    gang = gang_of(2, joined=False)
    gang.request_reform()
    assert not gang.view(0).reform_requested


def test_a_gang_whose_function_has_left_everywhere_is_over_without_a_failure():
    gang = gang_of(2)
    gang.report(ended(0, Exit.REFORMED), 1.0)
    assert gang.phase is GangPhase.RUNNING
    gang.report(ended(1, Exit.REFORMED), 1.0)
    assert gang.finished
    assert (gang.first_failure, exits(gang)) == ((), [Exit.REFORMED] * 2)
    assert gang.view(0).stop
    assert not gang.view(0).all_done


def test_a_host_that_dies_after_another_has_left_is_to_blame():
    gang = gang_of(3)
    gang.report(ended(0, Exit.REFORMED), 1.0)
    gang.mark_lost(1, "killed", 1.0)
    gang.report(ended(2, Exit.STOPPED), 1.5)
    assert gang.finished
    assert gang.first_failure == (1,)
