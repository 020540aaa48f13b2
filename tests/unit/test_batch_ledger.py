"""The ledger of a batch, under random events: every input ends once, in one state, and no rule is
broken on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laptop_fakes import ref

from kinetic._client.batch.inputs import CallArguments, calls
from kinetic._client.batch.ledger import BatchRules, InputState, Ledger
from kinetic.errors import UsageError, UsageTypeError

RULES = st.builds(
    BatchRules,
    max_concurrent=st.none() | st.integers(1, 4),
    retries=st.integers(0, 2),
    fail_fast=st.booleans(),
    cancel_running_on_fail=st.booleans(),
)


def step(ledger, data, tries):
    """Let one thing happen that can; return whether there was one."""
    submitting = [i for i, task in enumerate(ledger.tasks) if task.state is InputState.SUBMITTING]
    live = list(ledger.live())
    acts = ["take"] if ledger.waiting and ledger.free else []
    acts += ["submitted", "refused", "give_back"] if submitting else []
    acts += ["succeed", "fail", "cancelled", "gone"] if live else []
    if not acts:
        return False
    act = data.draw(st.sampled_from([*acts, "stop"] if len(acts) > 1 else acts))
    if act == "take":
        index = ledger.take()
        assert ledger.tasks[index].state is InputState.SUBMITTING
    elif act == "stop":
        ledger.stop("asked to")
    elif act == "submitted":
        index = data.draw(st.sampled_from(submitting))
        tries[index] = tries.get(index, 0) + 1
        ledger.mark_submitted(index, ref(f"job-{index}-{tries[index]}"))
    elif act == "refused":
        ledger.mark_refused(data.draw(st.sampled_from(submitting)), ValueError("no"))
    elif act == "give_back":
        ledger.give_back(data.draw(st.sampled_from(submitting)))
    elif act == "gone":
        ledger.mark_gone(data.draw(st.sampled_from(live)))
    else:
        ledger.mark_ended(
            data.draw(st.sampled_from(live)), ok=act == "succeed", again=act != "cancelled"
        )
    return True


@given(st.integers(0, 8), RULES, st.data())
@settings(max_examples=150, deadline=None)
def test_every_input_ends_once_whatever_happens(total, rules, data):
    ledger, tries = Ledger(total, rules), {}
    for _ in range(200):
        was_stopped, before = ledger.stopped, dict(tries)
        if not step(ledger, data, tries):
            break
        busy = sum(task.state in (InputState.SUBMITTING, InputState.LIVE) for task in ledger.tasks)
        assert rules.max_concurrent is None or busy <= rules.max_concurrent
        assert not was_stopped or not ledger.waiting, "nothing waits once the batch was stopped"
        assert all(n <= rules.retries + 1 for n in tries.values())
        assert ledger.done == all(task.state.final for task in ledger.tasks)
        assert len(set(ledger.finished)) == len(ledger.finished)
        assert sum(tries.values()) - sum(before.values()) in (0, 1)
    else:
        ledger.stop("enough")
        return
    assert ledger.done
    assert not ledger.submits
    assert sorted(ledger.finished) == list(range(total))
    for index, task in enumerate(ledger.tasks):
        assert (task.ref is None) == (index not in tries)
        assert (task.state is InputState.REFUSED) <= (task.error is not None)
        assert task.tries == tries.get(index, 0)
    if rules.fail_fast and any(
        task.state in (InputState.FAILED, InputState.REFUSED) for task in ledger.tasks
    ):
        assert ledger.stopped
    if not ledger.stopped:
        assert all(task.state is not InputState.SKIPPED for task in ledger.tasks)


def test_inputs_are_taken_in_order_and_retries_before_new_ones():
    ledger = Ledger(4, BatchRules(max_concurrent=2, retries=1))
    assert [ledger.take(), ledger.take(), ledger.take()] == [0, 1, None]
    for index in (0, 1):
        ledger.mark_submitted(index, ref())
    ledger.mark_ended(1, ok=False)
    assert ledger.take() == 1
    ledger.mark_submitted(1, ref())
    ledger.mark_ended(1, ok=False)
    assert ledger.tasks[1].state is InputState.FAILED
    assert ledger.take() == 2


def test_a_failure_stops_the_rest_only_when_asked_to():
    careful = Ledger(3, BatchRules(max_concurrent=1, fail_fast=True))
    careful.take()
    careful.mark_submitted(0, ref())
    careful.mark_ended(0, ok=False)
    assert [task.state for task in careful.tasks] == [
        InputState.FAILED,
        InputState.SKIPPED,
        InputState.SKIPPED,
    ]
    assert careful.stopped
    patient = Ledger(3, BatchRules(max_concurrent=1))
    patient.take()
    patient.mark_refused(0, ValueError())
    assert patient.take() == 1


def test_a_retry_that_cannot_be_submitted_leaves_a_failed_job():
    ledger = Ledger(1, BatchRules(retries=1))
    ledger.take()
    ledger.mark_submitted(0, ref())
    ledger.mark_ended(0, ok=False)
    ledger.take()
    ledger.mark_refused(0, OSError("full"))
    assert ledger.tasks[0].state is InputState.FAILED


@pytest.mark.parametrize(
    ("item", "mode", "call"),
    [
        ({"lr": 1}, "auto", CallArguments(kwargs={"lr": 1})),
        ({"not-a-name": 1}, "auto", CallArguments(({"not-a-name": 1},))),
        ({"class": 1}, "auto", CallArguments(({"class": 1},))),
        ({1: 2}, "auto", CallArguments(({1: 2},))),
        ({}, "auto", CallArguments()),
        ([1, 2], "auto", CallArguments((1, 2))),
        ((1, 2), "auto", CallArguments((1, 2))),
        ("ab", "auto", CallArguments(("ab",))),
        (None, "auto", CallArguments((None,))),
        ([1, 2], "single", CallArguments(([1, 2],))),
        ({"lr": 1}, "single", CallArguments(({"lr": 1},))),
        ([1, 2], "args", CallArguments((1, 2))),
        ({"class": 1}, "kwargs", CallArguments(kwargs={"class": 1})),
    ],
)
def test_input_modes(item, mode, call):
    assert calls([item], mode) == [call]


@pytest.mark.parametrize(
    ("inputs", "mode", "error", "words"),
    [
        ([1], "args", UsageTypeError, r"inputs\[0\] must be a list or tuple"),
        ([{}, 1], "kwargs", UsageTypeError, r"inputs\[1\] must be a dict"),
        ([{1: 2}], "kwargs", UsageTypeError, "cannot be the name"),
        ("abc", "auto", UsageTypeError, "inputs must be a list"),
        ({"a": 1}, "auto", UsageTypeError, "inputs must be a list"),
        (3, "auto", UsageTypeError, "inputs must be a list"),
        ([1], "splat", UsageError, "splat"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_at_once(inputs, mode, error, words):
    with pytest.raises(error, match=words):
        calls(inputs, mode)
