"""`kinetic.log`: numbers of a training, step by step.

A call costs microseconds: it waits neither for JAX nor for a disk. A thread appends the rows to the
file of this host in its attempt, which the host's agent keeps (see `metric_sender`).
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
from typing import Any, SupportsFloat, SupportsIndex

from kinetic._core.metrics import LONGEST_NAME_BYTES, VARIABLE
from kinetic._core.tracebacks import hide_frames
from kinetic._host.worker import metric_sender, streams, worlds
from kinetic._host.worker.metric_sender import MetricRow, Sender
from kinetic._in_job import slices
from kinetic.errors import UsageError, UsageTypeError, a_type

MOST_NAMES = 10_000
"""Further ones are dropped: a name for each step would be a mistake."""

_Kind = Callable[[str, Any], Any]
"""Makes a number of a value of one type, or returns an array of JAX as it is."""
_monotonic = time.monotonic


class _Log:
    """What this process knows of what it logs."""

    def __init__(self) -> None:
        path = slices.read_variable(VARIABLE)
        # A child of the worker may end without exit handlers: in os._exit, or with its pool.
        is_child = os.getpgid(0) != os.getpid()
        self.sender = Sender(Path(path), at_once=is_child) if path else None
        self.names: set[str] = set()
        self.is_told = False

    def take_name(self, name: str) -> bool:
        """Check a name that is new; return whether there is room for it."""
        _check_name(name)
        if len(self.names) < MOST_NAMES:
            self.names.add(name)
            return True
        if self.sender is not None:
            self.sender.say(
                f"there are more than {MOST_NAMES} names; those that come later are dropped. Give "
                "a metric one name, and let the step count."
            )
        return False

    def tell_outside(self) -> None:
        """Say, once, that this is no job."""
        if not self.is_told:
            self.is_told = True
            streams.say(
                "kinetic.log: this is no job of kinetic, so nothing is kept. In a job, `kinetic "
                "jobs metrics` and handle.metrics() show it."
            )


_log: _Log | None = None
_STEPS = 1 << 63
"""Steps are kept as numbers of 64 bits, with a sign."""


def log(*, step: SupportsIndex, **values: SupportsFloat) -> None:
    """Keep numbers of a step with the job: `kinetic jobs metrics` and `handle.metrics()` show them
    while it runs and afterwards.

    Arrays of JAX with one element are fetched in the background once they are computed; a call
    takes some microseconds, and waits for nothing. Any host may log; each has its own curves, and
    those of host 0 are shown first. A step that is trained again after a restore is shown once, as
    it was trained last. Outside of a job it says once that nothing is kept.

    Args:
        step: of the training, from 0.
        values: numbers by name: ints, floats (also NaN and infinity), arrays with one element. Give
            names with a slash as `**{"train/loss": loss}`.

    Raises:
        UsageTypeError: a value is no number, as a string or an array of several.
        UsageError: a name is empty, too long or not printable, or the step is negative
            or has more than 63 bits.
    """
    now, state = _monotonic(), _log or _begin()
    try:
        waits, has_room = False, True
        if type(step) is not int or not 0 <= step < _STEPS:
            step = _check_step(step)
            waits = type(step) is not int
        for name, value in values.items():
            if name not in state.names:
                has_room = state.take_name(name) and has_room
            kind = type(value)
            if kind is not float:
                number = (_KINDS.get(kind) or _kind_of(name, value))(name, value)
                values[name] = number
                waits = waits or type(number) is not float
    except (UsageError, UsageTypeError) as error:
        with hide_frames:
            raise error from None
    if state.sender is None:
        return state.tell_outside()
    if not has_room:
        values = {name: value for name, value in values.items() if name in state.names}
    state.sender.add(MetricRow(now, step, values, waits))
    return None


def mark_step(step: int) -> None:
    """Note that a step is done, for the time that steps take; nothing outside of a job."""
    state = _log or _begin()
    if state.sender is not None:
        state.sender.add(MetricRow(_monotonic(), step, {}, False))


def send_now() -> None:
    """Send what was logged, without waiting: a step that is saved will not be logged again."""
    if _log is not None and _log.sender is not None:
        _log.sender.wake()


def _begin() -> _Log:
    global _log
    _log = _Log()
    if (pools := sys.modules.get("multiprocessing.util")) is not None:
        # Its children end without `atexit`.
        pools.Finalize(None, _finish, args=(True,), exitpriority=0)
    return _log


def _forget_in_fork() -> None:
    global _log
    _log = None  # Its locks may be held by a thread that the fork does not have.


def _finish(returned: bool) -> None:
    if _log is not None and _log.sender is not None:
        patience_s = metric_sender.RETURNED_S if returned else metric_sender.RAISED_S
        _log.sender.flush(patience_s)


os.register_at_fork(after_in_child=_forget_in_fork)
worlds.on_end(_finish)
atexit.register(_finish, True)  # in a program that the function has started


# -- what may be logged ----------------------------------------------------------------------------


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
                raise UsageError(f"kinetic.log(step={step}): a step is from 0 to {_STEPS - 1}.")
            return int(step)
    raise UsageTypeError(f"kinetic.log: a step is an int, not {_describe(step)}.")


def _check_name(name: str) -> None:
    if not name or not name.isprintable() or name != name.strip():
        raise UsageError(
            f"kinetic.log: {name!r} cannot name a metric: a name has printable characters, and no "
            "blanks at its ends."
        )
    if len(name.encode(errors="replace")) > LONGEST_NAME_BYTES:
        raise UsageError(
            f"kinetic.log: a name has at most {LONGEST_NAME_BYTES} bytes: {name[:40]!r}... has "
            f"{len(name.encode(errors='replace'))}."
        )


def _kind_of(name: str, value: Any) -> _Kind:
    """How values of this type are made numbers.

    Raises:
        UsageTypeError: they are none.
    """
    kind: _Kind
    if _is_array_of_jax(value):
        kind = _take_array
    elif isinstance(value, (str, bytes, bytearray)):
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is no number. Log numbers, and print text."
        )
    elif hasattr(value, "shape") and hasattr(value, "item"):
        kind = _fetch_item
    elif isinstance(value, Real) or (hasattr(value, "__float__") and not hasattr(value, "__len__")):
        kind = _make_float
    else:
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is no number. Log each number under a name "
            'of its own, as in kinetic.log(step=step, **{"train/loss": loss}).'
        )
    kind(name, value)  # it may be refused
    if len(_KINDS) < 1000:  # a program that makes types without end is no reason to keep them
        _KINDS[type(value)] = kind
    return kind


def _is_array_of_jax(value: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array)


def _take_array(name: str, value: Any) -> Any:
    """An array of JAX, which is fetched later."""
    if not hasattr(value, "is_ready"):
        _refuse_traced(name, value)
        raise UsageTypeError(f"kinetic.log({name}=…): {_describe(value)} is no number.")
    if value.size != 1:
        _refuse_shape(name, value.shape)
    return value


def _refuse_traced(name: str, value: Any) -> None:
    if isinstance(value, sys.modules["jax"].core.Tracer):
        raise UsageTypeError(
            f"kinetic.log({name}=…) was called while JAX traces a function (jit, grad, scan …), "
            "where values are not known yet. Return the value from that function, and log it "
            "outside."
        )


def _fetch_item(name: str, value: Any) -> float:
    """The number in an array or scalar of NumPy, or of another library."""
    if math.prod(value.shape) != 1:
        _refuse_shape(name, tuple(value.shape))
    item = value.item()
    if isinstance(item, (str, bytes, complex)):
        raise UsageTypeError(f"kinetic.log({name}=…): {_describe(item)} is no real number.")
    return _make_float(name, item)


def _refuse_shape(name: str, shape: tuple[int, ...]) -> None:
    raise UsageTypeError(
        f"kinetic.log({name}=…): an array of shape {shape} is no single number. Log its mean, or "
        "each element under a name of its own."
    )


def _make_float(name: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError) as error:
        raise UsageTypeError(
            f"kinetic.log({name}=…): {_describe(value)} is no number: {error}"
        ) from None


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{a_type(value)} ({text if len(text) <= 40 else text[:37] + '...'})"


_KINDS: dict[type, _Kind] = {int: _make_float, bool: _make_float}
"""By type, so that a type is looked at once."""
