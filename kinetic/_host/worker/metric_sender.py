"""Append the metrics that a process logs to the file of its host, in a thread.

The thread writes four times a second, all new rows in one write, because several processes may
append to the file. It does not wait for arrays of JAX, but writes their rows once they are ready,
and adds the time of a step and the memory of the devices. It is not a `threading` thread, so that
it is neither listed nor joined.
"""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._core.metrics import (
    COMPILING_SPAN,
    DEVICE_LIMIT,
    DEVICE_MEMORY,
    NO_STEP,
    STEP_COUNT,
    STEP_TIME,
    STEPS_SPAN,
    FigureCadence,
    Rows,
)
from kinetic._host.worker import streams

PAUSE_S = 0.25
"""Seconds between writes. A killed process loses the rows since the last write."""
STEP_TIME_EVERY_S = 1.0
MOST_ROWS = 100_000
"""Largest number of rows that wait to be written: the function blocks when it is reached."""
HOLD_S = 5.0
"""Longest time, in seconds, that the function blocks; then rows are dropped until there is room."""
SHORTEST_SPAN_S = 1e-3
_COMPILE_EVENTS = "/jax/core/compile/"
"""Prefix of JAX's events for tracing, lowering and compiling, each with its duration."""
RETURNED_S, RAISED_S = 10.0, 0.5
"""Seconds for arrays to become ready after the function has returned, or raised: after an error
they may never be ready."""


class MetricRow(NamedTuple):
    """The values of one call of `kinetic.log`.

    Attributes:
        time_s: monotonic time of the call.
        step: an int, or an array of JAX with one element.
        values: numbers, or arrays of JAX with one element, by name.
        waits: the row has arrays of JAX.
    """

    time_s: float
    step: Any
    values: Mapping[str, Any]
    waits: bool


