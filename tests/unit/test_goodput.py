"""How the time of a job was spent: uses that never overlap and sum to the whole time."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._core.events import EventKind, GangEvent
from kinetic._core.gang.picture import picture_of
from kinetic._core.goodput import Goodput, Span, Use, add_up, divide, spans_of
from kinetic._core.metrics import COMPILING_SPAN, STEP_COUNT, STEPS_SPAN, Rows
from kinetic._core.outcome import Verdict
from kinetic._core.plan import Cost

TIMES = st.floats(0, 1000)
SPANS = st.builds(
    lambda use, begin, length, done, count: Span(use, begin, begin + length, done, done + count),
    st.sampled_from((Use.STEPS, Use.COMPILING, Use.RESTORING, Use.SAVING)),
    TIMES,
    st.floats(0, 100),
    st.integers(-1, 50),
    st.integers(1, 50),
)
EVENTS = st.builds(
    GangEvent,
    st.sampled_from(EventKind),
    host=st.none() | st.integers(0, 3),
    slices=st.lists(st.integers(0, 1), max_size=2, unique=True).map(tuple),
    verdict=st.none() | st.sampled_from(Verdict),
    attempt=st.integers(1, 3),
    time=TIMES,
)


def event(kind, time, attempt=1, **more):
    return GangEvent(EventKind(kind), attempt=attempt, time=time, **more)


def attempt_events(number, began, ready, ended, verdict="failed"):
    return [
        event("joined", began, number, host=0),
        event("ready", ready, number),
        event("ended", ended, number, verdict=Verdict(verdict)),
    ]


def steps(begin, end, done, last):
    return Span(Use.STEPS, begin, end, done, last)


def spent(goodput):
    return {str(use): seconds for use, seconds in goodput.spent_s.items() if seconds > 1e-9}


@given(
    st.lists(EVENTS, max_size=12),
    st.dictionaries(st.integers(1, 3), st.lists(SPANS, max_size=8), max_size=3),
    TIMES,
    TIMES,
)
def test_the_uses_of_any_record_sum_to_the_time_of_the_job(events, spans, created_at, until):
    """Whatever the events and spans of a job are, no use is negative, no second counts twice, and
    the uses of all attempts are the time from its submission to its end."""
    attempts = divide(picture_of(events, 4), spans, slices=2, created_at=created_at, until=until)
    for attempt in attempts:
        assert all(seconds >= -1e-6 for seconds in attempt.spent_s.values())
        assert 0 <= attempt.paid_steps_s <= attempt.paid_s + 1e-6
    whole = sum(add_up(attempts).spent_s.values())
    assert math.isclose(whole, max(until - created_at, 0.0), abs_tol=1e-6)


def test_the_time_of_a_training_is_divided():
    """A job waits for 10 s, starts for 5 s, restores and compiles before its first step, saves
    between steps, and then evaluates for 10 s."""
    gang = picture_of(attempt_events(1, 110, 115, 200, "succeeded"), 1)
    spans = [
        Span(Use.RESTORING, 116, 120),
        Span(Use.COMPILING, 119, 140),
        steps(145, 165, 0, 20),
        steps(165, 190, 20, 40),
        Span(Use.SAVING, 170, 175),
    ]
    (attempt,) = divide(gang, {1: spans}, slices=1, created_at=100, until=200)
    assert spent(attempt) == {
        "waiting": 10,
        "starting": 11,  # 110 to 116, and 140 to 145
        "restoring": 3,
        "compiling": 21,
        "steps": 40,
        "saving": 5,
        "other": 10,
    }
    assert (attempt.paid_s, attempt.paid_steps_s) == (85, 40)


def test_steps_that_a_later_attempt_repeats_are_lost():
    """The first attempt fails after step 30, and the second goes on after step 19, whose first
    logged step is 20: steps 20 to 30, and the time until the failure was judged, are lost."""
    events = [*attempt_events(1, 0, 0, 36), *attempt_events(2, 40, 42, 100, "succeeded")]
    spans = {1: [steps(1, 16, 0, 15), steps(16, 31, 15, 30)], 2: [steps(50, 100, 20, 70)]}
    first, second = divide(picture_of(events, 1), spans, slices=1, created_at=0, until=100)
    assert spent(first) == {"starting": 1, "steps": 19, "lost": 16}
    assert spent(second) == {"waiting": 4, "starting": 10, "steps": 50}


def test_steps_that_a_function_repeats_itself_are_lost():
    """A function restores within one attempt, after a NaN: the steps that it repeats are lost."""
    gang = picture_of(attempt_events(1, 0, 0, 40, "succeeded"), 1)
    spans = {1: [steps(0, 10, 0, 10), steps(20, 40, 4, 24)]}
    (attempt,) = divide(gang, spans, slices=1, created_at=0, until=40)
    assert spent(attempt) == {"steps": 23, "lost": 7, "other": 10}


def test_a_job_without_steps_says_less():
    """Without a record of steps, the time of the function belongs to no use, and there is no text
    for users."""
    gang = picture_of(attempt_events(1, 5, 10, 100, "failed"), 1)
    (attempt,) = divide(gang, {}, slices=1, created_at=0, until=100)
    assert spent(attempt) == {"waiting": 5, "starting": 5, "other": 90}
    assert attempt.describe(Cost(3600.0, "list price")) == ""


def test_a_job_that_waits_for_its_next_attempt_waits():
    """The first attempt has failed, and no host of the next one is there yet."""
    events = [*attempt_events(1, 5, 5, 10), event("retry", 10)]
    attempts = divide(picture_of(events, 1), {}, slices=1, created_at=5, until=50)
    assert spent(add_up(attempts)) == {"other": 5, "waiting": 40}


def test_the_money_of_lost_slices_is_not_counted():
    """An elastic job of two slices goes on with one of them: that attempt costs half."""
    events = [
        event("formed", 0, slices=(1,), hosts=(1,)),
        *attempt_events(1, 0, 0, 100, "succeeded"),
    ]
    spans = {1: [steps(20, 100, 0, 80)]}
    (attempt,) = divide(picture_of(events, 2), spans, slices=2, created_at=0, until=100)
    assert (attempt.paid_s, attempt.paid_steps_s) == (50, 40)
    assert attempt.to_json(Cost(7200.0, "list price"))["usd_not_steps"] == 20


def test_the_text_names_the_uses_in_the_order_of_their_size():
    """The text begins with steps and ends with the money that was spent on anything else; uses of
    less than half a percent are left out."""
    goodput = Goodput(
        {Use.STEPS: 610, Use.COMPILING: 220, Use.RESTORING: 90, Use.WAITING: 78, Use.OTHER: 2},
        paid_s=900,
        paid_steps_s=610,
    )
    text = "61 % steps, 22 % compiling, 9 % restoring, 8 % waiting"
    assert goodput.describe(None) == text
    assert goodput.describe(Cost(3600.0, "", is_simulated=True)) == text
    assert goodput.describe(Cost(3600.0, "")) == f"{text}; $290.00 of $900.00 not spent on steps"


def test_the_shares_sum_to_a_hundred():
    """Three uses with a third of the time each, or eight uses with an eighth: no percent is lost
    to rounding, and none is added."""
    for uses in ([Use.STEPS, Use.SAVING, Use.LOST], list(Use)):
        text = Goodput(dict.fromkeys(uses, 1.0), 1.0, 1.0).describe(None)
        assert sum(int(part.split()[0]) for part in text.split(", ")) == 100


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_damaged_spans_are_left_out(value):
    """A row whose duration is no time is skipped; the others are read."""
    rows = Rows((COMPILING_SPAN,), array("d", [10, 20]), array("q", [-1, -1]), [[value, 5.0]])
    assert [span[:3] for span in spans_of(rows)] == [(Use.COMPILING, 15, 20)]


def test_a_span_of_steps_names_its_steps():
    """Two seconds in which steps 8 to 10 were done, beside another metric of the same row."""
    names = ("loss", STEPS_SPAN, STEP_COUNT)
    rows = Rows(names, array("d", [12.0]), array("q", [10]), [[1.0], [2.0], [3.0]])
    assert list(spans_of(rows)) == [steps(10, 12, 7, 10)]
