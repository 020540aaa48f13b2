"""The end of a function that saves checkpoints in the background: wait for the saves, as Python
waits for threads at the end of a script.
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
"""Class that runs the saves of Orbax's newer interface, each in its own thread."""
_POLL_S = 0.002
_SAVES_S, _SAY_AFTER_S = 3600.0, 10.0
"""Seconds that saves may take after the function has returned, and until a notice names them."""
SAVERS = ("async_save", "save_finalize")
"""Orbax's threads that write checkpoints, by name."""
WRITERS = (
    *SAVERS,
    "kinetic-local-checkpoint",
    "kinetic-checkpoint-end",
    "kinetic-saving-mark",
)
"""Threads of Orbax and kinetic that write checkpoints, by name."""
_ending: list[Callable[[bool], object]] = []


def on_end(finish: Callable[[bool], object]) -> None:
    """Have `finish` called before the function's end is reported, with True if it returned."""
    _ending.append(finish)


def finish(*, returned: bool) -> None:
    """Call all callbacks of `on_end`; first, if the function returned, wait for checkpoints that
    are being saved in the background.

    Raises:
        KineticError: a callback could not finish its work.
    """
    if returned:
        _wait_for_savers()
    with contextlib.ExitStack() as calls:
        for call in _ending:
            calls.callback(call, returned)


def _wait_for_savers() -> None:
    """Wait for Orbax's threads, except daemons: Python does not wait for those either."""
    began, has_said = time.monotonic(), False
    while any(each.name in SAVERS and not each.daemon for each in threading.enumerate()):
        waited_s = time.monotonic() - began
        if waited_s >= _SAY_AFTER_S and not has_said:
            streams.say(
                "kinetic: the function has returned, but a checkpoint is still being saved: "
                "waiting for at most an hour"
            )
            has_said = True
        if waited_s >= _SAVES_S:
            streams.say(
                "kinetic: a checkpoint was still being saved an hour after the function returned, "
                "so the save was ended. That checkpoint is incomplete; earlier ones are whole."
            )
            return
        time.sleep(_POLL_S)


def settle(limit_s: float) -> bool:
    """Wait until no thread of this process writes a checkpoint; return False after `limit_s`
    seconds. If other hosts are lost, a save may never end."""
    deadline = time.monotonic() + limit_s
    # Not by `join`: after an interrupted `join`, Python takes a running thread for ended.
    while any(map(_is_writer, threading.enumerate())):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def is_saving() -> bool:
    """True if Orbax saves in the background. Orbax's own function for this starts JAX's backends,
    and returns True forever after an error."""
    return any(thread.name in SAVERS for thread in threading.enumerate())


def _is_writer(thread: threading.Thread) -> bool:
    if thread.name in WRITERS or type(thread).__name__ == _SIGNALING_THREAD:
        return True
    runner: Any = getattr(getattr(thread, "_target", None), "__self__", None)
    if type(runner).__name__ != _RUNNER:
        return False
    import asyncio

    return bool(asyncio.all_tasks(runner._loop))  # The thread ends when its result is read.
