"""The call of the user's function, and how it is reported, in whatever state the function left the
interpreter.

In: the function with its arguments. Out: the message for the agent; the pickled value or exception
as a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from kinetic._host.channel import Channel, Message
from kinetic._host.worker import forks, interpreter, report, signals, worlds
from kinetic._host.worker.start import Start
from kinetic._system import processes
from kinetic.errors import KineticError

REPORT_TRIES = 4
"""How often reporting the end is tried: the function's tracers and threads may interrupt it."""
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function and its arguments."""
_End = tuple[Any, BaseException | None]
_NOTHING: _End = (None, None)


def run(channel: Channel, call: Call, start: Start) -> Message:
    """Call the function and report how it ended, in whatever state it left the interpreter."""
    func, args, kwargs = call
    own_pid, end = os.getpid(), [_NOTHING]
    try:
        _call(end, func, *args, **kwargs)
        os.getpid()  # What a signal that came before raises, it raises after a call: here.
    except BaseException:  # noqa: BLE001 - a tracer of the function may raise here; `end` is set already
        pass
    for attempt in range(REPORT_TRIES):
        try:
            if end[0][1] is None and hasattr(type(end[0][0]), "__await__"):
                _call(end, _await, end[0][0])
            value, error = end[0]
            if os.getpid() != own_pid:
                forks.end(error)
            try:
                worlds.finish(returned=report.has_succeeded(error))
            except KineticError as unfinished:  # A save that it had begun has failed.
                value, error = end[0] = (None, unfinished)
            signals.silence()
            processes.RESERVE.release()
            if channel.is_whole():
                channel.send(report.ends_with(error, value))
            return (
                report.report_value(value, start)
                if error is None
                else report.report_error(error, start)
            )
        except BaseException as broken:  # noqa: BLE001 - a tracer or a thread of the function's can raise anywhere
            if attempt == REPORT_TRIES - 1:
                return report.report_failed(end[0][1], broken)
            interpreter.disarm_tracers()
    raise AssertionError  # for the type checker: the last turn returns


def _call(end: list[_End], func: Any, /, *args: Any, **kwargs: Any) -> None:
    """Call, and store the end without another call: the function may have left a profiler that
    raises on calls and returns."""
    try:
        end[0] = (func(*args, **kwargs), None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the function's
        end[0] = (None, error)


def call_and_await(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the function returns; of a coroutine function, once that was awaited."""
    value = forks.run(func, *args, **kwargs)
    return _await(value) if hasattr(type(value), "__await__") else value


def _await(value: Any) -> Any:
    import asyncio

    async def outer() -> Any:
        return await value

    return asyncio.run(outer())
