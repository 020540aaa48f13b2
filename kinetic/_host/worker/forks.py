"""Children that the function forks: they close the worker's descriptors, and exit instead of
returning into the worker's code. Their signals are handled by `signals`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from kinetic._host.channel import Channel
from kinetic._host.worker import report, streams
from kinetic.errors import SetupFailed, text_of


def end_descriptors(channel: Channel, stacks_fd: int, stacks_signal: int) -> None:
    """Have forks of this process close these descriptors from now on, and ignore the signal for
    stacks."""

    def close() -> None:
        # Any other handler is the function's own.
        if signal.getsignal(stacks_signal) in (signal.SIG_DFL, None):
            faulthandler.unregister(stacks_signal)
        with contextlib.suppress(OSError):
            channel.close()
            os.close(stacks_fd)

    os.register_at_fork(after_in_child=close)


def run(act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `act`, which runs user code. If `act` forks, the child ends when `act` returns."""
    own_pid, error = os.getpid(), None
    try:
        return act(*args, **kwargs)
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != own_pid:
            end(error)


def end(error: BaseException | None) -> NoReturn:
    """Exit a child that the function forked, so that it does not continue as the worker."""
    if isinstance(error, SetupFailed):  # A module raised an exception when it was imported.
        error = error.__cause__
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            streams.say(text_of(error.code))
    elif error is not None:
        code = 1
        streams.say(report.traceback_of(error).rstrip())
    streams.flush()
    os._exit(code & 0xFF)
