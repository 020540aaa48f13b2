"""The start of an elastic job's first attempt, when its slices come one by one."""

from __future__ import annotations

from kinetic._core.gang.policy import AttemptPolicy, Form, Restart
from kinetic._core.options import Elastic


def gathering(least=1, most=3, wait=60.0, **rules):
    machine = AttemptPolicy(Elastic(least, most, 5, 300.0, start_wait_s=wait, **rules))
    machine.gather(0.0)
    return machine


def test_a_job_starts_at_once_when_all_slices_are_ready():
    machine = gathering()
    for index in machine.missing:
        assert machine.decide(1000.0) is None
        machine.note_ready(index)
    assert machine.decide(1000.0) == Form((0, 1, 2))
    assert (machine.attempt, machine.failures, machine.gathers) == (1, (), False)


def test_a_job_with_enough_slices_starts_after_waiting_a_minute_for_the_others():
    machine = gathering(least=2)
    machine.note_ready(2)
    assert machine.decide(500.0) is None
    machine.note_ready(0)
    assert machine.decide(510.0) is None
    assert machine.decide(569.0) is None
    assert machine.decide(570.0) == Form((0, 2))
    assert (machine.attempt, machine.missing, machine.could_grow) == (1, (1,), False)
    machine.note_ready(1)
    assert machine.could_grow
    machine.note_departure(600.0)
    for index in machine.missing:
        machine.note_ready(index)
    assert (machine.decide(600.0), machine.attempt) == (Form((0, 1, 2)), 2)


def test_a_slice_that_goes_before_the_start_is_no_failure_and_the_wait_begins_anew():
    machine = gathering(most=2)
    machine.note_ready(0)
    assert machine.decide(0.0) is None
    machine.lose_slice(0, "its connection broke", 30.0)
    assert machine.decide(30.0) == Restart((0,))
    machine.note_ready(0)
    assert machine.decide(60.0) is None
    assert machine.decide(120.0) == Form((0,))
    assert machine.failures == ()


def test_when_the_wait_is_over_the_first_attempt_forms_with_all_slices():
    machine = gathering()
    machine.take_all()
    assert (machine.slices, machine.attempt, machine.forming) == ((0, 1, 2), 1, False)
    assert machine.missing == ()
