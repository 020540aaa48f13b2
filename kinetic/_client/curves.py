"""Curves of one job or of several, where people look at them: in the terminal, in a picture, in
TensorBoard.

In: series with a label each. Out: text, an image file, event files. The only module that imports
plotille, matplotlib and tensorboardX.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kinetic._client.board import text
from kinetic._core.metrics import Series
from kinetic.errors import PreflightError, UsageError

_COLORS = ("bright_blue", "bright_red", "bright_green", "bright_magenta", "bright_cyan", "yellow")
_MOST_IN_A_PICTURE = 24
_AXIS_COLUMNS = 13
"""Of plotille's vertical axis, beside the curves."""
_ARROW_COLUMNS = 10
"""Of the end of its horizontal one."""


class Curve(NamedTuple):
    """A series, and which of several it is: its job, its host."""

    label: str
    series: Series

    def points(self) -> tuple[list[float], list[float]]:
        """The numbers to draw: steps, or seconds since the first figure; without what is no
        number."""
        series = self.series
        begin = 0.0 if series.has_steps else min(series.times, default=0.0)
        where = series.steps if series.has_steps else [time - begin for time in series.times]
        drawn = [(x, y) for x, y in zip(where, series.values, strict=True) if math.isfinite(y)]
        return [float(x) for x, _ in drawn], [y for _, y in drawn]


def draw_text(name: str, curves: Sequence[Curve], *, width: int, height: int, color: bool) -> str:
    """Return a chart of one metric in characters; "" if it has no numbers."""
    import plotille

    figure = plotille.Figure()
    figure.width = max(width - _AXIS_COLUMNS - _ARROW_COLUMNS, 20)
    figure.height = max(height, 4)
    figure.origin, figure.with_colors = False, color
    figure.x_label = "step" if curves and curves[0].series.has_steps else "s"
    for kind in (int, float):
        figure.register_label_formatter(kind, functools.partial(_format_tick, name))
    names = itertools.cycle(_COLORS)
    drawn = [(curve.label, *curve.points()) for curve in curves]
    drawn = [each for each in drawn if each[1]]
    for label, x, y in drawn:
        figure.plot(x, y, label=label, lc=next(names) if color else None)
    if not drawn:
        return ""
    lowest, highest = _widen(y for each in drawn for y in each[2])
    figure.set_y_limits(lowest, highest)
    figure.set_x_limits(*_widen(x for each in drawn for x in each[1]))
    try:
        chart = figure.show(legend=False).rstrip().split("\n")
    except (ArithmeticError, ValueError):  # Their range is beyond what numbers hold.
        return f"{name}: from {lowest:g} to {highest:g}, which cannot be drawn"
    return "\n".join([name, *chart[1:], *_legend([each[0] for each in drawn], color=color)])


def _widen(numbers: Iterable[float]) -> tuple[float, float]:
    """The range of the numbers, which must not be empty."""
    values = list(numbers)
    low, high = min(values), max(values)
    if high > low:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _format_tick(
    name: str, value: float, chars: int, delta: float = 0.0, left: bool = False
) -> str:
    """A number at an axis: the one below is written from the left."""
    if left:
        return f"{value:.0f}".ljust(chars) if delta * chars > 5 else f"{value:.3g}".ljust(chars)
    return (text.size(value) if name.endswith("_bytes") else f"{value:.4g}").rjust(chars)


def _legend(labels: Sequence[str], *, color: bool) -> Iterator[str]:
    import plotille

    if len(labels) < 2:
        return
    for label, name in zip(labels, itertools.cycle(_COLORS)):
        mark = plotille.color("━━", fg=name) if color else "━━"
        yield f"{' ' * _AXIS_COLUMNS}{mark} {label}"


def draw_picture(path: str, groups: Sequence[tuple[str, Sequence[Curve]]]) -> None:
    """Draw a chart for each metric into one image, in the format that the file's name tells.

    Raises:
        PreflightError: matplotlib is not installed here.
        UsageError: the file cannot be written in that format, or there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PreflightError(
            "--plot needs matplotlib, which is not installed here: pip install matplotlib."
        ) from missing
    groups = groups[:_MOST_IN_A_PICTURE]
    columns = min(len(groups), 2 if len(groups) < 9 else 3)
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(6.0 * columns, 3.4 * rows), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    for (name, curves), place in zip(groups, places, strict=False):
        for curve in curves:
            x, y = curve.points()
            alone = {"marker": "o"} if len(x) == 1 else {}
            place.plot(x, y, label=curve.label, linewidth=1.2, **alone)
        place.set_title(_escape(name), fontsize=10)
        place.set_xlabel("step" if curves and curves[0].series.has_steps else "seconds")
        place.grid(alpha=0.3)
        if len(curves) > 1:
            place.legend(fontsize=8)
    for place in places:
        place.set_axis_off()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"The picture cannot be written to {path}: {error}") from error


def _escape(name: str) -> str:
    """A name that matplotlib does not take for a formula."""
    return name.replace("$", r"\$")


def write_events(folder: str, groups: Sequence[tuple[str, Sequence[Series]]]) -> int:
    """Write event files that TensorBoard reads, a run for each group; return how many values.

    Args:
        folder: for the runs; what it has of a run is replaced.
        groups: names of runs, such as "job-1a2b" or "job-1a2b/host-1", and their series.

    Raises:
        PreflightError: tensorboardX is not installed here.
        UsageError: the folder cannot be written.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as missing:
        raise PreflightError(
            "--tensorboard needs tensorboardX, which is not installed here: pip install "
            "tensorboardX."
        ) from missing
    count = 0
    for run, series in groups:
        place = Path(folder, run)
        try:
            for old in place.glob("events.out.tfevents.*.kinetic"):
                old.unlink()
            writer = SummaryWriter(logdir=os.fspath(place), filename_suffix=".kinetic")
        except OSError as error:
            raise UsageError(f"Event files cannot be written to {folder}: {error}") from error
        with contextlib.closing(writer):
            for metric in series:
                begin = min(metric.times, default=0.0)
                for step, time, value in zip(
                    metric.steps, metric.times, metric.values, strict=True
                ):
                    # Figures of hosts have no step: TensorBoard shows them by the second.
                    at = step if metric.has_steps else round(time - begin)
                    writer.add_scalar(metric.name, value, at, walltime=time)
                count += len(metric)
    return count
