"""The state of one job for its page: slices, hosts, attempts.

The activity of hosts comes from the job's leader, once a second; everything else is read from the
board each time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kinetic._client.activity_watch import ActivityWatch
from kinetic._client.board import activity, shape, text
from kinetic._client.board.activity import HostLine
from kinetic._client.goodput import GoodputReader
from kinetic._core import layout
from kinetic._core.exits import HostState
from kinetic._core.state import JobStanding, JobStatus
from kinetic._dashboard.charts import StepWatch
from kinetic.errors import KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._client.access import JobAccess
    from kinetic._core.gang.picture import AttemptPicture, GangPicture, HostPicture
    from kinetic._core.ref import JobRef

ACTIVITY_EVERY_S = 1.0
"""Seconds between reads of the hosts' activity, which hosts report every second."""
_AWAY = "away"
_LOST = "lost"
_DETAILED_HOSTS = 64
"""Larger gangs than this are drawn without details: each host is a square."""
_MOST_CHIPS = 8
LEAST = 8
"""Smallest length of an attempt's bar, in thousandths of the time line, so that it is visible."""


class HostCell(NamedTuple):
    """One host.

    Attributes:
        host: the host's index in the job.
        member: its index in the attempt, which selects its output; None if it is not in the
            attempt.
        state: one word, which also selects its colour.
        facts: further facts, in reading order.
        last_line: the last line that it printed.
    """

    host: int
    member: int | None
    state: str
    facts: tuple[str, ...] = ()
    last_line: str = ""


class SliceBox(NamedTuple):
    """One slice.

    Attributes:
        number: its index, from 0.
        title: its name and shape.
        note: "lost" or "awaited" if it takes no part; otherwise counts of its hosts' states.
        hosts: its hosts.
        chips: number of chips drawn for each host.
        is_detailed: True if each host is drawn with details.
    """

    number: int
    title: str
    note: str
    hosts: tuple[HostCell, ...]
    chips: int
    is_detailed: bool

    @property
    def takes_part(self) -> bool:
        """True if the slice takes part in the attempt, so that it can be killed."""
        return any(cell.member is not None for cell in self.hosts) and self.note != _LOST


class AttemptBar(NamedTuple):
    """One attempt on the time line; offsets are thousandths of the whole line.

    Attributes:
        attempt: the attempt.
        begin, ready, end: offsets of its beginning, of the function's start, and of its end.
        state: its state, which selects its colour.
        length: its duration; "" while it runs.
        uses: how its time was used; "" if no steps are recorded.
    """

    attempt: AttemptPicture
    begin: int
    ready: int
    end: int
    state: str
    length: str
    uses: str = ""


class JobScene(NamedTuple):
    """One job.

    Attributes:
        ref: the job.
        standing: its state and reason.
        slices: all its slices.
        bars: its last attempts.
        left_out: number of earlier attempts.
        blamed: hosts that failed first.
        reason: the full reason of the failure.
        traceback: traceback of the exception on the blamed host.
        cost: its cost, formatted; "" if unknown.
        started_at: when its function first started.
        ran: its run time in all attempts, once it has ended.
        uses: how its time was used; "" if no steps are recorded.
    """

    ref: JobRef
    standing: JobStanding
    slices: tuple[SliceBox, ...] = ()
    bars: tuple[AttemptBar, ...] = ()
    left_out: int = 0
    blamed: tuple[int, ...] = ()
    reason: str = ""
    traceback: str = ""
    cost: str = ""
    started_at: float | None = None
    ran: str = ""
    uses: str = ""

    @property
    def state(self) -> str:
        """The job's state in lower case."""
        return self.standing.state.lower()

    @property
    def has_ended(self) -> bool:
        """True if the job has ended."""
        return self.state in [str(state).lower() for state in JobStatus if state.ended]

    def needs_attention(self) -> list[HostCell]:
        """Return the hosts that stand still, are silent, or have failed."""
        odd = ("stalled", "silent", "failed", _LOST)
        return [cell for box in self.slices for cell in box.hosts if cell.state in odd]


