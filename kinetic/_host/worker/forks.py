"""Children that the function forks: they hold nothing of the worker's open, and end where they come
back into its code.

In: calls of the user's code. Out: what they returned, in the process that called. Their signals are
the business of `signals`.
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
    """Close these in children that this process forks from now on, which do not write their stacks
    for the agent either."""

    def close() -> None:
        if signal.getsignal(stacks_signal) in (signal.SIG_DFL, None):  # else it is the function's
            faulthandler.unregister(stacks_signal)
        with contextlib.suppress(OSError):
            channel.close()
            os.close(stacks_fd)

    os.register_at_fork(after_in_child=close)


def run(act: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call what runs the user's code; a child that it forks and that comes back ends here."""
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
    """Exit a child that the function forked and that returned from it: it must not continue as the
    worker."""
    if isinstance(error, SetupFailed):  # What a module raised when it was imported.
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
