"""The rules by which a single controller calls its function again, or gives up with its error."""

from __future__ import annotations

import pytest

from kinetic._core.gang.controller import Calls, Cause, NextCall, cause_of
from kinetic._core.gang.policy import GiveUp
from kinetic._core.options import Elastic

LOST = "DATA_LOSS: slice 1 is down\nmore"
MAYBE = "INTERNAL: something broke"


def calls(least=1, most=3, failures=2, timeout=60.0, shrinks=False):
    return Calls(Elastic(least, most, failures, timeout, shrinks=shrinks))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("DATA_LOSS: gone", Cause.LOSS),
        ("INTERNAL: Error dispatching computation: DATA_LOSS: gone", Cause.LOSS),
        ("DEADLINE_EXCEEDED: late", Cause.PERHAPS_LOSS),
        ("NOT_FOUND: no such buffer", Cause.PERHAPS_LOSS),
        ("INTERNAL: broke", Cause.PERHAPS_LOSS),
        ("INTERNAL: CpuCallback error calling callback: Traceback", Cause.OTHER),
        ("RESOURCE_EXHAUSTED: Out of memory", Cause.OTHER),
        ("INVALID_ARGUMENT: shapes differ", Cause.OTHER),
        ("", Cause.OTHER),
    ],
)
def test_the_text_of_an_error_says_whether_a_slice_was_lost(text, cause):
    assert cause_of(text) is cause


def test_a_waiting_controller_calls_again_with_all_slices_or_after_a_while_with_the_least():
    assert calls(2, 3).handle_failure(Cause.LOSS, [1], LOST) == NextCall(wanted=3, enough=2)


def test_a_shrinking_controller_calls_again_with_the_least_slices():
    assert calls(2, 3, shrinks=True).handle_failure(Cause.LOSS, [1], LOST) == NextCall(
        wanted=2, enough=2
    )


def test_an_error_of_another_kind_is_the_functions_own():
    machine = calls()
    assert machine.handle_failure(Cause.OTHER, [], "RESOURCE_EXHAUSTED") is None
    assert machine.failures == ()


def test_a_doubtful_error_is_a_loss_as_often_as_a_slice_is_gone():
    machine = calls(failures=3)
    for _ in range(3):
        assert machine.handle_failure(Cause.PERHAPS_LOSS, [0], MAYBE) == NextCall(3, 1)


def test_while_all_slices_answer_a_doubtful_error_is_tried_once():
    machine = calls(failures=9)
    assert machine.handle_failure(Cause.PERHAPS_LOSS, [], MAYBE) == NextCall(3, 1)
    assert machine.handle_failure(Cause.PERHAPS_LOSS, [], MAYBE) is None
    machine = calls(failures=9)
    for cause in (Cause.PERHAPS_LOSS, Cause.LOSS, Cause.PERHAPS_LOSS):
        assert machine.handle_failure(cause, [], MAYBE) == NextCall(3, 1), "not twice in a row"


def test_calls_beyond_max_failures_give_up_and_name_every_failure():
    machine = calls(failures=1)
    assert machine.handle_failure(Cause.LOSS, [1], LOST) == NextCall(3, 1)
    machine.begin_attempt()
    given_up = machine.handle_failure(Cause.LOSS, [], "DATA_LOSS: gone")
    assert given_up == GiveUp(
        "Given up: it failed 2 times, and max_failures is 1. attempt 1: slice 1 lost: DATA_LOSS: "
        "slice 1 is down; attempt 2: DATA_LOSS: gone."
    )
    assert (
        machine.describe_failure()
        == "a computation broke (failure 2 and max_failures is 1): DATA_LOSS: gone"
    )


def test_with_max_failures_0_the_first_loss_gives_up():
    given_up = calls(failures=0).handle_failure(Cause.LOSS, [2], LOST)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason.startswith("Given up: it failed once, and max_failures is 0. ")


def test_too_few_slices_in_time_name_those_that_are_away():
    machine = calls(2, 3, timeout=5)
    machine.handle_failure(Cause.LOSS, [0, 2], LOST)
    assert machine.too_few([1]) == GiveUp(
        "Given up: slices 0 and 2 did not return within 5 s (slice_timeout). The job has 1 slice "
        "and needs 2. attempt 1: slices 0 and 2 lost: DATA_LOSS: slice 1 is down."
    )


def test_a_call_that_ends_to_grow_is_no_failure():
    machine = calls(failures=2)
    assert machine.handle_departure() == NextCall(1, 1)
    machine.begin_attempt()
    assert (machine.attempt, machine.failures) == (2, ())
