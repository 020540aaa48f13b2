"""Functions that damage their own process: the caller gets the value, or an error with the true
cause, and no process is left, as the fixture `no_leftovers` checks."""

from __future__ import annotations

from pathlib import Path

import pytest
from havoc import (
    FATAL,
    HARMLESS,
    STRIKING,
    Mine,
    fork_and_come_back,
    hang_at_exit,
    leave_a_file_hanging,
    leave_a_file_open,
    leave_an_orphan,
    leave_many,
    leave_sleepers,
    leave_the_deaf,
    then_raise,
    then_return,
)
from hostile_cases import OURS, PATIENCE_S, failure_of, read_texts, start

from kinetic import errors

# -- damage after which a function still returns ---------------------------------------------------


@pytest.mark.parametrize("havoc", HARMLESS, ids=lambda h: h.__name__)
def test_a_value_comes_back_all_the_same(havoc):
    handle = start(then_return, havoc, timeout=PATIENCE_S)
    if havoc in STRIKING and not handle.wait(PATIENCE_S).ok:
        # The signal or exception came before the function returned.
        failure_of(handle, (RuntimeError, errors.UserCodeFailed))
        return
    assert handle.result(timeout=PATIENCE_S, stream_logs=False) == {"still": "told"}
    assert not any(word in read_texts(handle) for word in OURS)


@pytest.mark.parametrize("havoc", HARMLESS, ids=lambda h: h.__name__)
def test_an_exception_comes_back_all_the_same(havoc):
    handle = start(then_raise, havoc, timeout=PATIENCE_S)
    if havoc in STRIKING:
        failure_of(handle, (Mine, RuntimeError, errors.UserCodeFailed))
    else:
        error = failure_of(handle, Mine)
        assert str(error) == "still told"
        assert "in then_raise" in read_texts(handle, error)
        assert not any(word in read_texts(handle, error) for word in OURS)


@pytest.mark.parametrize("havoc", FATAL, ids=lambda h: h.__name__)
@pytest.mark.parametrize("then", [then_return, then_raise], ids=lambda f: f.__name__)
def test_a_function_that_takes_python_apart_gets_its_end_or_a_clear_error(havoc, then):
    handle = start(then, havoc, timeout=PATIENCE_S)
    if then is then_return and handle.wait(PATIENCE_S).result_digest:
        assert handle.result(timeout=PATIENCE_S, stream_logs=False) == {"still": "told"}
        return
    kinds = (errors.HostLost, errors.ResultUnavailable, errors.UserCodeFailed, Mine)
    with pytest.raises(kinds, match=r"broke a part of Python|kinetic's own code failed|still told"):
        handle.result(timeout=PATIENCE_S, stream_logs=False)


# -- leftover processes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (leave_sleepers, "were killed: sleep ("),
        (leave_an_orphan, "were killed: fork of the function ("),
        (leave_many, " and others"),
        (leave_the_deaf, "were killed: fork of the function ("),
    ],
)
def test_processes_left_behind_are_named_and_killed_at_once(leave, named):
    def took_s():
        handle = start(leave)
        assert handle.result(stream_logs=False) == 1
        assert "processes still running after the function ended were killed" in handle.logs()
        assert named in handle.logs()
        outcome = handle.outcome()
        return outcome.ended_at - outcome.reports[0].ended_at

    # Killing must not take as long as the shortest time limit, 3 s. A busy machine makes some runs
    # slow, so one fast run is enough.
    assert any(took_s() < 2.5 for _ in range(20))


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_fork_that_comes_back_does_not_pass_for_the_function(how):
    handle = start(fork_and_come_back, how)
    assert handle.result(stream_logs=False) == "the function"
    assert ("Mine: of the fork" in handle.logs()) == (how == "raise")
    assert "/kinetic/_host/" not in handle.logs()


def test_an_exit_handler_that_hangs_is_ended_and_named():
    handle = start(hang_at_exit)
    assert handle.result(timeout=PATIENCE_S, stream_logs=False) == 1
    assert "its process kept running at havoc.py:" in handle.logs()
    assert " in sleep_long, perhaps in an exit handler, and was killed." in handle.logs()


@pytest.mark.parametrize("how", ["return", "raise"])
def test_what_an_open_file_holds_is_written_out(how):
    handle = start(leave_a_file_open, how)
    if how == "return":
        assert handle.result(timeout=PATIENCE_S, stream_logs=False) == "the function"
    else:
        failure_of(handle, Mine)
    assert Path(handle.ref.output_dir, "rows").read_text() == "row"


def test_a_file_that_cannot_be_written_does_not_hold_the_failure_up():
    handle = start(leave_a_file_hanging, timeout=20)
    assert "of the function" in str(failure_of(handle, Mine))
