"""What the worker's own code needs of the interpreter, put back where the function took it away.

In: the interpreter before the function runs. Out: one in which kinetic can still import, pickle and
tell.
"""

from __future__ import annotations

import builtins
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


class Interpreter:
    """The interpreter as it is now."""

    def __init__(self) -> None:
        self._modules = sys.modules
        self._loaded = dict(sys.modules)
        self._lists = {
            name: list(getattr(sys, name)) for name in ("path", "meta_path", "path_hooks")
        }
        self._builtins = dict(vars(builtins))
        self._depth = sys.getrecursionlimit()

    def mend(self) -> None:
        """Put back what is missing; what the function added or replaced stays."""
        names = builtins.__dict__
        for name in self._builtins:  # First, and without calling any of them.
            if names.get(name) is None:
                names[name] = self._builtins[name]
        sys.modules = self._modules
        for name, module in self._loaded.items():
            if self._modules.get(name) is None:
                self._modules[name] = module
        for name, before in self._lists.items():
            now = getattr(sys, name, None)
            now = now if isinstance(now, list) else []
            setattr(sys, name, now + [entry for entry in before if entry not in now])
        if sys.getrecursionlimit() < self._depth:
            sys.setrecursionlimit(self._depth)


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