_BARS = 20
_TRACEBACK_CHARS = 50_000


class JobCamera:
    """Reads the state of one job, for one page. With `divides`, also reads how the job's time was
    used, which takes a second if a million steps are logged."""

    def __init__(self, access: JobAccess, ref: JobRef, *, divides: bool = True) -> None:
        self._divides = divides
        self._access = access
        self._ref = ref
        self._watch = ActivityWatch(access, {ref.job_id})
        self._step_watch = StepWatch(access.store, ref)
        self._goodput = GoodputReader(access.board, ref)
        self._lines: list[HostLine] = []
        self._steps: Mapping[int, int] = {}
        self._cost = ""
        self._ask_at = 0.0
        self._last: JobScene | None = None

    def read(self) -> JobScene:
        """Return the job's present state. A job that has ended is read only once.

        Raises:
            NotFound: its records were removed.
            KineticError: the store or the backend does not answer.
        """
        board, ref = self._access.board, self._ref
        if self._last is not None and self._access.store.has(layout.JobKeys(ref.job_id).ref):
            return self._last
        standing = board.read_standing(ref)
        if standing.error is not None:
            raise standing.error
        if standing.state == JobStatus.NOT_FOUND:
            raise NotFound(f"The records of {ref.job_id} were removed.")
        outcome = standing.outcome or (board.verdict(ref) if standing.ended_at else None)
        gang = board.gang(ref, outcome)
        first = None if outcome is None else outcome.first
        trace = "" if first is None or first.error is None else first.error.traceback
        attempts = gang.attempts
        last = attempts[-1]
        if ref.session_name and outcome is not None:  # No report says that its hosts have ended.
            last = replace(last, hosts=())
        until = standing.ended_at or self._access.now()
        self._read_activity(gang, until, runs=outcome is None)
        uses = [each.describe(self._goodput.cost) for each in self._goodput.attempts]
        bars = draw_bars(attempts[-_BARS:], ref.created_at, until, uses[-_BARS:])
        scene = JobScene(
            ref,
            standing,
            draw_slices(ref, last, self._lines, self._steps),
            bars,
            len(attempts) - len(bars),
            outcome.blamed if outcome is not None and not outcome.ok else (),
            standing.reason or attempts[-1].difference if outcome is None else outcome.reason,
            text.printable_lines(trace[-_TRACEBACK_CHARS:]),
            self._cost,
            gang.started_at,
            text.duration(gang.ran_s(self._access.now())) if gang.started_at and outcome else "",
            self._goodput.describe(),
        )
        self._last = scene if outcome is not None else None
        return scene

    def close(self) -> None:
        """Close the connection to the leader."""
        self._watch.__exit__()

    def _read_activity(self, gang: GangPicture, until: float, *, runs: bool) -> None:
        """Read the hosts' activity, steps, goodput and cost, each if its interval has passed."""
        if not runs:
            self._lines = []
        if runs and time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + ACTIVITY_EVERY_S
        if self._divides:
            self._goodput.read(gang, until)
        with contextlib.suppress(KineticError):
            if runs:
                self._lines = [line for line in self._watch.poll() if line.host is not None]
            if self._ref.hosts <= _DETAILED_HOSTS:
                self._steps = self._step_watch.read()
            if cost := self._access.board.cost(self._ref, gang):
                self._cost = text.describe_cost(*cost, is_over=not runs)


