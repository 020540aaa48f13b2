"""The call of the user's function, and the worker's last message about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from kinetic._host.channel import Channel, Message, WorkerEvent
from kinetic._host.worker import forks, report, signals, worlds
from kinetic._host.worker.signals import Terminated
from kinetic._host.worker.start import Start

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""


def run(channel: Channel, call: Call, start: Start) -> Message:
    """Call the function; return the last message for the agent."""
    func, args, kwargs = call
    own_pid = os.getpid()
    value, error = None, None
    now = {"time": time.time(), "monotonic": time.monotonic()}
    channel.send({"event": WorkerEvent.STARTED, **now})
    try:
        value = func(*args, **kwargs)
        if hasattr(type(value), "__await__"):
            value = _await(value)
    except BaseException as raised:  # noqa: BLE001 - any exception is the function's
        error = raised
    if os.getpid() != own_pid:
        forks.end(error)
    value, error = _finish(value, error)
    signals.silence()
    channel.send(report.ends_with(error, value))
    return report.report_value(value, start) if error is None else report.report_error(error, start)


def _finish(value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
    """Wait for saves in the background; if one fails, the function has failed. SIGTERM does not
    interrupt a save: the agent kills this process after the grace period."""
    while True:
        try:
            worlds.finish(returned=report.has_succeeded(error))
        except Terminated:
            continue
        except BaseException as unfinished:  # noqa: BLE001 - raised by the function's alarm, for example
            return None, unfinished
        return value, error


def call_and_await(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the function's value; await it if it is a coroutine."""
    value = forks.run(func, *args, **kwargs)
    return _await(value) if hasattr(type(value), "__await__") else value


def _await(value: Any) -> Any:
    import asyncio

    async def outer() -> Any:
        return await value

    return asyncio.run(outer())
