"""The metrics that a job logs with `kinetic.log`: lines of a file, and the series in them.

In: lines. Out: rows; series by metric and host. Pure.

Each line is a JSON object with rows that name the same metrics, by columns. Numbers that are not
finite are written as Python's `json` does (NaN, Infinity):

    {"times": [1732800000.25, …], "steps": [7, …], "values": {"loss": [0.5, …]}}

Times are seconds since the epoch. A row that belongs to no step has `NO_STEP`. Any program that
knows the file can append to it, so readers skip lines that `kinetic.log` would not write.

A step that was trained twice is shown once: if an attempt continues from a checkpoint, its rows
replace those of earlier attempts from its first step on. Within an attempt the last value of a step
counts.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from kinetic._core.values import dataclass

VARIABLE = "KINETIC_METRICS_FILE"
"""The file to append to, in the environment of a function and of the programs that it starts."""
NO_STEP = -1
LONGEST_NAME_BYTES = 200
LONGEST_LINE_BYTES = 8 << 20
"""Limit of a line in bytes; readers drop the beginning of a longer line."""
MOST_LINE_CELLS = 20_000
_LATEST_S = 1e12
_FIRST_S, _LATER_S = 1.0, 10.0

HOST_PREFIX = "host/"
"""Prefix of metrics that measure hosts; they come last."""
MEMORY, PROCESSORS = "host/memory_bytes", "host/cpu_cores"
"""Memory of the function's process; processors that it and its children keep busy."""
DEVICE_MEMORY, DEVICE_LIMIT = "host/device_memory_bytes", "host/device_memory_limit_bytes"
"""Memory in use, and its limit, on the host's fullest device, as JAX reports them."""
SPAN_PREFIX = "host/span/"
"""Prefix of metrics that only the goodput needs: seconds that ended at the time of the row."""
STEPS_SPAN, COMPILING_SPAN = f"{SPAN_PREFIX}steps", f"{SPAN_PREFIX}compiling"
RESTORING_SPAN, SAVING_SPAN = f"{SPAN_PREFIX}restoring", f"{SPAN_PREFIX}saving"
STEP_COUNT = f"{SPAN_PREFIX}count"
"""Number of steps in a span of steps, the last of which is the row's step."""
STEP_TIME = "step_time_s"
STEP_RATE = "steps_per_s"
"""Name of a metric that is computed from the step time, and not stored."""

Column: TypeAlias = "array[Any]"


class Rows(NamedTuple):
    """Rows that name the same metrics.

    Attributes:
        names: names of the metrics.
        times: a time for each row, in seconds since the epoch.
        steps: a step for each row, or `NO_STEP`.
        values: a column for each name.
    """

    names: tuple[str, ...]
    times: Column
    steps: Column
    values: Sequence[Column]

    def encode(self) -> bytes:
        """Encode the rows as lines of at most `MOST_LINE_CELLS` cells."""
        most_rows = max(MOST_LINE_CELLS // (2 + len(self.names)), 1)
        return b"".join(
            self._encode(slice(begin, begin + most_rows))
            for begin in range(0, len(self.times), most_rows)
        )

    def _encode(self, part: slice) -> bytes:
        columns = zip(self.names, self.values, strict=True)
        document = {
            "times": [round(time, 6) for time in self.times[part]],
            "steps": self.steps[part].tolist(),
            "values": {name: column[part].tolist() for name, column in columns},
        }
        return f"{json.dumps(document, separators=(',', ':'))}\n".encode()


class RowDecoder:
    """A decoder that takes the bytes of a file in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Rows]:
        """Return the rows of complete lines; successive rows with the same names are joined."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) < LONGEST_LINE_BYTES else b""
        lines = [line for line in lines if line]
        try:  # One call for all lines: a million lines take a second.
            return _join_rows(json.loads(b"[%s]" % b",".join(lines)))
        except (ValueError, RecursionError):
            return [rows for line in lines for rows in _read_line(line)]


def _read_line(line: bytes) -> list[Rows]:
    """Return the rows of one line; [] if it is damaged."""
    try:
        return _join_rows([json.loads(line)])
    except (ValueError, RecursionError):
        return []


def _join_rows(documents: Sequence[Any]) -> list[Rows]:
    """Convert documents to rows; successive rows with the same names are joined.

    Raises:
        ValueError: a document is damaged.
    """
    joined: list[Rows] = []
    try:
        for names, group in itertools.groupby(
            documents, lambda document: tuple(document["values"])
        ):
            times, steps = list[float](), list[int]()
            columns = [list[float]() for _ in names]
            for document in group:
                times += document["times"]
                steps += document["steps"]
                for column, values in zip(columns, document["values"].values(), strict=True):
                    column.extend(values)
                    if len(column) != len(times) or len(steps) != len(times):
                        raise ValueError("columns differ in length")
            arrays = [array("d", column) for column in columns]
            joined.append(Rows(_clean(names), array("d", times), array("q", steps), arrays))
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"damaged rows: {error}") from None
    for rows in joined:
        times_ok = not rows.times or (min(rows.times) >= 0 and max(rows.times) < _LATEST_S)
        if not times_ok or math.isnan(sum(rows.times)) or min(rows.steps, default=0) < NO_STEP:
            raise ValueError("times or steps out of range")
    return joined


