"""Goodput: the time and money of a job, divided by use. Pure.

In: the attempts of a gang, and spans of time that one of its hosts has recorded. Out: the seconds
of each use. Uses of an attempt do not overlap, and sum to its time. Nothing is estimated: time that
no record explains is `OTHER`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from kinetic._core.gang.picture import AttemptPicture, GangPicture
from kinetic._core.metrics import SPAN_PREFIX, STEP_COUNT, Rows
from kinetic._core.outcome import Verdict
from kinetic._core.plan import Cost
from kinetic._core.values import dataclass


class Use(StrEnum):
    """A use of time."""

    STEPS = "steps"
    """Training steps, without those that were lost."""
    COMPILING = "compiling"
    RESTORING = "restoring"
    SAVING = "saving"
    """The function waited for a checkpoint to be copied or written."""
    LOST = "lost"
    """Steps that were done again later, and the end of an attempt that failed after its last
    step."""
    STARTING = "starting"
    """From the first host that joined to the end of the first step."""
    WAITING = "waiting"
    """No host of the attempt had joined."""
    OTHER = "other"


class Span(NamedTuple):
    """A stretch of time that a host has recorded; times are seconds since the epoch.

    Attributes:
        use: steps, compiling, restoring or saving.
        begin, end: its times.
        done: the last step before the span, if `use` is STEPS.
        last: the last step in the span.
    """

    use: Use
    begin: float
    end: float
    done: int = 0
    last: int = 0


def spans_of(rows: Rows) -> Iterator[Span]:
    """Yield the spans in rows of a host's metrics."""
    columns = dict(zip(rows.names, rows.values, strict=True))
    counts = columns.get(STEP_COUNT)
    for use in (Use.STEPS, Use.COMPILING, Use.RESTORING, Use.SAVING):
        for index, seconds in enumerate(columns.get(SPAN_PREFIX + use, ())):
            end, step = rows.times[index], rows.steps[index]
            if 0 <= seconds < math.inf:
                count = counts[index] if counts and counts[index] >= 1 else 1.0
                yield Span(use, end - seconds, end, max(step - int(min(count, 1e18)), -1), step)


@dataclass(frozen=True)
class Goodput:
    """The time of an attempt, or of a whole job, divided by use.

    Attributes:
        spent_s: seconds by use; they sum to the time since the previous attempt ended.
        paid_s: paid time since the function's start, in seconds of all slices: a second on half of
            the slices counts half.
        paid_steps_s: part of `paid_s` that was spent on steps.
    """

    spent_s: Mapping[Use, float]
    paid_s: float
    paid_steps_s: float

    def describe(self, cost: Cost | None) -> str:
        """Return the uses and the cost of all but steps, for users: "61 % steps, 22 % compiling,
        9 % waiting, 8 % restoring; $14.00 of $41.00 not spent on steps". Return "" if no steps are
        recorded."""
        whole = sum(self.spent_s.values())
        if not self.spent_s.get(Use.STEPS) and not self.spent_s.get(Use.LOST):
            return ""
        shares = {use: 100 * spent / whole for use, spent in self.spent_s.items()}
        percent = {use: int(share) for use, share in shares.items()}
        for use in sorted(shares, key=lambda use: percent[use] - shares[use])[
            : 100 - sum(percent.values())
        ]:
            percent[use] += 1
        order = sorted(shares, key=lambda use: (use is not Use.STEPS, -shares[use]))
        text = ", ".join(
            f"{percent[use]} % {use}" for use in order if use is Use.STEPS or percent[use]
        )
        if cost is None or cost.is_simulated:
            return text
        from kinetic._core.accelerators.prices import in_usd  # not needed by others

        lost_usd = in_usd(cost.for_seconds(self.paid_s - self.paid_steps_s))
        return f"{text}; {lost_usd} of {in_usd(cost.for_seconds(self.paid_s))} not spent on steps"

    def to_json(self, cost: Cost | None) -> dict[str, Any]:
        """Return a JSON object: seconds by use; US dollars, if the price is known."""
        spent = {str(use): round(self.spent_s.get(use, 0.0), 3) for use in Use}
        if cost is None:
            return {"spent_s": spent}
        not_steps_usd = cost.for_seconds(self.paid_s - self.paid_steps_s)
        usd = {"usd": cost.for_seconds(self.paid_s), "usd_not_steps": not_steps_usd}
        return {"spent_s": spent} | {name: round(value, 6) for name, value in usd.items()}


