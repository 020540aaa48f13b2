"""A second Ctrl-C, after the one that ended the wait: the process submits nothing more, and no
thread prints a traceback.

In: a function that stops submitting. Out: a signal handler.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from kinetic._client import notebook

_stops: list[Callable[[], None]] = []


def stop_on_another(stop: Callable[[], None]) -> bool:
    """Have the next Ctrl-C call `stop`. Return False if there is another handler, which stays: the
    program's or a notebook kernel's."""
    if (
        threading.current_thread() is not threading.main_thread()
        or notebook.kernel_shell() is not None
    ):
        return False
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _handle_interrupt):
        return False
    if stop not in _stops:
        _stops.append(stop)
    signal.signal(signal.SIGINT, _handle_interrupt)
    return True


def _handle_interrupt(number: int, frame: FrameType | None) -> None:
    """Once the main thread only waits for others, an exception would not be caught: then the next
    Ctrl-C ends the process at once."""
    runs = _runs_the_program(frame)
    signal.signal(signal.SIGINT, signal.default_int_handler if runs else signal.SIG_DFL)
    while _stops:
        _stops.pop()()
    if runs:
        raise KeyboardInterrupt


def _runs_the_program(frame: FrameType | None) -> bool:
    """Whether the main thread is in the program: it counts as alive while it waits for pools."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") != threading.__name__
