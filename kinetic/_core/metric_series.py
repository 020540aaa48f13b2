"""What a job has logged, by name, host and attempt; and as one curve for each name and host.

In: frames (see `metric_format`). Out: series. Pure.

A step that was trained twice shows once: where an attempt goes on from a checkpoint, what earlier
ones have logged from its first step on is left out. Within an attempt the last value of a step
counts.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kinetic._core.metric_format import NO_STEP, Column, Frame
from kinetic._core.values import dataclass

OF_HOSTS = "host/"
"""How figures of hosts begin: they come last."""
MEMORY, PROCESSORS = "host/memory_bytes", "host/cpu_cores"
"""Of the process that runs the function, and how many processors it and its children keep busy."""
DEVICE_MEMORY, DEVICE_LIMIT = "host/device_memory_bytes", "host/device_memory_limit_bytes"
"""Of the device of the host that has the least left, as JAX tells it."""
STEP_TIME = "step_time_s"
STEP_RATE = "steps_per_s"
"""Follows from the step time, and is not stored."""


_FIRST_S, _LATER_S = 1.0, 10.0


@dataclass(frozen=True, repr=False)
class Series:
    """One metric of one host, in columns of the same length: what `Metric` is to users."""

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
        """Whether its values belong to steps."""
        return bool(self.steps) and self.steps[0] != NO_STEP

    def decimate(self, most: int) -> Series:
        """Return it with at most about so many points: of each stretch the least and the greatest
        value, and one that is not a number if there is any, so that no peak is lost."""
        if len(self) <= max(most, 4):
            return self
        kept, buckets = {0, len(self) - 1}, max(most // 2 - 1, 1)
        for number in range(buckets):
            begin = number * len(self) // buckets
            kept |= _find_extremes(self.values, begin, (number + 1) * len(self) // buckets)
        return self.take(sorted(kept))

    def take(self, indices: Iterable[int]) -> Series:
        """Return it with only these points."""
        kept = list(indices)
        return replace(
            self,
            steps=array("q", [self.steps[i] for i in kept]),
            times=array("d", [self.times[i] for i in kept]),
            values=array("d", [self.values[i] for i in kept]),
            attempts=array("q", [self.attempts[i] for i in kept]),
        )


class _Columns:
    """What one host has logged of a metric in one attempt."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("q"), array("d"), array("d")

    def find_kept(self, limit: float) -> list[int] | slice:
        """Which of them show: below the limit, each step once."""
        steps = self.steps
        if not steps or steps[0] == NO_STEP:
            return slice(0, len(steps))
        if all(map(operator.lt, steps, itertools.islice(steps, 1, None))):
            return slice(0, bisect.bisect_left(steps, limit))
        last = {step: index for index, step in enumerate(steps) if step < limit}
        return [last[step] for step in sorted(last)]


class FigureCadence:
    """When the next figures of a host are due: often at first, later rarely, so that those of a job
    of days are few; never in the first moment, as short jobs need none."""

    def __init__(self, now: float) -> None:
        self._begun, self._due_at = now, now + _FIRST_S

    def is_due(self, now: float) -> bool:
        """Whether it is time again; if so, it is not for a while."""
        if now < self._due_at:
            return False
        self._due_at = now + min(max((now - self._begun) / 60.0, _FIRST_S), _LATER_S) * 0.95
        return True


class Recording:
    """All that a job has logged so far.

    Attributes:
        names: of the metrics, in the order in which they were first logged.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._columns: dict[tuple[str, int], dict[int, _Columns]] = {}

    def add(self, host: int, attempt: int, frame: Frame) -> None:
        """Take more of what a host has logged."""
        for name, values in zip(frame.names, frame.values, strict=True):
            attempts = self._columns.get((name, host))
            if attempts is None:
                self.names.setdefault(name)
                attempts = self._columns[name, host] = {}
            if (columns := attempts.get(attempt)) is None:
                columns = attempts[attempt] = _Columns()
            columns.steps.extend(frame.steps)
            columns.times.extend(frame.times)
            columns.values.extend(values)

    def series(self, *, repeats: bool = False) -> list[Series]:
        """Return a series for each metric and host, by name in their order and then by host.

        Args:
            repeats: also have steps that another attempt, or a later row, has logged again.
        """
        names = sorted(self.names, key=lambda name: name.startswith(OF_HOSTS))
        order = {name: place for place, name in enumerate(names)}
        keys = sorted(self._columns, key=lambda key: (order[key[0]], key[1]))
        limits = {} if repeats else self._find_limits()
        found = [self._join(*key, limits.get(key[0], {}), repeats=repeats) for key in keys]
        return [
            each
            for one in found
            for each in ([one, _invert(one)] if self._tells_rate(one) else [one])
        ]

    def _tells_rate(self, series: Series) -> bool:
        return series.name == STEP_TIME and (STEP_RATE, series.host) not in self._columns

    def _find_limits(self) -> Mapping[str, Mapping[int, float]]:
        """For each metric and attempt: the first step that a later attempt has logged."""
        first: dict[str, dict[int, float]] = {}
        for (name, _), attempts in self._columns.items():
            known = first.setdefault(name, {})
            for attempt, columns in attempts.items():
                least = min(columns.steps, default=math.inf)
                known[attempt] = min(known.get(attempt, math.inf), least)
        for known in first.values():
            limit = math.inf
            for attempt in sorted(known, reverse=True):
                known[attempt], limit = limit, min(limit, known[attempt])
        return first

    def _join(self, name: str, host: int, limits: Mapping[int, float], *, repeats: bool) -> Series:
        joined = _Columns()
        numbers = array("q")
        for attempt, columns in sorted(self._columns[name, host].items()):
            kept: list[int] | slice = slice(0, len(columns.steps))
            if not repeats:
                kept = columns.find_kept(limits.get(attempt, math.inf))
            for to, of in zip(_arrays_of(joined), _arrays_of(columns), strict=True):
                to.extend(of[kept] if isinstance(kept, slice) else (of[i] for i in kept))
            numbers.extend([attempt] * (len(joined.steps) - len(numbers)))
        return Series(name, host, joined.steps, joined.times, joined.values, numbers)


def _arrays_of(columns: _Columns) -> Iterator[Column]:
    yield columns.steps
    yield columns.times
    yield columns.values


def _invert(step_time: Series) -> Series:
    rates = array("d", [1.0 / value if value else math.inf for value in step_time.values])
    return replace(step_time, name=STEP_RATE, values=rates)


def _find_extremes(values: Column, begin: int, end: int) -> set[int]:
    """Indices of the least and the greatest value, and of the first that is not a number."""
    part = values[begin:end]
    if not part:
        return set()
    if not math.isnan(sum(part)):
        return {begin + part.index(min(part)), begin + part.index(max(part))}
    numbers = [(value, index) for index, value in enumerate(part) if not math.isnan(value)]
    odd = [index for index, value in enumerate(part) if math.isnan(value)][:1]
    ends = {min(numbers)[1], max(numbers)[1]} if numbers else set()
    return {begin + index for index in ends.union(odd)}
