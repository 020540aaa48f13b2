"""The worker's signal handlers: SIGTERM unwinds the function, no signal interrupts the report of
its end, and forks of the function do not inherit these handlers.

Python runs a signal's handler only when the main thread next runs Python code. A child that blocks
in `sem_wait` never does, and `Pool.terminate` would wait for it forever. So forks drop the
handlers. Signals are blocked during the fork, until the child has dropped its handlers.
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
"""Seconds until a SIGTERM is sent again, if Python has dropped its exception."""
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
"""The worker's handler and the handler that it replaced, by signal."""
_forking = threading.local()


class Terminated(SystemExit):
    """SIGTERM was sent to the worker: the function unwinds."""


def reset() -> None:
    """Set the handlers with which a function begins."""
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
    """Have forks of this process begin without these handlers from now on."""
    os.register_at_fork(
        before=_hold_back, after_in_parent=_let_through, after_in_child=_restore_handlers
    )


def _take(signum: int, handler: _Handler) -> None:
    current = signal.getsignal(signum)
    ours, before = _ours.get(signum, (None, None))
    _ours[signum] = (handler, before if current is ours else current)
    signal.signal(signum, handler)


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    """Unwind the function, so that its `finally` blocks and context managers run. The function's
    own handler replaces this one."""
    raise Terminated(128 + signum)


def _ignore(signum: int, frame: object) -> None:
    """Do nothing. Used instead of SIG_IGN, which started programs would inherit."""


def _send_again(dropped: sys.UnraisableHookArgs) -> None:
    """Send SIGTERM again if its exception was raised where Python drops exceptions: in `__del__`,
    or in a callback of the garbage collector."""
    if not isinstance(dropped.exc_value, Terminated):
        sys.__unraisablehook__(dropped)
        return
    _thread.start_new_thread(_send_after_pause, (os.getpid(),))


def _send_after_pause(pid: int) -> None:
    # This thread must make no objects that the garbage collector tracks: a collection in it would
    # run the function's callbacks where no signal can interrupt them.
    time.sleep(AGAIN_S)
    os.kill(pid, signal.SIGTERM)


def _hold_back() -> None:
    # Both calls may run a handler that raises. The first is made before any signal is blocked.
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
