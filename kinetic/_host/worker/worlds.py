"""What has to be done when the function ends: checkpoints that are still being saved in the
background are waited for, as Python waits for threads at the end of a script.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from kinetic._host.worker import streams

_SIGNALING_THREAD = "_SignalingThread"
_RUNNER = "AsyncRunner"
"""What runs the saves of Orbax's newer interface, one thread for each."""
_LOOK_S = 0.002
_SAVES_S, _TELL_AFTER_S = 3600.0, 10.0
"""How long a save may go on after the function has returned, and when that is told."""
SAVERS = ("async_save", "save_finalize")
"""Orbax's threads that write checkpoints, by name."""
WRITERS = (
    *SAVERS,
    "kinetic-local-checkpoint",
    "kinetic-checkpoint-end",
    "kinetic-saving-mark",
)
"""They, and ours."""
_ending: list[Callable[[bool], object]] = []


def on_end(finish: Callable[[bool], object]) -> None:
    """Have this called when the function has ended, before that is told, with whether it
    returned."""
    _ending.append(finish)


def finish(*, returned: bool) -> None:
    """Call all of `on_end`. Of a function that returned, checkpoints that are being saved in the
    background are waited for first.

    Raises:
        KineticError: something was not finished.
    """
    if returned:
        _wait_for_savers()
    with contextlib.ExitStack() as calls:
        for call in _ending:
            calls.callback(call, returned)


def _wait_for_savers() -> None:
    """As Python waits at the end of a script: not for daemons."""
    began, is_told = time.monotonic(), False
    while any(each.name in SAVERS and not each.daemon for each in threading.enumerate()):
        waited_s = time.monotonic() - began
        if waited_s >= _TELL_AFTER_S and not is_told:
            streams.say("kinetic: the function has returned, and a checkpoint is still being saved")
            is_told = True
        if waited_s >= _SAVES_S:
            streams.say("kinetic: a checkpoint was still being saved after an hour, and is cut off")
            return
        time.sleep(_LOOK_S)


def settle(limit_s: float) -> bool:
    """Wait until nothing of this process writes a checkpoint any more, and return whether that is
    so. Without the other hosts none can be committed."""
    deadline = time.monotonic() + limit_s
    # Not by `join`: Python takes a thread for ended if an exception ended somebody's wait for it.
    while any(map(_is_writer, threading.enumerate())):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def is_saving() -> bool:
    """Whether Orbax saves in the background. It says so itself, too: after an error for ever, and
    asking it starts JAX's backends."""
    return any(thread.name in SAVERS for thread in threading.enumerate())


def _is_writer(thread: threading.Thread) -> bool:
    if thread.name in WRITERS or type(thread).__name__ == _SIGNALING_THREAD:
        return True
    runner: Any = getattr(getattr(thread, "_target", None), "__self__", None)
    if type(runner).__name__ != _RUNNER:
        return False
    import asyncio

    return bool(asyncio.all_tasks(runner._loop))  # It lives on until its result is asked for.
