"""Functions that end in unusual ways: by deaths, odd exceptions, odd values and odd output."""

from __future__ import annotations

import threading

import pytest
from havoc import exit_with
from hostile_cases import OURS, PATIENCE_S, failure_of, read_texts, start
from odd_ends import (
    LONG_BYTES,
    ODD,
    Base,
    Exits,
    ExitsHere,
    ExitsWhenAsked,
    Frozen,
    NoWords,
    OddInit,
    OnlyThere,
    end_by,
    fail_with_exit_handlers,
    print_long,
    print_odd,
    raise_by,
    stop_for_ever,
)

import kinetic
from kinetic import errors
from kinetic._core import layout

# -- deaths and exits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("alarm", "SIGALRM"),
        ("terminate itself", "SIGTERM"),
        ("kill its group", "SIGKILL"),
        ("kill its agent", "agent process was killed by SIGKILL"),
        ("crash its agent", "agent process was killed by SIGSEGV at "),
        ("exit in a fork of the interpreter's end", "exit code 7"),
    ],
)
def test_a_death_is_called_what_it_was(how, words):
    handle = start(end_by, how)
    assert words in str(failure_of(handle, errors.HostLost))


def test_exit_handlers_run_on_all_hosts_of_a_gang_that_fails(tmp_path):
    call = kinetic.run(accelerator="tpu-v5e-16")(fail_with_exit_handlers)
    with pytest.raises(ValueError, match="no"):
        call(tmp_path)
    assert sorted(path.name[-1] for path in tmp_path.glob("ended *")) == ["0", "1", "2", "3"]


@pytest.mark.settles_within(10)
def test_a_function_that_stops_itself_runs_into_its_timeout():
    handle = start(stop_for_ever, timeout=1.0)
    assert "timeout of 1 s" in str(failure_of(handle, errors.JobTimeout))


# -- exceptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("no words", NoWords),
        ("odd init", OddInit),
        ("frozen", Frozen),
        ("base", Base),
        ("stop", StopIteration),
        ("group", ExceptionGroup),
        ("base group", BaseExceptionGroup),
        ("long", ValueError),
        ("cycle", ValueError),
        ("exits when asked", ExitsWhenAsked),
        ("interrupt", errors.UserCodeFailed),
        ("generator exit", errors.UserCodeFailed),
    ],
)
def test_odd_exceptions_arrive(how, kind):
    handle = start(raise_by, how)
    error = failure_of(handle, kind)
    assert not any(word in read_texts(handle, error) for word in OURS)
    assert "raise_by" in read_texts(handle, error)
    if how == "group":
        assert str(error.__cause__) == "'cause'"
        assert error.exceptions[1].__notes__ == ["a note"]
    if how == "odd init":
        assert (error.a, error.b) == (1, 2)
    if how == "long":
        assert len(str(error)) == 10_000_000
        assert len(read_texts(handle, error)) < 200_000
    if how == "interrupt":
        assert "raised KeyboardInterrupt." in str(error)


@pytest.mark.parametrize("code", [True, -1, 10**30, {"a": 1}, b"\xff"], ids=repr)
def test_odd_exit_codes_are_told(code):
    assert f"sys.exit({code!r})" in str(failure_of(start(exit_with, code), errors.UserCodeFailed))


def test_an_exit_code_with_too_many_digits_is_the_functions_own():
    failed = failure_of(start(exit_with, 10**5000), errors.UserCodeFailed)
    assert "the function called sys.exit(<repr raised ValueError>)" in str(failed)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (OnlyThere, "a_module_that_is_nowhere"),
        (Exits, "SystemExit"),
        (ExitsHere, "SystemExit"),
        (threading.Lock, "lock"),
    ],
)
def test_a_value_that_cannot_travel_is_told(value, words):
    error = failure_of(start(value), errors.ResultUnavailable)
    assert words in str(error)


def test_a_function_may_run_another():
    inner = kinetic.run(accelerator="cpu")(lambda x: x + 1)
    assert kinetic.run(accelerator="cpu")(lambda x: inner(x) * 10)(1) == 20


# -- output ----------------------------------------------------------------------------------------


def test_odd_bytes_are_kept_as_they_are(home, capfdbinary):
    from kinetic.cli.root import call

    handle = start(print_odd)
    handle.result(stream_logs=False)
    assert (home / layout.HostKeys(handle.job_id, 1, 0).log).read_bytes() == ODD
    capfdbinary.readouterr()
    assert call(["jobs", "logs", handle.job_id]) == 0
    assert capfdbinary.readouterr().out == ODD


def test_a_line_of_a_hundred_million_bytes_is_kept(home):
    handle = start(print_long)
    handle.result(timeout=PATIENCE_S, stream_logs=False)
    log = home / layout.HostKeys(handle.job_id, 1, 0).log
    assert log.stat().st_size == LONG_BYTES
    assert handle.tail(1).strip("x") in ("", "\n")