_compiles: deque[MetricRow] = deque(maxlen=MOST_ROWS // 10)
"""Spans in which JAX compiled. A sender writes them, so jobs that log nothing do without them."""


def watch_compiles() -> None:
    """Note from now on when JAX compiles, with JAX's own events; call it once JAX is imported."""
    import jax.monitoring

    jax.monitoring.register_event_duration_secs_listener(_note_duration)


def _note_duration(event: str, seconds: float, **_: object) -> None:
    if event.startswith(_COMPILE_EVENTS) and seconds >= SHORTEST_SPAN_S:
        now = time.monotonic()
        with contextlib.suppress(IndexError):  # A sender may take rows meanwhile.
            while _compiles[-1].time_s >= now - seconds:
                _compiles.pop()  # Part of this span: JAX compiles functions within functions.
        _compiles.append(MetricRow(now, NO_STEP, {COMPILING_SPAN: seconds}, False))


def _take_compiles() -> list[MetricRow]:
    rows = []
    with contextlib.suppress(IndexError):
        while True:
            rows.append(_compiles.popleft())
    return rows


class Sender:
    """Appends the rows of this process to a file."""

    def __init__(self, path: Path, *, at_once: bool = False) -> None:
        """Append to `path`. With `at_once`, write numbers in the call that logs them."""
        self._path = path
        self._at_once = at_once
        self._epoch_s = time.time() - time.monotonic()  # Rows ignore later clock changes.
        self._rows: deque[MetricRow] = deque()
        self._sending = _thread.allocate_lock()
        self._wake = _thread.allocate_lock()
        self._wake.acquire()
        self._runs = self._is_stuck = self._is_cut = False
        self._steps = StepTimes()
        self._devices = FigureCadence(time.monotonic())
        self._warnings: set[str] = set()

    def add(self, row: MetricRow) -> None:
        """Queue a row, or drop it if too many wait."""
        if len(self._rows) >= MOST_ROWS and not self._await_room():
            self.say(
                f"calls come faster than their values can be written ({MOST_ROWS} are waiting), so "
                "the values of new calls are lost. Log less often."
            )
            return
        self._rows.append(row)
        if self._at_once and not row.waits:
            with self._sending:
                self._send()
        elif not self._runs:
            self._runs = True
            _thread.start_new_thread(self._run, ())

    def _await_room(self) -> bool:
        """Wait up to `HOLD_S` seconds until half of the rows are written; return True if there is
        room for a row. If no row was written, do not wait again until there is room."""
        until = time.monotonic() + (0.0 if self._is_stuck else HOLD_S)
        while len(self._rows) >= MOST_ROWS // 2 and time.monotonic() < until:
            time.sleep(0.005)
        self._is_stuck = len(self._rows) >= MOST_ROWS
        return not self._is_stuck

    def flush(self, patience_s: float) -> None:
        """Write all rows; drop rows whose arrays are not ready within `patience_s` seconds."""
        until = time.monotonic() + patience_s
        with self._sending:
            while self._rows:
                self._send()
                if not self._rows or time.monotonic() > until:
                    break
                time.sleep(0.005)
            if self._rows:
                calls = "call" if len(self._rows) == 1 else f"{len(self._rows)} calls"
                self.say(
                    f"the values of the last {calls} are lost, because JAX had not computed them "
                    "when the function ended. Call jax.block_until_ready on them before it returns."
                )
                self._rows.clear()
            self._write_rows(self._steps.take(is_last=True) + _take_compiles())

    def wake(self) -> None:
        """Have the thread write now."""
        with contextlib.suppress(RuntimeError):  # The thread is already awake.
            self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire(timeout=PAUSE_S)
            if self._rows:
                with self._sending:
                    self._send()

    def _send(self) -> None:
        """Write the rows that are ready. An exception must not escape: it would end the thread."""
        try:
            rows = list(self._take_ready())
            self._write_rows([row for row in rows if row.values])
            for row in rows:
                if row.step != NO_STEP:
                    self._steps.note(row)
            now = time.monotonic()
            self._write_rows(self._steps.take() + _take_compiles())
            if rows and self._devices.is_due(now):
                self._write_rows(_sample_devices(now))
        except Exception as error:  # noqa: BLE001
            self.say(f"metrics could not be written: {type(error).__name__}: {error}")

    def _take_ready(self) -> Iterator[MetricRow]:
        while self._rows:
            row = self._rows[0]
            if row.waits:
                if not _is_ready(row):
                    return
                values = {}
                try:
                    step = row.step if type(row.step) is int else int(row.step.item())
                except Exception as error:  # noqa: BLE001 - deleted, or any error of JAX
                    self._report_lost("step", error)
                    self._rows.popleft()
                    continue
                for name, value in row.values.items():
                    try:
                        values[name] = value if type(value) is float else float(value.item())
                    except Exception as error:  # noqa: BLE001
                        self._report_lost(name, error)
                row = row._replace(step=step, values=values)
            self._rows.popleft()
            yield row

    def _report_lost(self, name: str, error: Exception) -> None:
        deleted = "has been deleted" in str(error)
        why = (
            "its array was donated to a later step and deleted before it could be read. Log a "
            "value that is not donated"
            if deleted
            else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
        self.say(f"a value of {name!r} is lost: {why}.", key=f"lost {name}")

    def _write_rows(self, rows: list[MetricRow]) -> None:
        if not rows:
            return
        lead = b"\n" if self._is_cut else b""
        data = lead + b"".join(part.encode() for part in _group_rows(rows, self._epoch_s))
        try:
            # Open it for each write: the function may close all descriptors.
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(fd, data)
            finally:
                os.close(fd)
        except FileNotFoundError:  # The job was removed.
            return
        except OSError as error:
            self.say(f"metrics are lost: {self._path} cannot be written to: {error.strerror}.")
            return
        self._is_cut = written < len(data)
        if self._is_cut:
            self.say(f"metrics are lost: the disk of {self._path} is full. Free some space.")

    def say(self, text: str, *, key: str = "") -> None:
        """Print a warning on stderr, once for each text or `key`."""
        if (key or text) not in self._warnings:
            self._warnings.add(key or text)
            streams.say(f"kinetic.log: {text}")


class StepTimes:
    """Measures the time of a step, from the times at which steps were logged.

    Rows with other metrics may count something else as steps, such as epochs, so only rows of the
    kind that is logged most often count. A smaller step starts the measurement again, as after a
    restore in the same process.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], int] = {}
        self._kind: tuple[str, ...] = ()
        self._first: tuple[tuple[str, ...], int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._is_named = False

    def note(self, row: MetricRow) -> None:
        """Count the steps between logged rows, for the rows that `take` returns."""
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
        """If a row is due, return it: the time and the number of the steps since the last such row,
        and their mean time unless the function logs that itself."""
        if self._first is None or self._last is None:
            return []
        (kind, begin, began_s), (step, time_s) = self._first, self._last
        if step <= begin or not (is_last or time_s - began_s >= STEP_TIME_EVERY_S):
            return []
        self._first, span_s, count = (kind, step, time_s), time_s - began_s, step - begin
        mean = {} if self._is_named else {STEP_TIME: span_s / count}
        return [MetricRow(time_s, step, mean | {STEPS_SPAN: span_s, STEP_COUNT: count}, False)]


def _is_ready(row: MetricRow) -> bool:
    """True if all arrays of the row can be read without waiting, or are deleted: reading those
    raises."""
    for value in (row.step, *row.values.values()):
        if hasattr(value, "is_ready"):
            with contextlib.suppress(Exception):
                # `is_ready` of a deleted array makes JAX dereference null.
                if not (value.is_deleted() or value.is_ready()):
                    return False
    return True


def _group_rows(rows: list[MetricRow], epoch_s: float) -> Iterator[Rows]:
    """Yield runs of rows that have the same names, as columns."""
    for names, group in itertools.groupby(rows, lambda row: tuple(row.values)):
        same = list(group)
        yield Rows(
            names,
            array("d", [epoch_s + row.time_s for row in same]),
            array("q", [row.step for row in same]),
            [array("d", [row.values[name] for row in same]) for name in names],
        )


def _sample_devices(now: float) -> list[MetricRow]:
    """Return a row with the memory of the fullest device; no row if JAX does not run, or its
    devices do not report memory."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    with contextlib.suppress(Exception):
        if bridge is None or not bridge.backends_are_initialized():
            return []
        stats = [device.memory_stats() or {} for device in sys.modules["jax"].local_devices()]
        used = [
            (stats["bytes_in_use"], stats.get("bytes_limit", math.nan))
            for stats in stats
            if "bytes_in_use" in stats
        ]
        if used:
            most, limit = max(used)
            return [MetricRow(now, NO_STEP, {DEVICE_MEMORY: most, DEVICE_LIMIT: limit}, False)]
    return []
