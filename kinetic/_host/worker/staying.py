"""How a worker stays for the next attempt of an elastic job: it gets free of a world that has lost
a host, leaves it, and is made ready for another call.

In: a byte string from the agent, while the function runs; what the next attempt starts with. Out:
a function that unwinds; a process without a world, whose modules and variables are as they were.

A collective whose peer is gone, or a barrier that nobody else comes to, holds the main thread in
native code. There it holds no lock of Python's, so another thread can hang up on the coordination
service and shut the connections to the other hosts: what waits for them raises.
"""

from __future__ import annotations

import _thread
import contextlib
import copy
import gc
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from kinetic._host.worker import coordination, joining, worlds
from kinetic._host.worker.start import Start
from kinetic._system import sockets

ATTEMPT_BYTES = 4
"""Of an attempt's number, as the agent writes it."""
SETTLE_S = 3.0
"""How long threads that write a checkpoint may take to see that it cannot be committed."""
AGAIN_S = 0.02
"""How often connections are shut, until the function has ended: it may open others."""
IMPORTS = "<frozen importlib._bootstrap>"
"""What the code that imports modules calls its file."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""


_interrupted: list[str] = []
"""For each time that the function was: the module that it was importing, or ""."""


class CannotStay(Exception):
    """Another attempt could not run in this process."""


class _Function:
    """The function that the main thread is about to call, for SIGTERM."""

    def __init__(self) -> None:
        self._thread = _thread.get_ident()
        self._handler = signal.getsignal(signal.SIGTERM)
        self._times = len(_interrupted)

    def interrupt(self) -> None:
        """Send SIGTERM again unless it was handled, or would be by the function's own handler: one
        that comes just before a call that waits does not wake it."""
        if len(_interrupted) == self._times and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.pthread_kill(self._thread, signal.SIGTERM)


class Unblocker:
    """Frees the function when the agent asks for it.

    Attributes:
        is_free: whether it has, in this attempt.
    """

    def __init__(self, fd: int) -> None:
        """`fd`: to read numbers of attempts from; -1 for a worker of one attempt."""
        self._fd = fd
        self._lock = _thread.allocate_lock()
        self._attempt = 0
        self._hosts: set[str] = set()
        self._function = _Function()
        self.is_free = False

    @property
    def may_stay(self) -> bool:
        """Whether this worker may be asked to stay."""
        return self._fd >= 0

    def listen(self) -> None:
        """Start the thread. Not one of `threading`, so that it is neither listed nor joined."""
        if self.may_stay:
            _thread.start_new_thread(self._listen, ())

    def begin(self, start: Start) -> None:
        """The function is about to be called."""
        self._function = _Function()
        self._attempt, self._hosts, self.is_free = start.attempt, {start.world.address}, False

    def end(self) -> None:
        """The function has ended."""
        with self._lock:
            self._attempt = 0

    @contextlib.contextmanager
    def keep_connections_shut(self) -> Iterator[None]:
        """Meanwhile, shut the connections to the other hosts again: XLA's client waits for its
        threads as it ends, and they wait for those if they have opened some since the function
        ended."""
        left, over = _thread.allocate_lock(), _thread.allocate_lock()

        def shut() -> None:
            pause_s = AGAIN_S if self.is_free else SETTLE_S + 1.0
            try:
                while not left.acquire(timeout=pause_s):
                    sockets.shut_between(self._hosts)
                    pause_s = AGAIN_S
            finally:
                over.release()

        left.acquire()
        over.acquire()
        _thread.start_new_thread(shut, ())
        try:
            yield
        finally:
            left.release()
            over.acquire()  # or it would shut those of the next attempt

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # The function has closed it.
            while data := os.read(self._fd, ATTEMPT_BYTES):
                self._free(int.from_bytes(data))

    def _free(self, attempt: int) -> None:
        while True:
            with self._lock:
                if attempt != self._attempt:
                    return
                if self.is_free:
                    self._function.interrupt()
                else:
                    coordination.hang_up()
                self.is_free = True
                sockets.shut_between(self._hosts)
            time.sleep(AGAIN_S)


class RetainedCall:
    """The call, for another attempt: the same function, the arguments as they were sent."""

    def __init__(self, call: Call) -> None:
        self._func, args, kwargs = call
        self._arguments: Any = None
        with contextlib.suppress(Exception):  # Copying runs the user's code.
            self._arguments = copy.deepcopy((args, kwargs))

    def renew_call(self) -> Call:
        """Return what to call."""
        args, kwargs = copy.deepcopy(self._arguments)
        return self._func, args, kwargs

    @property
    def is_whole(self) -> bool:
        """Whether the arguments could be copied."""
        return self._arguments is not None


def note_interrupted(frame: types.FrameType | None) -> None:
    """The function will unwind from `frame`.

    A module that it was importing is imported from the beginning next time, and much of what a
    module does can be done once per process: JAX's register their dialects.
    """
    importing = ""
    while frame is not None:
        if frame.f_code.co_filename == IMPORTS:
            importing = frame.f_locals.get("name", importing)
        frame = frame.f_back
    _interrupted.append(importing)


def leave(kept: RetainedCall) -> None:
    """Leave the world, and forget it.

    Raises:
        CannotStay: the next attempt would not find what a new process has.
    """
    if torn := next(filter(None, _interrupted), ""):
        raise CannotStay(f"the import of {torn} was interrupted")
    if not kept.is_whole:
        raise CannotStay("the function's arguments cannot be copied")
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    coordination.hang_up()
    if not worlds.settle(SETTLE_S):
        raise CannotStay("a checkpoint is still being written")
    coordination.forget_effects()
    gc.collect()
    if count := coordination.count_shared_arrays():
        raise CannotStay(
            f"variables that outlive the function hold {count} arrays of the devices it had"
        )
    joining.release()
    try:
        if missing := worlds.forget():
            raise CannotStay(f"this Orbax has no {missing[0]}")
        coordination.hold_backends()
        coordination.leave()
        if coordination.has_backends():
            raise CannotStay("a thread of the function started JAX's backends meanwhile")
    except CannotStay:
        raise
    except Exception as error:
        raise CannotStay(
            f"JAX could not leave its world: {type(error).__name__}: {error}"
        ) from error