def add_up(attempts: Sequence[Goodput]) -> Goodput:
    """Return the sum of all attempts."""
    return Goodput(
        {use: math.fsum(attempt.spent_s.get(use, 0.0) for attempt in attempts) for use in Use},
        math.fsum(attempt.paid_s for attempt in attempts),
        math.fsum(attempt.paid_steps_s for attempt in attempts),
    )


def divide(
    gang: GangPicture,
    spans: Mapping[int, Sequence[Span]],
    *,
    slices: int,
    created_at: float,
    until: float,
) -> list[Goodput]:
    """Divide the time of each attempt, from the end of the attempt before.

    Args:
        gang: the attempts.
        spans: the spans of a host in each attempt, by the attempt's number, oldest first.
        slices: the number of slices that the price of the job covers.
        created_at: when the job was submitted.
        until: when the job ended; the present time while it runs.
    """
    cut = _cut_repeated(spans)
    begin, divided = created_at, list[Goodput]()
    next_begins = [following.began_at for following in gang.attempts[1:]]
    for attempt, next_begin in zip(gang.attempts, [*next_begins, None], strict=True):
        is_last = attempt is gang.attempts[-1]
        end = until if is_last else attempt.ended_at or next_begin or begin
        end = max(min(end, until), begin)
        divided.append(_divide_attempt(attempt, cut.get(attempt.number, []), begin, end, slices))
        begin = end
    return divided


def _cut_repeated(spans: Mapping[int, Sequence[Span]]) -> dict[int, list[Span]]:
    """Mark steps as lost that the job did again later; cut spans in which only the last steps are
    lost, as if all their steps took equally long."""
    limit, cut = math.inf, dict[int, list[Span]]()
    for number in sorted(spans, reverse=True):
        cut[number] = [span for span in spans[number] if span.use is not Use.STEPS]
        steps = [span for span in spans[number] if span.use is Use.STEPS]
        for index in range(len(steps) - 1, -1, -1):
            span, before = steps[index], steps[index - 1] if index else None
            final = min(max((limit - 1 - span.done) / max(span.last - span.done, 1), 0.0), 1.0)
            middle = span.begin + final * (span.end - span.begin)
            cut[number].append(span._replace(end=middle))
            cut[number].append(span._replace(use=Use.LOST, begin=middle))
            # The step that ended when the first span began was done in this attempt, too.
            is_first = before is None or before.last != span.done
            limit = min(limit, span.done + (not is_first))
    return cut


_Intervals = list[tuple[float, float]]


def _divide_attempt(
    attempt: AttemptPicture, spans: Sequence[Span], begin: float, end: float, slices: int
) -> Goodput:
    ended = min(attempt.ended_at or end, end)
    recorded: dict[Use, _Intervals] = {use: [] for use in Use}
    for span in spans:
        recorded[span.use].append((span.begin, span.end))
    stepped = recorded[Use.STEPS] + recorded[Use.LOST]
    layers = [(use, recorded[use]) for use in _RECORDED]
    if attempt.began_at is not None:
        first = min((since for since, _ in stepped), default=attempt.ready_at or ended)
        layers.append((Use.STARTING, [(attempt.began_at, first)]))
        if stepped and attempt.verdict not in (None, Verdict.SUCCEEDED):
            layers.append((Use.LOST, [(max(to for _, to in stepped), ended)]))
        layers.append((Use.OTHER, [(attempt.began_at, ended)]))
    layers.append((Use.WAITING, [(begin, end)]))
    spent, covered, before_s = dict.fromkeys(Use, 0.0), _Intervals(), 0.0
    for use, intervals in layers:
        covered = _unite(covered + intervals, begin, end)
        covered_s = math.fsum(to - since for since, to in covered)
        spent[use] += covered_s - before_s
        before_s = covered_s
    ready_at = end if attempt.ready_at is None else attempt.ready_at
    paid_s = max(ended - max(ready_at, begin), 0.0)
    weight = (len(attempt.slices) or slices) / slices
    return Goodput(spent, weight * paid_s, weight * min(spent[Use.STEPS], paid_s))


_RECORDED = (Use.COMPILING, Use.RESTORING, Use.SAVING, Use.LOST, Use.STEPS)
"""Recorded uses; where several overlap, as when a step compiles, the first one counts."""


def _unite(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> _Intervals:
    """Return the parts of intervals between two times, without overlaps, oldest first."""
    united = _Intervals()
    clipped = ((max(since, begin), min(to, end)) for since, to in intervals)
    for since, to in sorted((since, to) for since, to in clipped if since < to):
        if united and since <= united[-1][1]:
            united[-1] = united[-1][0], max(to, united[-1][1])
        else:
            united.append((since, to))
    return united
