"""`kinetic.log`: numbers of a training run, step by step.

A call costs microseconds: it waits neither for JAX nor for a disk. A thread appends the rows to the
file of this host and attempt, which the host's agent sends to the store (see `metric_sender`).
"""

from __future__ import annotations

import atexit
import math
import operator
import os
import sys
import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any, Never, SupportsFloat, SupportsIndex

from kinetic._core.metrics import LONGEST_NAME_BYTES, NO_STEP, VARIABLE
from kinetic._core.tracebacks import hide_frames
from kinetic._host.worker import metric_sender, streams, worlds
from kinetic._host.worker.metric_sender import MetricRow, Sender
from kinetic._in_job import slices
from kinetic.errors import UsageError, UsageTypeError, a_type

MOST_NAMES = 10_000
"""Most names per process; further names are dropped. Only a faulty program reaches this limit."""

_Converter = Callable[[str, Any], Any]
"""Converts a value of one type to a float. A JAX array is returned unchanged, for the sender."""
_monotonic = time.monotonic


class _Log:
    """The logging state of this process: its sender and the names in use."""

    def __init__(self) -> None:
        path = slices.read_variable(VARIABLE)
        # A child process may end without exit handlers: by os._exit, or when its pool ends.
        is_child = os.getpgid(0) != os.getpid()
        self.sender = Sender(Path(path), at_once=is_child) if path else None
        self.names: set[str] = set()
        self.has_warned = False

    def add_name(self, name: str) -> bool:
        """Check and register a new name; return False if the limit of names is reached."""
        _check_name(name)
        if len(self.names) < MOST_NAMES:
            self.names.add(name)
            return True
        if self.sender is not None:
            self.sender.say(
                f"more than {MOST_NAMES} names of metrics are in use, so metrics with further "
                "names are dropped. Give a metric the same name at all steps."
            )
        return False

    def warn_outside_job(self) -> None:
        """Print, at most once, that nothing is recorded outside a job."""
        if not self.has_warned:
            self.has_warned = True
            streams.say(
                "kinetic.log: this process is not part of a job, so nothing is recorded. In a job, "
                "`kinetic jobs metrics` and handle.metrics() show what was logged."
            )


_log: _Log | None = None
_ACCEPTED = "Log an int, a float, or an array with one element."
_STEPS = 1 << 63
"""Upper bound of steps, which are stored as signed 64-bit integers."""


def log(*unnamed: Never, step: SupportsIndex, **values: SupportsFloat) -> None:
    """Record metrics of a training step with the job.

    `kinetic jobs metrics` and `handle.metrics()` show them while the job runs and afterwards. A
    call takes microseconds and waits for nothing: JAX arrays are fetched in the background once
    they are computed. Every host may log and has its own curves. If a step is logged again after a
    restore, the last values count. Outside a job nothing is recorded.

    Args:
        step: Number of the training step, from 0.
        values: Numbers by name: ints, floats (NaN and infinity too), arrays of any shape with one
            element. Write a name with a slash as `**{"train/loss": loss}`.

    Raises:
        UsageTypeError: A value is not a number, or has no name.
        UsageError: A name is empty, too long or not printable, or the step is negative or does not
            fit in 63 bits.

    Example:
        ```python
        kinetic.log(step=step, loss=loss, learning_rate=1e-3)
        ```
    """
    if unnamed:
        with hide_frames:
            raise UsageTypeError(
                f"kinetic.log takes numbers by name; got {a_type(unnamed[0])} without one. Write "
                "kinetic.log(step=step, loss=loss), or **values for a dict of numbers."
            )
    now, state = _monotonic(), _log or _begin()
    try:
        waits, has_room = False, True
        if type(step) is not int or not 0 <= step < _STEPS:
            step = _check_step(step)
            waits = type(step) is not int
        for name, value in values.items():
            if name not in state.names:
                has_room = state.add_name(name) and has_room
            kind = type(value)
            if kind is not float:
                number = (_CONVERTERS.get(kind) or _choose_converter(name, value))(name, value)
                values[name] = number
                waits = waits or type(number) is not float
    except (UsageError, UsageTypeError) as error:
        with hide_frames:
            raise error from None
    if state.sender is None:
        return state.warn_outside_job()
    if not has_room:
        values = {name: value for name, value in values.items() if name in state.names}
    state.sender.add(MetricRow(now, step, values, waits))
    return None


def mark_step(step: int) -> None:
    """Record the time at which a step ended; a no-op outside a job."""
    state = _log or _begin()
    if state.sender is not None:
        state.sender.add(MetricRow(_monotonic(), step, {}, False))


def note_span(name: str, began_s: float) -> None:
    """Record that something took from `began_s` (monotonic time) until now; no-op outside jobs."""
    now, state = _monotonic(), _log or _begin()
    if state.sender is not None and now - began_s >= metric_sender.SHORTEST_SPAN_S:
        state.sender.add(MetricRow(now, NO_STEP, {name: now - began_s}, False))


