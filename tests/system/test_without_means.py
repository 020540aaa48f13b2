"""Functions that leave the worker no descriptor, disk, right or working `__str__`: value or
exception arrive all the same.

In: real jobs. Out: the value, the exception with its own type, or an error that names that type.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys

import pytest
from gangs import PATIENCE_S, kill, processes, wait_until, worker_of

import kinetic
from kinetic import errors

BIG = 300_000
"""Bytes: more than travels in a message where a file can be written."""


class Detailed(Exception):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


def leak_descriptors():
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)


def forbid_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def forbid_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def hide_the_scratch():
    """A folder that cannot be made again: where it was, a file is."""
    here = os.path.dirname(os.getcwd())
    os.chdir("/")
    os.rename(here, f"{here}-away")
    with open(here, "w"):
        pass


def change_user():
    os.setgid(65534)
    os.setuid(65534)


def change_all_ids():
    os.setresuid(65534, 65534, 65534)


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


# -- code of the exception's own -------------------------------------------------------------------


class TextExits(Exception):
    def __str__(self):  # noqa: PLE0307
        sys.exit(3)


class TextAndReprRaise(Exception):
    def __str__(self):
        raise ValueError("no")

    __repr__ = __str__


class ExitsInEveryWay:
    def __repr__(self):
        sys.exit(4)

    def __reduce__(self):
        sys.exit(5)


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


class TextEndsTheProcess(Exception):
    def __str__(self):  # noqa: PLE0307
        os._exit(7)

    __repr__ = __str__


def test_an_exception_that_ends_the_process_while_it_is_read_is_named():
    def function():
        raise TextEndsTheProcess

    with pytest.raises(
        errors.HostLost, match=r"exit code 7 while the exception .*TextEndsTheProcess\)"
    ):
        run(function)


class EndsTheProcessWhenPickled:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_value_that_ends_the_process_while_it_is_pickled_is_named():
    with pytest.raises(
        errors.HostLost, match=r"SIGSEGV while the value .*EndsTheProcessWhenPickled\)"
    ):
        run(EndsTheProcessWhenPickled)


# -- before the function begins --------------------------------------------------------------------


class Loaded:
    """Runs a function while the call is unpickled on the host."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def sleep_until_told(marker):
    import pathlib
    import time

    pathlib.Path(marker).touch()
    time.sleep(1000)


def test_sigterm_before_the_function_began_is_told_as_that(home):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="cpu")(lambda _: None).run_async(
        Loaded(sleep_until_told, str(marker))
    )
    _, agents = processes(handle)
    wait_until(marker.exists, "the call is not unpickled")
    os.kill(worker_of(agents[0]), signal.SIGTERM)
    with pytest.raises(
        errors.HostLost, match="SIGTERM to the worker process before the function began"
    ):
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
    ("leave", "error", "told"),
    [
        (sys.exit, errors.SetupFailed, "could not load the function.*SystemExit: 3"),
        (os._exit, errors.HostLost, "exit code 3 before the function began"),
    ],
)
def test_a_module_that_exits_while_the_function_is_loaded(leave, error, told):
    with pytest.raises(error, match=told):
        run(lambda _: None, Loaded(leave, 3))
