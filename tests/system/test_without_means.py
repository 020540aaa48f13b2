"""Functions take descriptors, disk, permissions or a working `__str__` from their worker. The
caller still gets the value, the exception, or an error that names the exception's type."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from gangs import PATIENCE_S, kill, processes, wait_until, worker_of
from havoc import (
    change_all_ids,
    change_user,
    forbid_descriptors,
    forbid_files,
    hide_the_scratch,
    leak_descriptors,
)
from odd_ends import (
    Detailed,
    EndsTheProcessWhenPickled,
    ExitsInEveryWay,
    Loaded,
    TextAndReprRaise,
    TextEndsTheProcess,
    TextExits,
    sleep_until_told,
)

import kinetic
from kinetic import errors

BIG = 300_000
"""Bytes of a value that is too large for a message: the worker must write it to a file."""


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
WAYS = [
    leak_descriptors,
    forbid_descriptors,
    forbid_files,
    hide_the_scratch,
    pytest.param(change_user, marks=AS_ROOT),
    pytest.param(change_all_ids, marks=AS_ROOT),
]


def run(function, *args):
    return kinetic.run(accelerator="cpu")(function)(*args)


@pytest.mark.parametrize("lose", WAYS)
def test_the_value_arrives(lose):
    def function(size):
        lose()
        return b"x" * size

    assert run(function, 10) == b"x" * 10
    assert run(function, BIG) == b"x" * BIG


@pytest.mark.parametrize("lose", WAYS)
def test_the_exception_arrives_with_its_own_type(lose):
    def function():
        lose()
        raise Detailed("mine", 7)

    with pytest.raises(Detailed, match="mine") as caught:
        run(function)
    assert caught.value.code == 7


# -- code in the exception's own class -------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: TextExits("x"), TextExits),
        (lambda: TextAndReprRaise("x"), TextAndReprRaise),
        (lambda: LookupError(ExitsInEveryWay()), LookupError),
    ],
)
def test_an_exception_whose_text_cannot_be_had_keeps_its_type(make, kind):
    def function():
        raise make()

    with pytest.raises(kind):
        run(function)


def test_an_exception_that_ends_the_process_while_it_is_read_is_named():
    def function():
        raise TextEndsTheProcess

    with pytest.raises(
        errors.HostLost, match=r"exit code 7 while the exception .*TextEndsTheProcess\)"
    ):
        run(function)


def test_a_value_that_ends_the_process_while_it_is_pickled_is_named():
    with pytest.raises(
        errors.HostLost, match=r"SIGSEGV while the value .*EndsTheProcessWhenPickled\)"
    ):
        run(EndsTheProcessWhenPickled)


# -- before the function begins --------------------------------------------------------------------


def test_sigterm_before_the_function_began_is_told_as_that(home):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="cpu")(lambda _: None).run_async(
        Loaded(sleep_until_told, str(marker))
    )
    _, agents = processes(handle)
    wait_until(marker.exists, "the call is not unpickled")
    os.kill(worker_of(agents[0]), signal.SIGTERM)
    with pytest.raises(errors.HostLost, match="received SIGTERM before the function began"):
        handle.result(timeout=PATIENCE_S)


def test_sigkill_before_the_function_began_is_told_as_that(home):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="cpu")(lambda _: None).run_async(
        Loaded(sleep_until_told, str(marker))
    )
    _, agents = processes(handle)
    wait_until(marker.exists, "the call is not unpickled")
    kill(worker_of(agents[0]))
    with pytest.raises(errors.HostLost, match="SIGKILL before the function began"):
        handle.result(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("leave", "error", "message"),
    [
        (sys.exit, errors.SetupFailed, "could not load the function.*SystemExit: 3"),
        (os._exit, errors.HostLost, "exit code 3 before the function began"),
    ],
)
def test_a_module_that_exits_while_the_function_is_loaded(leave, error, message):
    with pytest.raises(error, match=message):
        run(lambda _: None, Loaded(leave, 3))
