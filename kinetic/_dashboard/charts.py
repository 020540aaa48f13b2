"""Charts of metrics, and the training step that each host has reached."""

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
"""Most changed charts in one message. Each chart is a few kilobytes, and a training run that logs
64 metrics changes all charts with each step."""
_POINTS = 320
_TAIL = 20
"""Number of lines at the end of a log in which to search for a row with a step. The other rows have
only measurements of the host."""
_SIZES = "_bytes"
_NEARLY_INFINITE = 1e300
"""Sums and differences of larger values may be infinite."""


class Chart(NamedTuple):
    """One metric of one host.

    Attributes:
        name: name of the metric.
        last: its last value, formatted.
        low, high: the ends of the vertical axis, formatted.
        first, until: the ends of the horizontal axis, formatted.
        lines: parts without a gap, each as the points of a polyline.
        dots: positions of points with a gap on both sides.
        points: horizontal position and label of each point, shown under the mouse pointer.
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
    """Return the chart of a series that has values."""
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
        points.append((place(x, y)[0], f"{where}: {_format_value(series.name, y)}"))
    first = f"step {begin:.0f}" if few.has_steps else ""
    until = f"step {end:.0f}" if few.has_steps else text.duration(end - begin)
    return Chart(
        series.name,
        _format_value(series.name, series.values[-1]),
        _format_value(series.name, low),
        _format_value(series.name, high),
        first,
        until,
        tuple(" ".join(f"{x},{y}" for x, y in part) for part in parts if len(part) > 1),
        tuple(part[0] for part in parts if len(part) == 1),
        tuple(points),
    )


def _format_value(name: str, value: float) -> str:
    """Format a value: sizes of memory with their unit, other values with four digits."""
    if name.endswith(_SIZES) and math.isfinite(value):
        return text.size(value)
    return f"{value:.4g}"


class ChartReader:
    """Draws the charts of one host of a job, again and again while the job logs."""

    def __init__(self, store: Store, ref: JobRef, host: int) -> None:
        self._reader = MetricsReader(store, ref, hosts=(host,))
        self._drawn: dict[str, tuple[int, float]] = {}
        """Length and last time of each series when it was last drawn, in the order of drawing."""
        self._has_pending = False

    def draw_changed(self) -> list[Chart]:
        """Return all new charts, and the `AT_ONCE` changed charts that were drawn longest ago.

        Raises:
            StoreError: the store does not answer.
        """
        if not self._reader.read_new() and not self._has_pending:
            return []
        series = {one.name: one for one in self._reader.recording.series() if len(one)}
        marks = {name: (len(one), one.times[-1]) for name, one in series.items()}
        new = [name for name in series if name not in self._drawn]
        changed = [name for name, mark in self._drawn.items() if marks.get(name, mark) != mark]
        self._has_pending = len(changed) > AT_ONCE
        chosen = [*new, *changed[:AT_ONCE]]
        for name in chosen:
            self._drawn.pop(name, None)
            self._drawn[name] = marks[name]
        return [draw_chart(series[name]) for name in chosen]


class StepWatch:
    """Reads the last training step of each host from the end of the host's metrics log."""

    def __init__(self, store: Store, ref: JobRef) -> None:
        request = LogRequest(hosts=None, follow=False, tail=_TAIL, metrics=True)
        self._reader = RowsReader(store, ref, request)
        self._steps: dict[int, int] = {}

    def read(self) -> Mapping[int, int]:
        """Return the last step that each host has logged, by host.

        Raises:
            StoreError: the store does not answer.
        """
        for chunk, parts in self._reader.read():
            for rows in parts:
                if rows.steps and rows.steps[-1] != NO_STEP:
                    self._steps[chunk.host] = rows.steps[-1]
        return self._steps