def send_now() -> None:
    """Start sending the logged rows, without waiting. Call it before a save: if the process dies
    later, the steps before the save are not run again, so they would never be logged."""
    if _log is not None and _log.sender is not None:
        _log.sender.wake()


def _begin() -> _Log:
    global _log
    _log = _Log()
    if (pools := sys.modules.get("multiprocessing.util")) is not None:
        # Children of multiprocessing end without running `atexit` handlers.
        pools.Finalize(None, _finish, args=(True,), exitpriority=0)
    return _log


def _forget_in_fork() -> None:
    global _log
    _log = None  # A thread that no longer exists may hold its locks.


def _finish(returned: bool) -> None:
    if _log is not None and _log.sender is not None:
        patience_s = metric_sender.RETURNED_S if returned else metric_sender.RAISED_S
        _log.sender.flush(patience_s)


def forget() -> None:
    """Forget the file of a call that has ended: the next call in this process has another file."""
    global _log
    _log = None


os.register_at_fork(after_in_child=_forget_in_fork)
worlds.on_end(_finish)
atexit.register(_finish, True)  # A program that the function started has no `on_end`.


# -- converting values ----------------------------------------------------------------------------


def _check_step(step: Any) -> Any:
    if _is_array_of_jax(step):
        _refuse_traced("step", step)
        if step.size == 1 and step.dtype.kind in "iu":
            return step
    elif not isinstance(step, bool):
        try:
            step = operator.index(step)
        except TypeError:
            pass
        else:
            if not 0 <= step < _STEPS:
                raise UsageError(f"kinetic.log: step= must be from 0 to {_STEPS - 1}; got {step}.")
            return int(step)
    raise UsageTypeError(f"kinetic.log: step= must be an int; got {_describe(step)}.")


def _check_name(name: str) -> None:
    if not name or not name.isprintable() or name != name.strip():
        raise UsageError(
            "kinetic.log: the name of a metric must have printable characters, and no blanks at "
            f"its ends; got {name!r}."
        )
    if len(name.encode(errors="replace")) > LONGEST_NAME_BYTES:
        raise UsageError(
            f"kinetic.log: the name of a metric must have at most {LONGEST_NAME_BYTES} bytes; "
            f"{name[:40]!r}... has {len(name.encode(errors='replace'))}."
        )


def _choose_converter(name: str, value: Any) -> _Converter:
    """Return the converter for the type of this value, and store it for the next values.

    Raises:
        UsageTypeError: The value is not a number.
    """
    convert: _Converter
    if _is_array_of_jax(value):
        convert = _accept_array
    elif isinstance(value, (str, bytes, bytearray)):
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is not a number. Log numbers, print text."
        )
    elif hasattr(value, "shape") and hasattr(value, "item"):
        convert = _fetch_item
    elif isinstance(value, Real) or (hasattr(value, "__float__") and not hasattr(value, "__len__")):
        convert = _make_float
    elif hasattr(value, "__len__"):
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is not a number. Log each of its numbers "
            "under a name of its own."
        )
    else:
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is not a real number. {_ACCEPTED}"
        )
    convert(name, value)  # Raises for a bad value, before its type is remembered.
    if len(_CONVERTERS) < 1000:  # A program may create types without end.
        _CONVERTERS[type(value)] = convert
    return convert


def _is_array_of_jax(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def _accept_array(name: str, value: Any) -> Any:
    """Return a JAX array unchanged: the sender fetches its one element once it is computed."""
    if not hasattr(value, "is_ready"):
        _refuse_traced(name, value)
        raise UsageTypeError(f"kinetic.log({name}=…): {_describe(value)} is not a number.")
    if value.size != 1:
        _refuse_shape(name, value.shape)
    return value


def _refuse_traced(name: str, value: Any) -> None:
    if isinstance(value, sys.modules["jax"].core.Tracer):
        raise UsageTypeError(
            f"kinetic.log({name}=…) was called while JAX traces a function (jit, grad, scan …), "
            "where values are not known yet. Return the value from that function and log it "
            "outside."
        )


def _fetch_item(name: str, value: Any) -> float:
    """Return the number in an array or scalar of NumPy, or of another library."""
    if math.prod(value.shape) != 1:
        _refuse_shape(name, tuple(value.shape))
    item = value.item()
    if isinstance(item, (str, bytes, complex)):
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(item)} is not a real number. {_ACCEPTED}"
        )
    return _make_float(name, item)


def _refuse_shape(name: str, shape: tuple[int, ...]) -> None:
    raise UsageTypeError(
        f"kinetic.log({name}=…): an array of shape {shape} is not a single number. Log its mean, "
        "or each element under a name of its own."
    )


def _make_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError) as error:
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is not a number: {error}"
        ) from None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{a_type(value)} ({text if len(text) <= 40 else text[:37] + '...'})"


_CONVERTERS: dict[type, _Converter] = {int: _make_float, bool: _make_float}
"""The converter of each type that has been logged."""
