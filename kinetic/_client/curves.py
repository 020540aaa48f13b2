"""Curves of jobs' metrics, as text for the terminal, an image file, or TensorBoard's event files.

The only module that imports plotille, matplotlib and tensorboardX.
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
"""Width of plotille's vertical axis and its labels."""
_ARROW_COLUMNS = 10
"""Width of the label at the end of plotille's horizontal axis."""


class Curve(NamedTuple):
    """A series of values to draw, with its label: the job or the host."""

    label: str
    series: Series

    def points(self) -> tuple[list[float], list[float]]:
        """Return the points to draw, as two lists: their steps (or the seconds since the first
        value, if there are no steps) and their values. NaN and infinite values are left out."""
        series = self.series
        begin = 0.0 if series.has_steps else min(series.times, default=0.0)
        positions = series.steps if series.has_steps else [time - begin for time in series.times]
        finite = [(x, y) for x, y in zip(positions, series.values, strict=True) if math.isfinite(y)]
        return [float(x) for x, _ in finite], [y for _, y in finite]


def draw_text(name: str, curves: Sequence[Curve], *, width: int, height: int, color: bool) -> str:
    """Return a chart of one metric in characters; "" if no curve has a finite value."""
    import plotille

    figure = plotille.Figure()
    figure.width = max(width - _AXIS_COLUMNS - _ARROW_COLUMNS, 20)
    figure.height = max(height, 4)
    figure.origin, figure.with_colors = False, color
    figure.x_label = "step" if curves and curves[0].series.has_steps else "s"
    for kind in (int, float):
        figure.register_label_formatter(kind, functools.partial(_format_tick, name))
    colors = itertools.cycle(_COLORS)
    lines = [(curve.label, *curve.points()) for curve in curves]
    lines = [line for line in lines if line[1]]
    for label, x, y in lines:
        figure.plot(x, y, label=label, lc=next(colors) if color else None)
    if not lines:
        return ""
    lowest, highest = _widen(y for line in lines for y in line[2])
    figure.set_y_limits(lowest, highest)
    figure.set_x_limits(*_widen(x for line in lines for x in line[1]))
    try:
        chart = figure.show(legend=False).rstrip().split("\n")
    except (ArithmeticError, ValueError):  # The range overflows a float.
        return f"{name}: the range from {lowest:g} to {highest:g} is too large to draw"
    return "\n".join([name, *chart[1:], *_legend([line[0] for line in lines], color=color)])


def _widen(numbers: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and the largest number, moved apart if they are equal."""
    values = list(numbers)
    low, high = min(values), max(values)
    if high > low:
        return low, high
    margin = abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _format_tick(name: str, value: float, chars: int, delta: float = 0.0, **options: bool) -> str:
    """Format a tick label for plotille: left-aligned for the horizontal axis, right-aligned for the
    vertical one."""
    if options.get("left"):
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
    """Draw a chart of each metric into one image file, whose suffix sets the format.

    Raises:
        PreflightError: matplotlib is not installed.
        UsageError: the file cannot be written, or matplotlib does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise PreflightError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib."
        ) from missing
    groups = groups[:_MOST_IN_A_PICTURE]
    columns = min(len(groups), 2 if len(groups) < 9 else 3)
    rows = math.ceil(len(groups) / columns)
    figure = Figure(figsize=(6.0 * columns, 3.4 * rows), layout="constrained")
    subplots = figure.subplots(rows, columns, squeeze=False).flat
    for (name, curves), axes in zip(groups, subplots, strict=False):
        for curve in curves:
            x, y = curve.points()
            marker = {"marker": "o"} if len(x) == 1 else {}
            axes.plot(x, y, label=curve.label, linewidth=1.2, **marker)
        axes.set_title(name.replace("$", r"\$"), fontsize=10)  # "$" would start a formula.
        axes.set_xlabel("step" if curves and curves[0].series.has_steps else "seconds")
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(fontsize=8)
    for axes in subplots:
        axes.set_axis_off()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The image {path} cannot be written. Choose another path that ends with .png, .svg or "
            f".pdf. The error: {error}"
        ) from error


def write_events(folder: str, groups: Sequence[tuple[str, Sequence[Series]]]) -> int:
    """Write TensorBoard event files, one run for each group, and return the number of values.

    Args:
        folder: the folder of the runs; kinetic's earlier event files of a run are replaced.
        groups: names of runs, such as "job-1a2b" or "job-1a2b/host-1", and their series.

    Raises:
        PreflightError: tensorboardX is not installed.
        UsageError: the folder cannot be written.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as missing:
        raise PreflightError(
            "--tensorboard needs tensorboardX, which is not installed: pip install tensorboardX."
        ) from missing
    count = 0
    for run, series in groups:
        run_folder = Path(folder, run)
        try:
            for old in run_folder.glob("events.out.tfevents.*.kinetic"):
                old.unlink()
            writer = SummaryWriter(logdir=os.fspath(run_folder), filename_suffix=".kinetic")
        except OSError as error:
            raise UsageError(
                f"Event files cannot be written to {folder}. Choose another folder. The error: "
                f"{error}"
            ) from error
        with contextlib.closing(writer):
            for metric in series:
                begin = min(metric.times, default=0.0)
                for step, time, value in zip(
                    metric.steps, metric.times, metric.values, strict=True
                ):
                    # Measurements of hosts have no step: use the seconds since the first value.
                    at = step if metric.has_steps else round(time - begin)
                    writer.add_scalar(metric.name, value, at, walltime=time)
                count += len(metric)
    return count
