"""Functions that end oddly: deaths, exceptions, values and output of all kinds."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
from havoc import exit_with
from hostile_cases import OURS, PATIENCE_S, failure_of, started, told

import kinetic
from kinetic import errors
from kinetic._core import layout

# -- ends ------------------------------------------------------------------------------------------


def end_by(how):
    if how == "alarm":
        signal.alarm(1)
        time.sleep(1000)
    if how == "terminate itself":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
    if how == "kill its group":
        os.killpg(0, signal.SIGKILL)
    if how == "kill its agent":
        os.kill(os.getppid(), signal.SIGKILL)
    if how == "exit in a fork of the interpreter's end":
        os._exit(7)
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("alarm", "SIGALRM"),
        ("terminate itself", "SIGTERM"),
        ("kill its group", "SIGKILL"),
        ("kill its agent", "agent process was killed by SIGKILL"),
        ("exit in a fork of the interpreter's end", "exit code 7"),
    ],
)
def test_a_death_is_called_what_it_was(how, words):
    handle = started(end_by, how)
    assert words in str(failure_of(handle, errors.HostLost))


def stop_for_ever():
    """Continued in order to be ended, it must not return before SIGTERM arrives."""
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.settles_within(10)
def test_a_function_that_stops_itself_runs_into_its_timeout():
    handle = started(stop_for_ever, timeout=1.0)
    assert "timeout of 1 s" in str(failure_of(handle, errors.JobTimeout))


# -- exceptions ------------------------------------------------------------------------------------


class NoWords(Exception):
    def __str__(self):
        raise ValueError("no words")

    __repr__ = __str__


class ExitsWhenAsked(Exception):
    def __str__(self):  # noqa: PLE0307
        sys.exit("no words")

    __repr__ = __str__


class OddInit(Exception):
    def __init__(self, a, *, b):
        super().__init__()
        self.a, self.b = a, b


class Base(BaseException):
    pass


def raise_by(how):
    if how == "group":
        deep = ExceptionGroup("inner", [TypeError("two")])
        deep.add_note("a note")
        raise ExceptionGroup("outer", [ValueError("one"), deep]) from KeyError("cause")
    if how == "long":
        raise ValueError("x" * 10_000_000)
    if how == "cycle":
        first, second = ValueError("first"), ValueError("second")
        first.__cause__, second.__cause__ = second, first
        raise first
    raise {
        "no words": NoWords(),
        "exits when asked": ExitsWhenAsked(),
        "odd init": OddInit(1, b=2),
        "base": Base("mine"),
        "stop": StopIteration(3),
        "interrupt": KeyboardInterrupt(),
        "generator exit": GeneratorExit("mine"),
        "base group": BaseExceptionGroup("mixed", [KeyboardInterrupt(1), SystemExit(2)]),
    }[how]


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("no words", NoWords),
        ("odd init", OddInit),
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
    handle = started(raise_by, how)
    error = failure_of(handle, kind)
    assert not any(word in told(handle, error) for word in OURS)
    assert "raise_by" in told(handle, error)
    if how == "group":
        assert str(error.__cause__) == "'cause'"
        assert error.exceptions[1].__notes__ == ["a note"]
    if how == "odd init":
        assert (error.a, error.b) == (1, 2)
    if how == "long":
        assert len(str(error)) == 10_000_000
        assert len(told(handle, error)) < 200_000
    if how == "interrupt":
        assert "raised KeyboardInterrupt." in str(error)


@pytest.mark.parametrize("code", [True, -1, 10**30, {"a": 1}, b"\xff"], ids=repr)
def test_odd_exit_codes_are_told(code):
    assert f"sys.exit({code!r})" in str(failure_of(started(exit_with, code), errors.UserCodeFailed))


# -- values ----------------------------------------------------------------------------------------


class OnlyThere:
    def __reduce__(self):
        return __import__, ("a_module_that_is_nowhere",)


class Exits:
    def __reduce__(self):
        sys.exit(4)


class ExitsHere:
    def __reduce__(self):
        return sys.exit, (4,)


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
    error = failure_of(started(value), errors.ResultUnavailable)
    assert words in str(error)


def test_a_function_may_run_another():
    inner = kinetic.run(accelerator="cpu")(lambda x: x + 1)
    assert kinetic.run(accelerator="cpu")(lambda x: inner(x) * 10)(1) == 20


# -- output ----------------------------------------------------------------------------------------


ODD = b"\0NUL \x1b[31mred\x1b[0m \xff\xfe not UTF-8 \r\n"


LONG_BYTES = 100_000_000


def print_odd():
    os.write(1, ODD)


def print_long():
    block = b"x" * 1_000_000
    for _ in range(LONG_BYTES // len(block)):
        view = memoryview(block)
        while view:
            view = view[os.write(1, view) :]


def test_odd_bytes_are_kept_as_they_are(home, capfdbinary):
    from kinetic.cli.root import call

    handle = started(print_odd)
    handle.result(stream_logs=False)
    assert (home / layout.log(handle.job_id, 1, 0)).read_bytes() == ODD
    capfdbinary.readouterr()
    assert call(["jobs", "logs", handle.job_id]) == 0
    assert capfdbinary.readouterr().out == ODD


def test_a_line_of_a_hundred_million_bytes_is_kept(home):
    handle = started(print_long)
    handle.result(timeout=PATIENCE_S, stream_logs=False)
    log = home / layout.log(handle.job_id, 1, 0)
    assert log.stat().st_size == LONG_BYTES
    assert handle.tail(1).strip("x") in ("", "\n")
