"""The calls of a session on a line of time. Pure.

In: the rows of the calls, and the ends of the line. Out: bars. Between two bars the slices were
held, and nothing ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kinetic._dashboard.scene import LEAST

if TYPE_CHECKING:
    from kinetic._dashboard.board_watch import JobRow

_MOST_BARS, MOST_ROWS = 200, 10
"""Maximum number of calls on the line, and in the list below it."""
_GAP = 1
"""Gap between the bars of calls that follow each other at once, in thousandths of the line."""
_STEPS = 500
"""The line of a session that is still held grows in steps: about this many for its whole length.
Each step changes all bars, and a page is sent everything that changes."""


class CallBar(NamedTuple):
    """One call; offsets are thousandths of the whole line.

    Attributes:
        row: the call.
        begin: offset of the function's start.
        length: length of the bar, up to the call's end or to the end of the line.
    """

    row: JobRow
    begin: float
    length: float


class SessionLine(NamedTuple):
    """The calls of one session.

    Attributes:
        calls: all calls, newest first.
        bars: the newest calls that have begun, oldest first.
        since, until: the ends of the line, in seconds since the epoch.
        busy_s: time on the line in which calls ran.
    """

    calls: Sequence[JobRow]
    bars: tuple[CallBar, ...]
    since: float
    until: float
    busy_s: float

    @property
    def idle_since(self) -> float | None:
        """Time at which the last call ended; if there was no call, at which the line began. None
        while a call runs or waits."""
        ends = [row.standing.ended_at for row in self.calls]
        return None if None in ends else max([self.since, *filter(None, ends)])


def draw_line(calls: Sequence[JobRow], since: float, until: float) -> SessionLine:
    """Return a session's calls on a time line. `calls` are sorted newest first. If the line has
    room only for the newest calls, it begins with the oldest of those that fit."""
    begun = [(row.started_at, row) for row in calls[:_MOST_BARS] if row.started_at is not None]
    if begun and len(calls) > _MOST_BARS:
        since = min(started_at for started_at, _ in begun)
    step_s = 1 << (max(int(until - since), 0) // _STEPS).bit_length()
    span_s = max(math.ceil((until - since) / step_s), 1) * step_s

    def place(at: float) -> float:
        return round(1000 * min(max((at - since) / span_s, 0), 1), 1)

    bars, busy_s = [], 0.0
    for started_at, row in reversed(begun):
        ended_at = row.standing.ended_at or since + span_s
        begin = min(place(started_at), 1000 - LEAST)
        length = place(ended_at) - begin - _GAP
        bars.append(CallBar(row, begin, max(round(length, 1), LEAST)))
        busy_s += max(ended_at - max(started_at, since), 0.0)
    return SessionLine(calls, tuple(bars), since, since + span_s, busy_s)