def draw_slices(
    ref: JobRef, attempt: AttemptPicture, lines: Sequence[HostLine], steps: Mapping[int, int]
) -> tuple[SliceBox, ...]:
    """Return the slices of a job in its last attempt."""
    topology = shape.topology_of(ref)
    hosts_each = min(topology.hosts, ref.hosts) if topology is not None else ref.hosts
    taking_part = attempt.slices or tuple(range(max(ref.hosts // max(hosts_each, 1), 1)))
    by_member = {line.host: line for line in lines if line.host is not None}
    title = "" if topology is None else shape.name_slice(topology)
    boxes = []
    for index in range(max(ref.hosts // max(hosts_each, 1), 1)):
        first = taking_part.index(index) * hosts_each if index in taking_part else None
        is_lost = index in attempt.lost
        cells = tuple(
            _draw_host(
                index * hosts_each + n,
                None if first is None else first + n,
                attempt,
                by_member,
                steps,
            )
            for n in range(hosts_each)
        )
        if is_lost:
            cells = tuple(cell._replace(state=_LOST) for cell in cells)
        boxes.append(
            SliceBox(
                index,
                f"slice {index} · {title}" if ref.hosts > hosts_each else title,
                _note(index, attempt, cells),
                cells,
                min(topology.chips_per_host, _MOST_CHIPS) if topology is not None else 0,
                ref.hosts <= _DETAILED_HOSTS,
            )
        )
    return tuple(boxes)


def _note(index: int, attempt: AttemptPicture, cells: Sequence[HostCell]) -> str:
    from kinetic._client.board.drawing import summary

    if index in attempt.awaited:
        return "awaited: it is being started again"
    if index in attempt.lost:
        return _LOST
    return summary([cell.state for cell in cells])


def _draw_host(
    host: int,
    member: int | None,
    attempt: AttemptPicture,
    lines: Mapping[int, HostLine],
    steps: Mapping[int, int],
) -> HostCell:
    if member is None or member >= len(attempt.members):
        return HostCell(host, None, _AWAY)
    picture, line = attempt.members[member], lines.get(member)
    facts = [f"step {steps[member]}"] if member in steps else []
    if line is None:
        return HostCell(
            host, member, str(picture.state), (*facts, *filter(None, [_describe_end(picture)]))
        )
    if line.cpu_percent is not None:
        facts.append(f"{line.cpu_percent:.0f} % CPU")
    if line.rss_bytes:
        facts.append(text.size(line.rss_bytes))
    if line.saving_step is not None:
        facts.append(f"saving step {line.saving_step}")
    if line.still_s >= activity.STILL_S:
        facts.append(f"still for {text.age(line.still_s)}")
    facts.append(_describe_end(picture))
    return HostCell(
        *(host, member, _state(picture, line), tuple(filter(None, facts))),
        text.printable(line.last_line.strip()),
    )


def _state(picture: HostPicture, line: HostLine) -> str:
    """Return the state of a host: its end as the events say, a stall as the events or the leader
    say, anything else as the leader says."""
    if picture.state in (HostState.RETURNED, HostState.FAILED, HostState.STOPPED):
        return str(picture.state)
    if line.still_s >= activity.STILL_S and line.state == "running":
        return str(HostState.STALLED)
    return str(picture.state) if picture.state is HostState.STALLED else line.state


def _describe_end(picture: HostPicture) -> str:
    return text.printable(": ".join(filter(None, (str(picture.exit or ""), picture.detail))))


def draw_bars(
    attempts: Sequence[AttemptPicture],
    created_at: float,
    until: float,
    uses: Sequence[str] = (),
) -> tuple[AttemptBar, ...]:
    """Return the attempts as bars on a time line that ends at `until`."""
    begins = [attempt.began_at for attempt in attempts if attempt.began_at is not None]
    first = min(begins[0] if begins else created_at, until)
    span = max(until - first, 1e-3)

    def place(at: float | None, default: float) -> int:
        return round(1000 * min(max(((default if at is None else at) - first) / span, 0), 1))

    bars = []
    for number, attempt in enumerate(attempts):
        following = attempts[number + 1].began_at if number + 1 < len(attempts) else None
        end = attempt.ended_at or following
        begin = min(place(attempt.began_at, until), 1000 - LEAST)
        ready = min(max(place(attempt.ready_at, end or until), begin), 1000 - LEAST)
        bars.append(
            AttemptBar(
                attempt,
                begin,
                ready,
                max(place(end, until), ready + LEAST),
                "running" if end is None else str(attempt.verdict or "stopped"),
                text.duration(end - attempt.began_at) if end and attempt.began_at else "",
                uses[number] if number < len(uses) else "",
            )
        )
    return tuple(bars)
