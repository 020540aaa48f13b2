"""The messages of a gang: its specification, what hosts say, what they are sent.

In: nothing. Out: frozen values. Pure.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from kinetic._core.exits import Exit
from kinetic._core.values import dataclass

_MAX_TEXT = 400


class GangPhase(StrEnum):
    """The phase of a gang's life."""

    JOINING = "joining"
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class GangSpec:
    """How many hosts, and how long things may take (seconds; None means no limit).

    Attributes:
        hosts: hosts of the gang.
        start_timeout_s: until every host has joined and its worker runs the function; also how long
            hosts may wait in JAX for others that have not joined its world.
        timeout_s: from "ready" until the gang is stopped; `timeout` says so to users.
        budget_s: ... until it is stopped because of what it costs; `budget` says so to users.
        hang_timeout_s: longest time that a running host may be stalled.
        heartbeat_timeout_s: silence after which a host counts as lost; agents send ten heartbeats
            in this time.
        blame_window_s: how long to wait for the cause after a consequence was reported.
        stacks_window_s: how long hosts may take to answer with their stacks.
        grace_s: time between SIGTERM and SIGKILL for workers.
        report_s: how long a stopped host may take to report, on top of that.
        peers_window_s: how long other hosts may run on after code failed on one of them, to fail in
            the same way; each that does restarts it. Not where the function is called again.
        notice_after_s: how long all running hosts must have been stalled, when others have
            returned, before users are told.
        still_notice_s: how long all hosts must have stood still before users are told which one
            holds the others up.
        first_sign_s: how long a host that is known to be there may take to be heard from; None
            where nobody knows when it starts.
        attempt: from 1.
        repeats: whether another attempt follows when the function fails.
        joins_late: the only host begins by itself, and joins later, or never.
        sees_deaths: the leader learns at once of any agent that dies, so that an agent that is not
            heard from lives: it has no processor, or is stopped.
        slices: that take part, in the order of their hosts; () unless the job is elastic.
    """

    hosts: int
    start_timeout_s: float = 600.0
    timeout_s: float | None = None
    timeout: str = ""
    budget_s: float | None = None
    budget: str = ""
    hang_timeout_s: float | None = None
    heartbeat_timeout_s: float = 10.0
    blame_window_s: float = 1.0
    stacks_window_s: float = 2.0
    grace_s: float = 5.0
    report_s: float = 10.0
    peers_window_s: float = 0.0
    notice_after_s: float = 20.0
    still_notice_s: float = 60.0
    first_sign_s: float | None = None
    attempt: int = 1
    repeats: bool = False
    joins_late: bool = False
    sees_deaths: bool = False
    slices: tuple[int, ...] = ()

    @property
    def shortest_s(self) -> float | None:
        """How long the function may run at most, whatever limits it."""
        return min((s for s in (self.timeout_s, self.budget_s) if s is not None), default=None)


class Activity(StrEnum):
    """What a host is doing, as its agent says."""

    PREPARING = "preparing"
    WAITING = "waiting"
    """For the other hosts to join the gang."""
    DEBUGGING = "debugging"
    """The leader, until a debugger has attached."""
    HELD = "held"
    """The others, until then."""
    STARTING = "starting"
    """The worker is getting ready."""
    RUNNING = "running"
    JOINING = "joining"
    """The worker waits in JAX for the other hosts."""
    RETURNED = "returned"


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life.

    Attributes:
        host: index in the gang.
        state: what it is doing.
        stalled_s: how long the worker's main thread has made no progress.
        rss_bytes, cpu_s: of the worker.
        log_bytes: output so far.
        last_line: the last line that was printed.
        saving_step: of the checkpoint that it is writing; None for none.
    """

    host: int
    state: Activity = Activity.PREPARING
    stalled_s: float = 0.0
    rss_bytes: int = 0
    cpu_s: float = 0.0
    log_bytes: int = 0
    last_line: str = ""
    saving_step: int | None = None

    def clip_line(self) -> Heartbeat:
        """Return it with a line that is not too long to keep."""
        if len(self.last_line) <= _MAX_TEXT:
            return self
        return replace(self, last_line=self.last_line[:_MAX_TEXT])


@dataclass(frozen=True)
class HostAssignment:
    """The place of a host in an attempt of a job that may have several.

    Attributes:
        attempt: from 1.
        host: index in the attempt's gang; 0 leads.
        slices: that take part, in order.
        lost_s: how long ago the failure happened that this attempt recovers from; 0.0 for none.
        is_postponed: there is no place yet: ask again.
        retries_left: how many more attempts may follow when the function fails.
        failed_before: why the attempt before has failed; "" for none, and in an elastic job, whose
            leader tells it.
        hosts: of this gang.
    """

    attempt: int = 1
    host: int = 0
    slices: tuple[int, ...] = ()
    lost_s: float = 0.0
    is_postponed: bool = False
    retries_left: int = 0
    failed_before: str = ""
    hosts: int = 1


@dataclass(frozen=True)
class HostView:
    """What one agent is sent.

    Attributes:
        version: grows with every change of any view.
        ready: all have joined; the function may start.
        addresses: of the hosts, by index, once ready; the first is the leader's.
        stop: the worker must end.
        stop_exit: how the agent reports the end of its worker after a stop: CANCELLED, TIMEOUT,
            OVER_BUDGET, HANG or STOPPED.
        stop_reason: for users.
        grace_s: between SIGTERM and SIGKILL.
        stacks_request: number of the last request for stacks, 0 for none.
        all_done: every host has returned; workers may exit.
        notice: a line for the job's output, or "".
        preempted: a host is taken away, or the budget is used up, and functions may save for as
            long as `grace_s`; not any more once all have ended.
        reform_requested: a slice of an elastic job is back, and the function should leave at its
            next step.
    """

    version: int = 0
    ready: bool = False
    addresses: tuple[str, ...] = ()
    stop: bool = False
    stop_exit: Exit | None = None
    stop_reason: str = ""
    grace_s: float = 5.0
    stacks_request: int = 0
    all_done: bool = False
    notice: str = ""
    preempted: bool = False
    reform_requested: bool = False
