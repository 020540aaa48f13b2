"""The worker's own handling of signals: SIGTERM unwinds the function, nothing strikes while its end
is reported, and what the function forks gets none of it.

In: signals, forks. Out: an exception in the main thread; children whose signals are those of plain
Python, or the function's own.

Python only notes a signal that it has a handler for, and calls the handler when the main thread
runs Python code again. A child in the middle of `sem_wait` never does: `Pool.terminate` would wait
for it for ever. So handlers end in forks; and as a child begins with those of its parent, signals
are held back while it is forked.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

AGAIN_S = 0.05
"""How soon a SIGTERM whose exception Python dropped is sent again."""
_DEFAULT = (signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)
_SILENCED = (
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

_Handler = Callable[[int, types.FrameType | None], Any]
_ours: dict[int, tuple[_Handler, Any]] = {}
"""By signal: the worker's handler, and what was there before it."""
_forking = threading.local()


class Terminated(SystemExit):
    """SIGTERM was sent to the worker; the function unwinds."""


def reset() -> None:
    """Set the handlers that a function begins with."""
    signal.set_wakeup_fd(-1)
    for signum in _DEFAULT:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _ours.clear()
    _ours[signal.SIGTERM] = (_terminate, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _send_again
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def silence() -> None:
    """Disable the function's timers and signal handlers before its end is reported."""
    for timer in _TIMERS:
        with contextlib.suppress(Exception):
            signal.setitimer(timer, 0)
    for signum in _SILENCED:
        with contextlib.suppress(Exception):
            _take(signum, _ignore)


def end_in_forks() -> None:
    """Have children that this process forks from now on begin without these handlers."""
    os.register_at_fork(
        before=_hold_back, after_in_parent=_let_through, after_in_child=_restore_handlers
    )


def _take(signum: int, handler: _Handler) -> None:
    current = signal.getsignal(signum)
    ours, before = _ours.get(signum, (None, None))
    _ours[signum] = (handler, before if current is ours else current)
    signal.signal(signum, handler)


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    """Unwind the function, so that `finally` blocks and context managers
    run. A handler of its own replaces this one."""
    raise Terminated(128 + signum)


def _ignore(signum: int, frame: object) -> None:
    """Do nothing. Not SIG_IGN, which programs that are started would inherit."""


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Send SIGTERM again when it was raised where Python drops exceptions: in `__del__`, or in a
    callback of the garbage collector."""
    if not isinstance(dropped.exc_value, Terminated):
        sys.__unraisablehook__(dropped)
        return
    _thread.start_new_thread(_strike_later, (os.getpid(),))


def _strike_later(pid: int) -> None:
    # A thread that makes no objects which the collector tracks: it would run the function's
    # callbacks here, where no signal ends them.
    time.sleep(AGAIN_S)
    os.kill(pid, signal.SIGTERM)


def _hold_back() -> None:
    # Either call may raise what a handler does: the first before anything is blocked.
    _forking.mask = None
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    signal.pthread_sigmask(signal.SIG_BLOCK, _ours)


def _let_through() -> None:
    if _forking.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_handlers() -> None:
    try:
        for signum, (handler, before) in _ours.items():
            if signal.getsignal(signum) is handler:
                signal.signal(signum, signal.SIG_DFL if before is None else before)
        if sys.unraisablehook is _send_again:
            sys.unraisablehook = sys.__unraisablehook__
    finally:
        _ours.clear()
        _let_through()
