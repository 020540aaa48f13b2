"""The policy of elastic jobs: the slices with which a job continues, and when the job is given up.
Tests use tables and random orders of events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._core.exits import Exit
from kinetic._core.gang.policy import (
    MOST_FAULTS,
    READY_S,
    AttemptPolicy,
    Failure,
    Form,
    GiveUp,
    Loss,
    Restart,
    SliceState,
    loss_of,
    name_attempt,
)
from kinetic._core.options import Elastic
from kinetic._core.outcome import HostReport, RemoteError, judge

DIED = "host 2 of 4: the worker process was killed by SIGKILL"


def elasticity(least=1, most=3, failures=5, timeout=60.0, shrinks=False):
    rules = Elastic(least, most, failures, timeout, shrinks=shrinks)
    return AttemptPolicy(rules)


def lost(machine, *slices, now=0.0):
    """Report that these slices were lost; all other missing slices become ready at once."""
    machine.note_failure(Loss(slices, DIED), now)
    for index in machine.missing:
        if index not in slices:
            machine.note_ready(index)


# -- what counts as a loss -------------------------------------------------------------------------


def ended(*exits, error=None, blamed=()):
    reports = [HostReport(host, exit, error=error) for host, exit in enumerate(exits)]
    return judge(len(exits), reports, blamed=blamed, reason="why\nmore", now=1.0)


ECHO = RemoteError("JaxRuntimeError", "gloo: connection closed", "", consequence=True)
OWN = RemoteError("ValueError", "no", "")
STOPPED, RAISED = Exit.STOPPED, Exit.RAISED
FAILED = ended(RAISED, STOPPED, error=OWN, blamed=(0,))


@pytest.mark.parametrize(
    ("outcome", "slices"),
    [
        (ended(STOPPED, STOPPED, Exit.SIGNAL, STOPPED), (5,)),
        (ended(Exit.AGENT_LOST, STOPPED, STOPPED, STOPPED), (2,)),
        (ended(Exit.OUT_OF_MEMORY, STOPPED, STOPPED, Exit.SIGNAL), (2, 5)),
        (ended(Exit.OS_EXIT, Exit.OS_EXIT, STOPPED, STOPPED), (2,)),
        (ended(Exit.EVICTED, STOPPED, STOPPED, STOPPED), (2,)),
        (ended(STOPPED, STOPPED, STOPPED, Exit.NEVER_JOINED), (5,)),
        (ended(STOPPED, STOPPED, Exit.HANG, STOPPED, blamed=(2,)), (5,)),
        (ended(*[Exit.HANG] * 4, blamed=(0, 1, 2, 3)), ()),
        (ended(STOPPED, Exit.HANG, STOPPED, Exit.HANG, blamed=(1, 3)), ()),
        (ended(*[Exit.NEVER_JOINED] * 4, blamed=(0, 1, 2, 3)), None),
        (ended(RAISED, STOPPED, STOPPED, STOPPED, error=OWN), None),
        (ended(RAISED, STOPPED, Exit.SIGNAL, STOPPED, error=OWN, blamed=(0,)), None),
        (ended(RAISED, RAISED, RAISED, RAISED, error=ECHO), ()),
        (ended(Exit.RETURNED, RAISED, RAISED, RAISED, error=ECHO), None),
        (ended(*[Exit.CANCELLED] * 4), None),
        (ended(*[Exit.TIMEOUT] * 4), None),
        (ended(Exit.SYS_EXIT, STOPPED, STOPPED, STOPPED), None),
        (ended(Exit.SETUP_FAILED, STOPPED, STOPPED, STOPPED), None),
        (ended(*[Exit.RETURNED] * 4), None),
    ],
)
def test_outcomes_that_count_as_the_loss_of_slices(outcome, slices):
    loss = loss_of(outcome, (2, 5))
    assert (None if loss is None else loss.slices) == slices
    assert loss is None or loss.why == "why"


def test_hosts_that_abort_because_they_lost_their_leader_are_not_lost():
    died = HostReport(0, Exit.SIGNAL, signal=9)
    echo = HostReport(1, Exit.SIGNAL, signal=6)
    assert loss_of(judge(2, [died, echo], now=1.0), (0, 1)) == Loss((0,), "host 0: signal")
    both = [HostReport(0, Exit.SIGNAL, signal=6), echo]
    assert loss_of(judge(2, both, now=1.0), (0, 1)) == Loss((0, 1), "host 0: signal")
    both = [replace(report, joined_jax=True) for report in both]
    assert loss_of(judge(2, both, now=1.0), (0, 1)) == Loss((0,), "host 0: signal")


# -- waiting ---------------------------------------------------------------------------------------


def test_a_waiting_job_forms_when_its_lost_slice_is_back():
    machine = elasticity()
    lost(machine, 1)
    assert machine.decide(0.0) == Restart((1,))
    assert machine.decide(59.0) is None
    assert machine.missing == (1,)
    machine.note_ready(1)
    assert machine.decide(59.5) == Form((0, 1, 2))
    assert (machine.attempt, machine.forming) == (2, False)


@pytest.mark.parametrize(("least", "decision"), [(2, Form((0, 2))), (3, None)])
def test_after_slice_timeout_a_waiting_job_forms_with_enough_slices_or_gives_up(least, decision):
    machine = elasticity(least=least)
    lost(machine, 1)
    machine.decide(0.0)
    choice = machine.decide(60.0)
    if decision is not None:
        assert choice == decision
    else:
        assert choice == GiveUp(
            "Given up: slice 1 did not return within 60 s (slice_timeout). The job has 2 slices "
            f"and needs 3. attempt 1: slice 1 lost: {DIED}."
        )


def test_a_job_does_not_form_before_the_hosts_of_its_living_slices_are_ready():
    machine = elasticity(shrinks=True)
    machine.note_failure(Loss((1,), DIED), 0.0)
    machine.note_ready(0)
    assert machine.decide(0.0) == Restart((1,))
    assert machine.decide(1.0) is None
    machine.note_ready(2)
    assert machine.decide(1.0) == Form((0, 2))


def test_hosts_that_never_come_back_are_lost_in_the_end():
    machine = elasticity(shrinks=True)
    machine.note_failure(Loss((1,), DIED), 0.0)
    machine.note_ready(0)
    machine.decide(0.0)
    assert machine.decide(READY_S - 1.0) is None
    assert machine.decide(READY_S) == Form((0,))
    assert [failure.slices for failure in machine.failures] == [(1,), (2,)]


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "may"),
    [
        (ended(RAISED, STOPPED, STOPPED, STOPPED, error=OWN), True),
        (ended(Exit.SYS_EXIT, STOPPED), True),
        (ended(*[Exit.HANG] * 4, blamed=(0, 1, 2, 3)), True),
        (ended(Exit.SETUP_FAILED, STOPPED), False),
        (ended(Exit.RESULT_UNPICKLABLE, Exit.RETURNED), False),
        (ended(*[Exit.CANCELLED] * 2), False),
        (ended(*[Exit.TIMEOUT] * 2), False),
        (ended(*[Exit.RETURNED] * 2), False),
    ],
)
def test_which_failures_may_be_repeated(outcome, may):
    rules = Elastic(1, 2, 0, 60.0)
    assert AttemptPolicy(rules, retries=1).may_repeat(outcome) is may
    assert not AttemptPolicy(rules, retries=0).may_repeat(outcome)


def test_a_retry_waits_for_no_slice_and_counts_against_no_failures():
    machine = AttemptPolicy(Elastic(1, 3, 1, 60.0), retries=2)
    lost(machine, 1)
    assert machine.decide(0.0) == Restart((1,))
    assert machine.decide(60.0) == Form((0, 2))
    for retries_left in (1, 0):
        machine.note_repeat(FAILED, (), 61.0)
        assert machine.decide(61.0) is None, "hosts get ready"
        for index in (0, 2):
            machine.note_ready(index)
        assert machine.decide(61.0) == Form((0, 2))
        assert machine.retries_left == retries_left
    lost(machine, 0, now=62.0)
    assert isinstance(machine.decide(62.0), GiveUp)


# -- hosts that cannot be started ------------------------------------------------------------------


def test_hosts_that_cannot_be_started_end_the_job_in_the_third_time():
    machine = elasticity(failures=0, most=2)
    for error in ("no process", "no memory", "no disk"):
        machine.lose_slice(1, "its agent ended", 0.0, counts=False)
        machine.note_departure(0.0)
        machine.note_failed_start(1, error, 0.0)
    decision = machine.decide(0.0)
    assert (machine.failures, len(machine.faults)) == ((), MOST_FAULTS)
    assert isinstance(decision, GiveUp)
    assert "kinetic's own processes failed 3 times, which is no fault" in decision.reason
    assert "attempt 1: the hosts of slice 1 could not be started: no process" in decision.reason


def test_hosts_that_cannot_be_started_are_a_fault_only_while_the_job_waits_for_them():
    machine = elasticity(shrinks=True)
    lost(machine, 1)
    assert machine.decide(0.0) == Form((0, 2))
    now = 0.0
    for _ in range(10):
        assert machine.decide(now) == Restart((1,))
        machine.note_failed_start(1, "no process", now)
        now += 60
    assert machine.faults == ()
    lost(machine, 0, now=now)
    machine.note_failed_start(0, "no process", now)
    assert len(machine.faults) == len(machine.failures) - 1 == 1


@pytest.mark.parametrize("is_fixed", [False, True])
def test_hosts_that_cannot_be_started_end_only_a_job_that_needs_them(is_fixed):
    machine = AttemptPolicy.make_fixed(2, retries=1) if is_fixed else elasticity(most=2)
    if is_fixed:
        machine.note_repeat(FAILED, (0, 1), 0.0)
    else:
        lost(machine, 1)
    for now in range(59):
        if isinstance(machine.decide(float(now)), Restart):
            machine.note_failed_start(1, "no process", now)
            machine.note_failed_start(1, "no process", now)
    assert len(machine.faults) == (4 if is_fixed else 1)
    decision = machine.decide(60.0)
    assert isinstance(decision, GiveUp) if is_fixed else decision == Form((0,))


# -- shrinking and growing -------------------------------------------------------------------------


def test_a_shrinking_job_forms_at_once_and_grows_when_the_slice_is_back():
    machine = elasticity(shrinks=True)
    lost(machine, 0)
    assert machine.decide(0.0) == Form((1, 2)), "also without the first slice"
    assert machine.decide(0.0) == Restart((0,)), "it is started again meanwhile"
    assert not machine.could_grow
    machine.note_ready(0)
    assert machine.could_grow
    machine.note_departure(5.0)
    for index in (1, 2):
        machine.note_ready(index)
    assert machine.decide(5.0) == Form((0, 1, 2))
    assert (machine.attempt, len(machine.failures)) == (3, 1)


def test_a_waiting_job_grows_by_one_slice_without_the_other_lost_ones():
    machine = elasticity()
    lost(machine, 0, 1)
    assert machine.decide(0.0) == Restart((0, 1))
    assert machine.decide(60.0) == Form((2,))
    machine.note_ready(1)
    machine.note_departure(61.0)
    assert machine.decide(61.0) is None, "the hosts of slice 2 are coming"
    machine.note_ready(2)
    assert machine.decide(61.0) == Form((1, 2))


def test_a_job_never_forms_with_fewer_slices_than_its_least():
    machine = elasticity(least=2, most=3, shrinks=True)
    lost(machine, 0, 1)
    machine.decide(0.0)
    assert machine.decide(59.0) is None
    machine.note_ready(1)
    assert machine.decide(59.0) == Form((1, 2))
    lost(machine, 1, 2, now=60.0)
    machine.decide(60.0)
    assert isinstance(machine.decide(120.0), GiveUp)


def test_a_slice_that_is_lost_while_it_waits_does_not_count_but_is_started_later_and_later():
    machine = elasticity(shrinks=True)
    lost(machine, 2)
    assert machine.decide(0.0) == Form((0, 1))
    starts, now = [], 0.0
    while now < 10.0:
        if machine.decide(now) == Restart((2,)):
            starts.append(now)
            machine.lose_slice(2, "killed again", now)
        now += 0.25
    assert starts == [0.0, 0.5, 1.5, 3.5, 7.5]
    assert len(machine.failures) == 1


# -- giving up -------------------------------------------------------------------------------------


def test_a_job_beyond_max_failures_gives_up_and_names_every_failure():
    machine = elasticity(failures=1)
    lost(machine, 1)
    machine.note_ready(1)
    assert machine.decide(0.0) == Form((0, 1, 2))
    lost(machine, 0, 2, now=9.0)
    assert machine.decide(9.0) == GiveUp(
        "Given up: it failed 2 times, and max_failures is 1. "
        f"attempt 1: slice 1 lost: {DIED}; attempt 2: slices 0 and 2 lost: {DIED}."
    )


def test_a_second_loss_during_the_recovery_counts():
    machine = elasticity(failures=1)
    lost(machine, 1)
    machine.decide(0.0)
    machine.lose_slice(0, "the agent was killed\n...", 0.5)
    assert machine.decide(0.5) == GiveUp(
        "Given up: it failed 2 times, and max_failures is 1. "
        f"attempt 1: slice 1 lost: {DIED}; attempt 1: slice 0 lost: the agent was killed."
    )


def test_with_max_failures_0_the_first_failure_gives_up():
    machine = elasticity(failures=0)
    machine.note_failure(Loss((), "a collective broke"), 0.0)
    decision = machine.decide(0.0)
    assert isinstance(decision, GiveUp)
    assert (
        "it failed once, and max_failures is 0. attempt 1: a collective broke." in decision.reason
    )


# -- random interleavings --------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "lose", "there", "grow", "wait"]),
        st.integers(0, 3),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(least=st.integers(1, 4), shrinks=st.booleans(), failures=st.integers(0, 6), steps=STEPS)
def test_the_policy_keeps_its_promises_in_any_order_of_events(least, shrinks, failures, steps):
    machine = elasticity(least, 4, failures, 50.0, shrinks)
    now, since = 0.0, None
    for what, which, pause_s in steps:
        now += pause_s
        if what == "fail" and not machine.forming:
            machine.note_failure(Loss((machine.slices[which % len(machine.slices)],), DIED), now)
            since = now
        elif what == "grow" and machine.could_grow:
            machine.note_departure(now)
            since = now
        elif what == "lose":
            machine.lose_slice(which, DIED, now)
        elif what == "there" and machine.state_of(which) is not SliceState.AWAY:
            machine.note_ready(which)
        forming, counted = machine.forming, len(machine.failures)
        decision = machine.decide(now)
        while isinstance(decision, Restart):
            for index in decision.slices:
                assert machine.state_of(index) is SliceState.AWAY
                machine.note_ready(index)
            decision = machine.decide(now)
        if isinstance(decision, GiveUp):
            assert forming
            assert decision.reason.count("attempt ") == len(machine.failures)
            return
        if isinstance(decision, Form):
            assert forming
            assert least <= len(decision.slices) == len(set(decision.slices))
            assert decision.slices == tuple(sorted(decision.slices))
            assert all(
                machine.state_of(index) is SliceState.TAKES_PART for index in decision.slices
            )
        assert len(machine.failures) >= counted
        if machine.forming:
            assert len(machine.failures) <= failures, "it gives up as soon as there are more"
            assert now - since <= 50.0 + READY_S


def test_a_new_head_counts_the_failures_of_the_head_before():
    before = (Failure(1, (2,), "killed"), Failure(2, (), "the head, which led the job, was lost"))
    machine = AttemptPolicy(Elastic(1, 3, 2, 60.0), attempt=3, failures=before)
    assert (machine.attempt, machine.slices) == (3, (0, 1, 2))
    machine.note_failure(Loss((0,), "killed again"), 0.0)
    decision = machine.decide(0.0)
    assert isinstance(decision, GiveUp)
    for words in ("it failed 3 times", "attempt 1: slice 2 lost: killed", "attempt 2: the head"):
        assert words in decision.reason
    assert "attempt 3: slice 0 lost: killed again" in decision.reason


def test_the_loss_of_a_slice_that_is_away_counts_unless_it_is_told_not_to():
    machine = elasticity()
    machine.note_failure(Loss((1,), DIED), 0.0)
    machine.lose_slice(1, DIED, 1.0, counts=False)
    assert machine.stays_away(1)
    machine.lose_slice(1, DIED, 2.0)
    assert [failure.slices for failure in machine.failures] == [(1,), (1,)]


def test_the_limit_of_attempts_stays_and_is_left_out_beyond():
    """Attempts may exceed the limit, because those that made room for a slice or lost their leader
    are no failures. The name of such an attempt omits the limit."""
    names = [name_attempt(number, 2) for number in (1, 2, 3, 4)]
    assert names == ["1 of 3", "2 of 3", "3 of 3", "4"]
