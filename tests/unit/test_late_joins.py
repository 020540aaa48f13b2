"""A gang of one host that joins after its function has begun, or never: stops, and limits of time,
which count from the function's start.
"""

from __future__ import annotations

import pytest
from gang_cases import ended, exits, gang_of, let_pass

from kinetic._core.exits import Exit
from kinetic._host.identity import ALONE_S, alone_s


def lone_gang(**limits):
    return gang_of(1, joined=False, joins_late=True, **limits)


def started_ago(gang, now):
    """Return the seconds since the function started, from the gang's events; None before that."""
    return next((e.ago_s for e in gang.sweep(now) if e.kind == "ready"), None)


def cancelled_at_once():
    gang = lone_gang(grace_s=5.0)
    gang.cancel("by ann", 0.3)
    return gang


@pytest.mark.parametrize(
    ("limit", "how"), [("timeout_s", Exit.TIMEOUT), ("budget_s", Exit.OVER_BUDGET)]
)
def test_limits_count_from_the_start_of_the_function(limit, how):
    gang = lone_gang(**{limit: 2.0})
    gang.join(0, "a", "h", 11.0, ran_s=0.9)
    assert started_ago(gang, 11.0) == 0.9
    gang.sweep(12.0)
    assert gang.view(0).stop_exit is None
    gang.sweep(12.2)
    assert gang.view(0).stop_exit is how


def test_a_host_that_ends_before_it_joins_has_run():
    gang = lone_gang()
    gang.report(ended(0, started_at=1000.0, ended_at=1000.75), 1.0)
    assert gang.finished
    assert started_ago(gang, 1.0) == 0.75


def test_a_host_that_ends_before_its_function_begins_has_not():
    gang = lone_gang()
    gang.report(ended(0, Exit.SETUP_FAILED, ended_at=1000.0), 1.0)
    assert gang.finished
    assert started_ago(gang, 1.0) is None


def test_a_stop_waits_for_a_function_that_may_have_begun():
    gang = cancelled_at_once()
    assert not gang.finished
    gang.join(0, "a", "h", 0.5, ran_s=0.4)
    assert gang.view(0).stop_exit is Exit.CANCELLED
    assert started_ago(gang, 0.5) == 0.4
    let_pass(gang, 0.5, 4.0, beating=(0,))
    gang.report(ended(0, Exit.CANCELLED, started_at=1000.0, ended_at=1004.4), 4.5)
    assert gang.finished
    assert gang.reports[0].ran_s == pytest.approx(4.4)


def test_a_function_that_begins_as_the_gang_stops_has_begun():
    gang = cancelled_at_once()
    gang.join(0, "a", "h", 0.5)
    assert started_ago(gang, 0.5) is None
    gang.report(ended(0, Exit.CANCELLED, started_at=1000.0, ended_at=1000.1), 1.0)
    assert gang.finished
    assert started_ago(gang, 1.0) == pytest.approx(0.1)


def test_a_stop_does_not_wait_for_a_host_that_prepares():
    gang = cancelled_at_once()
    gang.mark_connected(0, 0.5)  # A connected host begins only after it has joined.
    assert gang.finished
    assert "had not joined when the gang was stopped: by ann" in gang.reports[0].detail


def test_a_host_that_never_connects_is_given_up_after_a_stop():
    gang = cancelled_at_once()
    let_pass(gang, 0.3, 14.9)
    assert not gang.finished
    gang.sweep(15.4)
    assert exits(gang) == [Exit.CANCELLED]
    assert gang.finished


def test_a_limited_function_is_served_before_its_limit():
    assert alone_s(None) == alone_s(3600.0) == ALONE_S
    assert alone_s(lone_gang(timeout_s=8.0, budget_s=1.0).spec.shortest_s) == 0.5
