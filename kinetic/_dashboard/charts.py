"""Metrics as charts, and on which step each host is.

In: what hosts have logged. Out: charts as points of an SVG, steps by host.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from kinetic._backends.base import LogRequest
from kinetic._client.board import text
from kinetic._client.metrics import MetricsReader, RowsReader
from kinetic._core.metrics import NO_STEP

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kinetic._core.metrics import Series
    from kinetic._core.ref import JobRef
    from kinetic._store.base import Store

WIDTH, HEIGHT = 320, 96
AT_ONCE = 8
"""Charts that are drawn again in one message: each is some kilobytes, and a training that logs 64
metrics changes all of them with each step."""
_POINTS = 320
_TAIL = 20
"""So many lines before the end of a log there are rows with a step, not only figures of a host."""
_SIZES = "_bytes"
_NEARLY_INFINITE = 1e300
"""Sums and differences of greater values may be infinite."""


class Chart(NamedTuple):
    """One metric of one host.

    Attributes:
        name: of the metric.
        last: its last value, for people.
        low, high: the ends of the vertical axis, for people.
        first, until: the ends of the horizontal axis, for people.
        lines: parts without a gap, each as the points of a polyline.
        dots: points between gaps, where they are.
        points: what a pointer shows, by its place from the left.
    """

    name: str
    last: str
    low: str
    high: str
    first: str
    until: str
    lines: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    points: tuple[tuple[float, str], ...]


def draw_chart(series: Series) -> Chart:
    """Return the chart of a series that has values. Pure."""
    few = series.decimate(_POINTS)
    xs = [float(x) for x in (few.steps if few.has_steps else few.times)]
    begin, end = min(xs), max(xs)
    finite = [value for value in few.values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = 0.25 if max(-low, high) > _NEARLY_INFINITE else 1.0
    top, y_span = high * scale, (high * scale - low * scale)
    room = y_span * 0.06 or abs(top) * 0.05 or 1.0
    x_span, y_span = (end - begin) or 1.0, y_span + 2 * room

    def place(x: float, y: float) -> tuple[float, float]:
        at = (x - begin) / x_span * WIDTH, (top + room - y * scale) / y_span * HEIGHT
        return round(at[0], 1), round(at[1], 1)

    parts: list[list[tuple[float, float]]] = [[]]
    points: list[tuple[float, str]] = []
    for x, y in zip(xs, few.values, strict=True):
        if not math.isfinite(y):
            parts.append([])
            continue
        parts[-1].append(place(x, y))
        where = f"{x:.0f}" if few.has_steps else text.duration(x - begin)
        points.append((place(x, y)[0], f"{where}: {_number(series.name, y)}"))
    first = f"step {begin:.0f}" if few.has_steps else ""
    until = f"step {end:.0f}" if few.has_steps else text.duration(end - begin)
    return Chart(
        series.name,
        _number(series.name, series.values[-1]),
        _number(series.name, low),
        _number(series.name, high),
        first,
        until,
        tuple(" ".join(f"{x},{y}" for x, y in part) for part in parts if len(part) > 1),
        tuple(part[0] for part in parts if len(part) == 1),
        tuple(points),
    )


def _number(name: str, value: float) -> str:
    """A value for people: memory in its unit, the rest with four digits."""
    if name.endswith(_SIZES) and math.isfinite(value):
        return text.size(value)
    return f"{value:.4g}"


class ChartReader:
    """The charts of one host of a job, while it logs."""

    def __init__(self, store: Store, ref: JobRef, host: int) -> None:
        self._reader = MetricsReader(store, ref, hosts=(host,))
        self._drawn: dict[str, tuple[int, float]] = {}
        """Length and last time of each series as it was drawn last, in the order of drawing."""
        self._is_behind = False

    def look(self) -> list[Chart]:
        """Return the charts that were never drawn, and of those that have changed the `AT_ONCE`
        that were drawn longest ago.

        Raises:
            StoreError: the store does not answer.
        """
        if not self._reader.read_new() and not self._is_behind:
            return []
        series = {one.name: one for one in self._reader.recording.series() if len(one)}
        marks = {name: (len(one), one.times[-1]) for name, one in series.items()}
        new = [name for name in series if name not in self._drawn]
        changed = [name for name, mark in self._drawn.items() if marks.get(name, mark) != mark]
        self._is_behind = len(changed) > AT_ONCE
        chosen = [*new, *changed[:AT_ONCE]]
        for name in chosen:
            self._drawn.pop(name, None)
            self._drawn[name] = marks[name]
        return [draw_chart(series[name]) for name in chosen]


class StepWatch:
    """On which step each host of a job is, by what it logs; only the end of each log is read."""

    def __init__(self, store: Store, ref: JobRef) -> None:
        request = LogRequest(hosts=None, follow=False, tail=_TAIL, metrics=True)
        self._reader = RowsReader(store, ref, request)
        self._steps: dict[int, int] = {}

    def look(self) -> Mapping[int, int]:
        """Return the last step that each host has logged, by host.

        Raises:
            StoreError: the store does not answer.
        """
        for chunk, parts in self._reader.read():
            for rows in parts:
                if rows.steps and rows.steps[-1] != NO_STEP:
                    self._steps[chunk.host] = rows.steps[-1]
        return self._steps
