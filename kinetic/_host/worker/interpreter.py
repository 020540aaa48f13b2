"""Signals, timers and tracers that the function has left: none may strike while its end is
reported.

In: the interpreter after the function. Out: one in which kinetic's own code runs undisturbed. What
a function has taken apart (builtins, modules) is not put back: it costs the function its result,
and the error says so.
"""

from __future__ import annotations

import contextlib
import signal
import sys

_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


def silence_signals() -> None:
    """Let no timer, signal or handler of the function's strike while its end is told: there is
    nothing left to unwind."""
    for timer in _TIMERS:
        with contextlib.suppress(Exception):
            signal.setitimer(timer, 0)
    for signum in _SIGNALS:
        with contextlib.suppress(Exception):
            signal.signal(signum, _pass_over)


def _pass_over(signum: int, frame: object) -> None:
    """Not SIG_IGN, which programs that are started from here would inherit."""


def disarm_tracers() -> None:
    """Remove trace and profile functions, of which one may raise at this very call."""
    for _ in range(2):
        try:
            sys.setprofile(None)
            sys.settrace(None)
        except BaseException:  # noqa: BLE001 - Python removes the one that raised
            pass