def _clean(names: tuple[str, ...]) -> tuple[str, ...]:
    """Replace characters that could control a terminal. Names with such characters are accepted,
    because Python versions differ on which characters are printable.

    Raises:
        ValueError: a name is empty or too long.
    """
    for name in names:
        if not name or len(name.encode(errors="replace")) > LONGEST_NAME_BYTES:
            raise ValueError("a name is empty or too long")
    return tuple("".join(c if c.isprintable() else "\ufffd" for c in name) for name in names)


@dataclass(frozen=True, repr=False)
class Series:
    """One metric of one host, in columns of the same length; users see it as a `Metric`."""

    name: str
    host: int
    steps: Column
    times: Column
    values: Column
    attempts: Column

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        points = "1 value" if len(self) == 1 else f"{len(self)} values"
        return f"<Series {self.name!r} of host {self.host}: {points}>"

    @property
    def has_steps(self) -> bool:
        """True if the values belong to steps."""
        return bool(self.steps) and self.steps[0] != NO_STEP

    def decimate(self, most: int) -> Series:
        """Return the series reduced to about `most` points: the least and the greatest value of
        each stretch, and one NaN of a stretch with any, so that no peak is lost."""
        if len(self) <= max(most, 4):
            return self
        indices, buckets = {0, len(self) - 1}, max(most // 2 - 1, 1)
        for number in range(buckets):
            begin = number * len(self) // buckets
            indices |= _find_extremes(self.values, begin, (number + 1) * len(self) // buckets)
        return self.take(sorted(indices))

    def take(self, indices: Iterable[int]) -> Series:
        """Return the series with only these points."""
        chosen = list(indices)
        return replace(
            self,
            steps=array("q", [self.steps[i] for i in chosen]),
            times=array("d", [self.times[i] for i in chosen]),
            values=array("d", [self.values[i] for i in chosen]),
            attempts=array("q", [self.attempts[i] for i in chosen]),
        )


class _Columns:
    """Points of one metric of one host in one attempt."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("q"), array("d"), array("d")

    def select_points(self, limit: float) -> list[int] | slice:
        """Return the indices of the points to show: each step below the limit once."""
        steps = self.steps
        if not steps or steps[0] == NO_STEP:
            return slice(0, len(steps))
        if all(map(operator.lt, steps, itertools.islice(steps, 1, None))):
            return slice(0, bisect.bisect_left(steps, limit))
        last = {step: index for index, step in enumerate(steps) if step < limit}
        return [last[step] for step in sorted(last)]


class FigureCadence:
    """The schedule for measuring a host: not in the first second, because short jobs need no
    figures, then often, and finally every 10 s, so that long jobs store few figures."""

    def __init__(self, now: float) -> None:
        self._begun, self._due_at = now, now + _FIRST_S

    def is_due(self, now: float) -> bool:
        """True if figures are due now; schedules the next ones if so."""
        if now < self._due_at:
            return False
        self._due_at = now + min(max((now - self._begun) / 60.0, _FIRST_S), _LATER_S) * 0.95
        return True


class Recording:
    """All metrics that a job has logged so far.

    Attributes:
        names: names of the metrics, in the order in which they were first logged.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._columns: dict[tuple[str, int], dict[int, _Columns]] = {}

    def add(self, host: int, attempt: int, rows: Rows) -> None:
        """Add rows that a host has logged."""
        for name, values in zip(rows.names, rows.values, strict=True):
            if name.startswith(SPAN_PREFIX):
                continue
            attempts = self._columns.get((name, host))
            if attempts is None:
                self.names.setdefault(name)
                attempts = self._columns[name, host] = {}
            if (columns := attempts.get(attempt)) is None:
                columns = attempts[attempt] = _Columns()
            columns.steps.extend(rows.steps)
            columns.times.extend(rows.times)
            columns.values.extend(values)

    def series(self, *, repeats: bool = False) -> list[Series]:
        """Return a series for each metric and host, in the order of `names` and then by host.

        Args:
            repeats: also include steps that a later attempt, or a later row, has logged again.
        """
        names = sorted(self.names, key=lambda name: name.startswith(HOST_PREFIX))
        order = {name: index for index, name in enumerate(names)}
        keys = sorted(self._columns, key=lambda key: (order[key[0]], key[1]))
        limits = {} if repeats else self._find_limits()
        joined = [self._join(*key, limits.get(key[0], {}), repeats=repeats) for key in keys]
        series = list[Series]()
        for one in joined:
            series.append(one)
            if one.name == STEP_TIME and (STEP_RATE, one.host) not in self._columns:
                rates = array("d", [1.0 / value if value else math.inf for value in one.values])
                series.append(replace(one, name=STEP_RATE, values=rates))
        return series

    def _find_limits(self) -> Mapping[str, Mapping[int, float]]:
        """Return, for each metric and attempt, the first step that a later attempt has logged."""
        first: dict[str, dict[int, float]] = {}
        for (name, _), attempts in self._columns.items():
            steps = first.setdefault(name, {})
            for attempt, columns in attempts.items():
                least = min(columns.steps, default=math.inf)
                steps[attempt] = min(steps.get(attempt, math.inf), least)
        for steps in first.values():
            limit = math.inf
            for attempt in sorted(steps, reverse=True):
                steps[attempt], limit = limit, min(limit, steps[attempt])
        return first

    def _join(self, name: str, host: int, limits: Mapping[int, float], *, repeats: bool) -> Series:
        joined = _Columns()
        numbers = array("q")
        for attempt, columns in sorted(self._columns[name, host].items()):
            chosen: list[int] | slice = slice(0, len(columns.steps))
            if not repeats:
                chosen = columns.select_points(limits.get(attempt, math.inf))
            for to, of in zip(_list_arrays(joined), _list_arrays(columns), strict=True):
                to.extend(of[chosen] if isinstance(chosen, slice) else (of[i] for i in chosen))
            numbers.extend([attempt] * (len(joined.steps) - len(numbers)))
        return Series(name, host, joined.steps, joined.times, joined.values, numbers)


def _list_arrays(columns: _Columns) -> Iterator[Column]:
    yield columns.steps
    yield columns.times
    yield columns.values


def _find_extremes(values: Column, begin: int, end: int) -> set[int]:
    """Return the indices of the least and the greatest value, and of the first NaN."""
    part = values[begin:end]
    if not part:
        return set()
    if not math.isnan(sum(part)):
        return {begin + part.index(min(part)), begin + part.index(max(part))}
    numbers = [(value, index) for index, value in enumerate(part) if not math.isnan(value)]
    odd = [index for index, value in enumerate(part) if math.isnan(value)][:1]
    ends = {min(numbers)[1], max(numbers)[1]} if numbers else set()
    return {begin + index for index in ends.union(odd)}
