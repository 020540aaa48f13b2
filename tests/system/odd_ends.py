"""Functions, exceptions and values with which a host ends in an unusual way. Hosts import this
module instead of the tests: importing pytest would take longer than the job."""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import sys
import time


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
    if how == "crash its agent":
        os.kill(os.getppid(), signal.SIGSEGV)
    if how == "exit in a fork of the interpreter's end":
        os._exit(7)
    time.sleep(1000)


def stop_for_ever():
    """Stop this process with SIGSTOP for ever, again after every SIGCONT."""
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def fail_with_exit_handlers(folder):
    """Raise on host 1 after all four hosts have begun. Each host's exit handler creates "ended
    HOST"."""
    host = os.environ["KINETIC_HOST_INDEX"]
    atexit.register((folder / f"ended {host}").touch)
    (folder / f"begun {host}").touch()
    while host != "1" or len(list(folder.glob("begun *"))) < 4:
        time.sleep(0.01)
    raise ValueError("no")


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


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


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
        "frozen": Frozen(3),
        "base": Base("mine"),
        "stop": StopIteration(3),
        "interrupt": KeyboardInterrupt(),
        "generator exit": GeneratorExit("mine"),
        "base group": BaseExceptionGroup("mixed", [KeyboardInterrupt(1), SystemExit(2)]),
    }[how]


class OnlyThere:
    def __reduce__(self):
        return __import__, ("a_module_that_is_nowhere",)


class Exits:
    def __reduce__(self):
        sys.exit(4)


class ExitsHere:
    def __reduce__(self):
        return sys.exit, (4,)


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


class Detailed(Exception):
    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


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


class TextEndsTheProcess(Exception):
    def __str__(self):  # noqa: PLE0307
        os._exit(7)

    __repr__ = __str__


class EndsTheProcessWhenPickled:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGSEGV)


class Loaded:
    """An object that is unpickled on the host by a call of this function with these arguments."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def sleep_until_told(marker):
    import pathlib
    import time

    pathlib.Path(marker).touch()
    # Sleep only briefly: Python handles a signal that comes just before a sleep only after it.
    while True:
        time.sleep(0.05)
