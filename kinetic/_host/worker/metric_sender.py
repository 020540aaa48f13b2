"""Rows of metrics on their way from the function to its agent, which writes them to the job's log.

In: rows, whose values may be arrays that JAX has not computed yet. Out: frames in a named pipe; the
time of a step; how full the devices are. A thread does all of it behind the function's back: it
waits for no array, but looks whether it is ready. It is not one of `threading`, so that it is
neither listed nor joined.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import select
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._core.metric_format import NO_STEP, Frame, split_rows
from kinetic._core.metric_series import DEVICE_LIMIT, DEVICE_MEMORY, STEP_TIME, FigureCadence
from kinetic._host.worker import streams
from kinetic._system import pipes

PAUSE_S = 0.25
"""How often rows are sent: a process that is killed loses those since."""
STEP_TIME_EVERY_S = 1.0
MOST_ROWS = 100_000
"""A function that logs faster than rows can be sent is held back when so many wait."""
HOLD_S = 5.0
"""But not longer: then the row is dropped."""
FULL_S = 5.0
"""How long the agent may take to read before a frame is dropped."""
RETURNED_S, RAISED_S = 10.0, 0.5
"""How long rows may take whose arrays are not ready when the function has ended: after an error
they may never be."""


class MetricRow(NamedTuple):
    """What one call has logged.

    Attributes:
        time_s: of the monotonic clock.
        step: an int, or an array of JAX with one.
        values: by name: numbers, or arrays of JAX with one each.
        waits: whether there are arrays of JAX.
    """

    time_s: float
    step: Any
    values: Mapping[str, Any]
    waits: bool


class Sender:
    """Sends the rows of this process into a pipe."""

    def __init__(self, pipe: Path) -> None:
        self._pipe = pipe
        self._epoch_s = time.time() - time.monotonic()  # A clock that is set must not move rows.
        self._rows: deque[MetricRow] = deque()
        self._sending = _thread.allocate_lock()
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        self._runs = self._is_closed = False
        self._steps = StepTimes()
        self._devices = FigureCadence(time.monotonic())
        self._told: set[str] = set()

    def add(self, row: MetricRow) -> None:
        """Take a row."""
        if len(self._rows) >= MOST_ROWS and not self._hold():
            self.say(f"{MOST_ROWS} rows wait to be sent; further ones are dropped until some are.")
            return
        self._rows.append(row)
        if not self._runs:
            self._runs = True
            _thread.start_new_thread(self._run, ())

    def _hold(self) -> bool:
        """Wait until there is room; return whether there is."""
        until = time.monotonic() + HOLD_S
        while len(self._rows) >= MOST_ROWS // 2:
            if time.monotonic() > until:
                return len(self._rows) < MOST_ROWS
            time.sleep(0.005)
        return True

    def flush(self, patience_s: float) -> None:
        """Send all rows; those whose arrays are not ready in time are dropped."""
        until = time.monotonic() + patience_s
        with self._sending:
            while self._rows:
                self._send()
                if not self._rows or time.monotonic() > until:
                    break
                time.sleep(0.005)
            if self._rows:
                self.say(
                    f"the last {len(self._rows)} rows are dropped: JAX had not computed their "
                    "values when the function ended."
                )
                self._rows.clear()
            self._write_rows(self._steps.take(is_last=True))

    def wake(self) -> None:
        """Let the thread send now."""
        with contextlib.suppress(RuntimeError):  # It is awake.
            self._wake.release()

    def close(self) -> None:
        """Let the thread end; what was not sent is dropped."""
        self._is_closed = True
        self._rows.clear()
        self.wake()

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.acquire(timeout=PAUSE_S)
            if self._rows:
                with self._sending:
                    self._send()

    def _send(self) -> None:
        """Send the rows that are ready. Nothing may escape: the thread would end."""
        try:
            rows = list(self._take_ready())
            self._write_rows([row for row in rows if row.values])
            for row in rows:
                self._steps.note(row)
            now = time.monotonic()
            self._write_rows(self._steps.take())
            if rows and self._devices.is_due(now):
                self._write_rows(_sample_devices(now))
        except Exception as error:  # noqa: BLE001
            self.say(f"values could not be kept: {type(error).__name__}: {error}")

    def _take_ready(self) -> Iterator[MetricRow]:
        while self._rows:
            row = self._rows[0]
            if row.waits:
                if not _is_ready(row):
                    return
                values = {}
                try:
                    step = row.step if type(row.step) is int else int(row.step.item())
                except Exception as error:  # noqa: BLE001 - deleted, or what JAX raised
                    self._tell_of_array("step", error)
                    self._rows.popleft()
                    continue
                for name, value in row.values.items():
                    try:
                        values[name] = value if type(value) is float else float(value.item())
                    except Exception as error:  # noqa: BLE001
                        self._tell_of_array(name, error)
                row = row._replace(step=step, values=values)
            self._rows.popleft()
            yield row

    def _tell_of_array(self, name: str, error: Exception) -> None:
        lost = "has been deleted" in str(error)
        why = (
            "its array was deleted, as it was donated to a later step, before it could be fetched. "
            "Log a value that is not donated"
            if lost
            else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
        self.say(f"a value of {name!r} is lost: {why}.", key=f"lost {name}")

    def _write_rows(self, rows: list[MetricRow]) -> None:
        # Opened each time: the function may close all descriptors that it does not know.
        if not rows or (fd := pipes.connect(self._pipe)) is None:
            return
        try:
            for frame in _group_rows(rows, self._epoch_s):
                for part in split_rows(frame, select.PIPE_BUF):
                    if not _write_whole(fd, part.encode()):
                        self.say("values are lost: this host's agent does not read them.")
                        return
        finally:
            os.close(fd)

    def say(self, text: str, *, key: str = "") -> None:
        """Say this on stderr, once."""
        if (key or text) not in self._told:
            self._told.add(key or text)
            streams.say(f"kinetic.log: {text}")


def _write_whole(fd: int, data: bytes) -> bool:
    """Write a frame as a whole; return False if nobody reads."""
    until = time.monotonic() + FULL_S
    while time.monotonic() < until:
        try:
            return os.write(fd, data) > 0
        except BlockingIOError:
            time.sleep(0.002)  # poll() calls a pipe writable that has room for less
        except OSError:
            return False
    return False


class StepTimes:
    """How long steps take, from the times at which they were logged.

    Rows that name other metrics may count something else as steps, such as epochs: those of the
    kind that is logged most often count. A step that is not greater begins anew, as after a restore
    in the same process.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], int] = {}
        self._kind: tuple[str, ...] = ()
        self._first: tuple[tuple[str, ...], int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._is_named = False

    def note(self, row: MetricRow) -> None:
        """Take a row that was logged."""
        kind = tuple(row.values)
        self._is_named |= STEP_TIME in row.values
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        if count > self._counts.get(self._kind, 0):
            self._kind = kind
        if kind != self._kind:
            return
        if self._first is None or self._first[0] != kind or row.step < (self._last or (0,))[0]:
            self._first, self._last = (kind, row.step, row.time_s), (row.step, row.time_s)
        elif row.step > self._first[1]:
            self._last = row.step, row.time_s

    def take(self, *, is_last: bool = False) -> list[MetricRow]:
        """Return a row with the mean time of the steps since the last one, if it is time for
        one."""
        if self._first is None or self._last is None or self._is_named:
            return []
        (kind, begin, began_s), (step, time_s) = self._first, self._last
        if step <= begin or not (is_last or time_s - began_s >= STEP_TIME_EVERY_S):
            return []
        self._first = kind, step, time_s
        return [MetricRow(time_s, step, {STEP_TIME: (time_s - began_s) / (step - begin)}, False)]


def _is_ready(row: MetricRow) -> bool:
    """Whether no array of the row has to be waited for; those that are lost raise when they are
    fetched."""
    for value in (row.step, *row.values.values()):
        if hasattr(value, "is_ready"):
            with contextlib.suppress(Exception):
                # JAX dereferences null if an array that delete() was called on is asked.
                if not (value.is_deleted() or value.is_ready()):
                    return False
    return True


def _group_rows(rows: list[MetricRow], epoch_s: float) -> Iterator[Frame]:
    """Yield rows that follow each other and name the same as one frame."""
    frame: Frame | None = None
    for row in rows:
        names = tuple(row.values)
        if frame is None or frame.names != names:
            if frame is not None:
                yield frame
            frame = Frame(names, array("d"), array("q"), [array("d") for _ in names])
        frame.times.append(epoch_s + row.time_s)
        frame.steps.append(row.step)
        for column, value in zip(frame.values, row.values.values(), strict=True):
            column.append(value)
    if frame is not None:
        yield frame


def _sample_devices(now: float) -> list[MetricRow]:
    """How full the memory of the fullest device is, where JAX runs and tells."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    with contextlib.suppress(Exception):
        if bridge is None or not bridge.backends_are_initialized():
            return []
        stats = [device.memory_stats() or {} for device in sys.modules["jax"].local_devices()]
        used = [
            (each["bytes_in_use"], each.get("bytes_limit", math.nan))
            for each in stats
            if "bytes_in_use" in each
        ]
        if used:
            most, limit = max(used)
            return [MetricRow(now, NO_STEP, {DEVICE_MEMORY: most, DEVICE_LIMIT: limit}, False)]
    return []
