"""The messages of a gang: its specification, heartbeats, assignments and views."""

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
    """The number of hosts and the time limits of a gang, in seconds; None means no limit.

    Attributes:
        hosts: number of hosts of the gang.
        start_timeout_s: time until every host has joined and its worker runs the function; also
            the time that hosts may wait in JAX for hosts that have not joined its world.
        timeout_s: time from "ready" until the gang is stopped; `timeout` is its text for users.
        budget_s: time from "ready" until the budget is used up; `budget` is its text for users.
        hang_timeout_s: longest time that a running host may be stalled.
        heartbeat_timeout_s: silence after which a host counts as lost; agents send ten heartbeats
            in this time.
        blame_window_s: time to wait for the cause after a consequence was reported.
        stacks_window_s: time that hosts have to answer with their stacks.
        grace_s: time between SIGTERM and SIGKILL for workers.
        report_s: additional time that a stopped host has to report.
        peers_window_s: time to wait for other hosts to fail in the same way after code failed on
            one; each further failure restarts it. Not used if another attempt follows.
        notice_after_s: time that all running hosts must have been stalled, when others have
            returned, before a notice says so.
        still_notice_s: time that all hosts must have stood still before a notice names the hosts
            that hold the others up.
        first_sign_s: time in which a host that is known to exist must give its first sign of life;
            None if the start of hosts is not known.
        attempt: the attempt, from 1.
        repeats: True if another attempt follows when the function fails.
        joins_late: True if the only host starts its function without joining, and may never join.
        sees_deaths: True if the leader learns at once of any agent that dies, so that a silent
            agent is alive: it gets no processor, or is stopped.
        slices: slices that take part, in the order of their hosts; () unless the job is elastic.
        is_strict: True if a difference between the programs of the hosts, or between their inputs,
            ends the gang.
        turn: number of the gang among all gangs of its session; 0 outside of sessions.
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
    is_strict: bool = False
    turn: int = 0

    @property
    def shortest_s(self) -> float | None:
        """The shorter of timeout and budget; None without either."""
        return min((s for s in (self.timeout_s, self.budget_s) if s is not None), default=None)


class Activity(StrEnum):
    """The activity of a host, as its agent reports it."""

    PREPARING = "preparing"
    WAITING = "waiting"
    """The host waits for the other hosts to join the gang."""
    DEBUGGING = "debugging"
    """The leader waits for a debugger to attach."""
    HELD = "held"
    """The host waits until a debugger has attached to the leader."""
    STARTING = "starting"
    """The worker is getting ready."""
    RUNNING = "running"
    JOINING = "joining"
    """The worker waits in JAX for the other hosts."""
    RETURNED = "returned"


@dataclass(frozen=True)
class Heartbeat:
    """A sign of life of a host.

    Attributes:
        host: index in the gang.
        state: the host's activity.
        stalled_s: seconds for which the worker's main thread has made no progress.
        rss_bytes, cpu_s: memory and processor time of the worker.
        log_bytes: bytes of output so far.
        last_line: the last line of output.
        saving_step: step of the checkpoint that the host is writing; None for none.
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
        """Return the heartbeat with `last_line` cut to a length that the leader can store."""
        if len(self.last_line) <= _MAX_TEXT:
            return self
        return replace(self, last_line=self.last_line[:_MAX_TEXT])


@dataclass(frozen=True)
class HostAssignment:
    """The assignment of a host in one attempt of a job that may have several.

    Attributes:
        attempt: the attempt, from 1.
        host: index in the attempt's gang; 0 leads.
        slices: slices that take part, in order.
        lost_s: seconds since the failure that this attempt recovers from; 0.0 for none.
        is_postponed: True if the host has no assignment yet, and must ask again.
        retries_left: number of further attempts that may follow when the function fails.
        failed_before: why the previous attempt failed; "" in the first attempt, and in an elastic
            job, whose leader prints the reason.
        hosts: number of hosts of this gang.
        job_id: the call that a session's host takes part in; "" outside of sessions.
        turn: number of the gang among all gangs of the session.
        world: a number for the processes, and their world of JAX, that stay from call to call; 0
            for a call in new processes.
        notice: a line for the log of host 0; "" for none.
    """

    attempt: int = 1
    host: int = 0
    slices: tuple[int, ...] = ()
    lost_s: float = 0.0
    is_postponed: bool = False
    retries_left: int = 0
    failed_before: str = ""
    hosts: int = 1
    job_id: str = ""
    turn: int = 0
    world: int = 0
    notice: str = ""


@dataclass(frozen=True)
class HostView:
    """The state of the gang that the coordinator sends to one agent.

    Attributes:
        version: number that grows with every change of any view.
        ready: True if all hosts have joined, so that the function may start.
        addresses: addresses of the hosts, by index, once ready; the first is the leader's.
        stop: True if the worker must end.
        stop_exit: exit that the agent reports for its worker after a stop: CANCELLED, TIMEOUT,
            OVER_BUDGET, HANG, DIFFERED or STOPPED.
        stop_reason: the reason of the stop, for users.
        grace_s: time between SIGTERM and SIGKILL.
        stacks_request: number of the last request for stacks; 0 for none.
        all_done: True if every host has returned, so that workers may exit.
        notice: a line for the job's output, or "".
        preempted: True while a host is taken away, or the budget is used up, and functions may
            save for as long as `grace_s`.
        reform_requested: True if a slice of an elastic job is back, and the function should end at
            its next step.
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
