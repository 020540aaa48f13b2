"""The decisions of a host's agent during one attempt, as a pure state machine.

The agent is the program on a host that starts the worker, the process that calls the function. In:
events of the worker, the coordinator and the machine, and the time. Out: `Act`s, in the order in
which the agent must do them. No I/O, no clock.

    PREPARING ──ready──> WAITING ──all have joined──> STARTING ──called──> RUNNING ──ended──> ...
    ... reported; the worker exits like a script, or is killed

Promises:
    1. The function is called at most once: when the worker is armed and the gang is ready, and
       never after a stop.
    2. The agent makes one report, whatever happens, and ends only when the report is delivered or
        no process is left to receive it.
    3. A worker that was asked to end is killed when its grace period is over.
"""

from __future__ import annotations

from enum import Enum, auto

from kinetic._core.exits import Exit
from kinetic._core.gang.messages import Activity, HostView
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass

STOPPED_GRACE_S = 1.0
"""Longest grace period in seconds of a worker that is stopped because another host failed. It is
short because such a worker is often stuck in native code and cannot react."""
SURVIVOR_GRACE_S = 0.3
"""`STOPPED_GRACE_S` for elastic jobs, whose next attempt waits for this host."""
LEAST_EXIT_S = 5.0
"""Least seconds that exit handlers get, not counting time in which they get no processor."""
ORPHAN_S = 3.0
"""Seconds for which an agent whose program was killed tries to report to the leader."""


class Act(Enum):
    """An action that the agent must take."""

    START = auto()
    """Call the function."""
    CONCLUDE = auto()
    """Make the report, and deliver it."""
    ANNOUNCE = auto()
    """Tell the gang how this host is about to end."""
    TERMINATE = auto()
    """Interrupt the function."""
    KILL = auto()
    """Kill the worker with its process group."""
    REAP = auto()
    """Kill the worker, and wait until it has ended."""
    EXIT = auto()
    """Let the worker exit the way a script does."""
    KEEP = auto()
    """Let the worker wait for the next call of its session."""
    RUN_EXIT_HANDLERS = auto()
    """Let the worker exit without waiting in JAX for other hosts, which JAX cannot reach now."""
    REQUEST_REFORM = auto()
    """Tell the function of an elastic job that a lost slice is back."""
    SAY_LATE = auto()
    """Print that exit handlers took too long."""


@dataclass(frozen=True)
class Eviction:
    """The state of an eviction, in which the cluster takes a host of the gang away.

    Attributes:
        is_known: True if a host of the gang is being taken away.
        is_ours: True if the agent's own host is being taken away.
        function_polls: True if the function polls for preemption, and must not be interrupted.
        saves_together: True if hosts save together, so that no host may end before all have saved.
        left_s: time that the function still has, in seconds.
    """

    is_known: bool = False
    is_ours: bool = False
    function_polls: bool = False
    saves_together: bool = False
    left_s: float = 0.0


class AgentMachine:
    """State machine of the agent: one attempt on one host. It takes events, and returns the acts to
    perform.

    Attributes:
        activity: what the host is doing, for users.
        ready: True if all hosts of the gang have joined; always True for the only host of a gang.
        armed: True if the worker is ready to call the function.
        started: True if the worker was told to call the function.
        stopping: True if the worker was asked to end.
        all_done: True if every host has returned.
        has_reported: True if the report has reached the coordinator or the store.
        nothing_follows: True if no attempt follows: every host has returned, or the gang has lost
            its leader for good.
        finished: True if the agent has nothing left to do.
        view: the last `HostView` that the coordinator sent; None before the first.
        kill_at: time at which the worker is killed; None while the worker may run.
    """

    def __init__(
        self,
        *,
        alone: bool = False,
        is_elastic: bool = False,
        is_led_from_afar: bool = False,
        is_held: bool = False,
        keeps_worker: bool = False,
        keeps_interrupted: bool = False,
    ) -> None:
        """Make the machine of an agent that prepares its host.

        Args:
            alone: the host is the whole gang, and need not deliver its report.
            is_elastic: the job is elastic.
            is_led_from_afar: a head elsewhere leads, and continues without this host.
            is_held: the gang runs a call of a session, and another call may follow.
            keeps_worker: the next call of the session may run in the same worker.
            keeps_interrupted: this also holds if the function was interrupted. Hosts of a gang are
                interrupted at different steps, so what they keep no longer fits together.
        """
        self._alone = alone
        self._is_elastic = is_elastic
        self._is_led_from_afar = is_led_from_afar
        self._is_held = is_held
        self._keeps_worker, self._keeps_interrupted = keeps_worker, keeps_interrupted
        self.activity = Activity.PREPARING
        self.ready, self.armed = alone, False
        self.started = self.stopping = self.all_done = self.finished = False
        self.nothing_follows = False
        self.view: HostView | None = None
        self.kill_at: float | None = None
        self._give_up_at: float | None = None
        self.has_reported = self._has_end = self._is_gone = False
        self._winds_down = self._is_kept = False
        self._report: HostReport | None = None
        self._eviction = Eviction()

    # -- the worker --------------------------------------------------------------------------------

    def on_prepared(self, *, failed: bool = False) -> list[Act]:
        """Handle the end of preparation: the host's folder is ready, or could not be prepared."""
        if failed:
            self._has_end = True
            return [Act.CONCLUDE]
        self.activity = Activity.STARTING if self.ready else Activity.WAITING
        return []

    def on_armed(self) -> list[Act]:
        """Handle the worker's message that it is ready to call the function."""
        self.armed = True
        return self._start_if_due()

    def on_called(self) -> None:
        """Handle the worker's message that it is about to call the function."""
        self.activity = Activity.RUNNING

    def on_end(self, *, returned: bool) -> list[Act]:
        """Handle the worker's message that the function has ended. The caller then makes the
        report, and calls `on_concluded`."""
        self._has_end = True
        self.activity = Activity.RETURNED if returned else Activity.RUNNING
        return [Act.CONCLUDE]

    def on_concluded(self, now: float) -> list[Act]:
        """Handle the event that the report of the function's end was made (`Act.CONCLUDE`). Return
        the acts to perform next."""
        if self.stopping and not self._eviction.saves_together:
            return self._let_go(now)
        if self._alone and self.has_reported:
            return self._dismiss(0.0, now)
        return []

    def on_death(self, *, has_end: bool) -> list[Act]:
        """Handle the worker's death; `has_end`: it had sent how the function ended before."""
        self._has_end |= has_end
        self.note_reaped()
        return [Act.CONCLUDE]

    def note_reaped(self) -> None:
        """Note that the worker has been reaped."""
        self._is_gone, self.kill_at = True, None

    def note_kept(self) -> None:
        """Note that the worker waits for the next call."""
        self._is_gone, self._is_kept, self.kill_at = True, True, None

    def note_report(self, report: HostReport, *, arrives: bool) -> None:
        """Note that the report was made; `arrives`: it is stored, and needs no other delivery."""
        self._report = report
        self.has_reported |= arrives

    def note_delivery(self) -> None:
        """Note that the coordinator has the report."""
        self.has_reported = True

    def tick(self, now: float) -> list[Act]:
        """Return the acts that are due at this time."""
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            return self.on_lost()
        if self.kill_at is None or now < self.kill_at:
            return []
        self.kill_at = None
        return [Act.SAY_LATE, Act.KILL] if self.all_done else [Act.KILL]

    def settle(self) -> None:
        """Finish if nothing is left to do. An evicted host waits until the gang has decided which
        host is to blame."""
        if self.has_reported and self._report is not None and self._is_gone:
            self.finished |= self._alone or self.all_done or self.stopping

    # -- the coordinator ---------------------------------------------------------------------------

    def on_ready(self, view: HostView) -> list[Act]:
        """Handle the first view in which all hosts have joined; the caller then calls `on_view`."""
        self.view = view
        waits = not self.ready and self.activity is Activity.WAITING
        self.activity = Activity.STARTING if waits else self.activity
        self.ready = True
        return self._start_if_due()

    def on_view(self, view: HostView, now: float) -> list[Act]:
        """Handle a new view of the gang."""
        self.view = view
        acts = [Act.REQUEST_REFORM] if view.reform_requested and self.started else []
        if view.stop and not self.stopping and not self.all_done:
            self.stopping = True
            left_s = self._eviction.left_s if self._eviction.is_known else None
            grace_s = grace_of(view, elastic=self._is_elastic, left_s=left_s)
            acts += self._end_worker(grace_s, now)
        if view.stop and not view.preempted and self._report is not None:
            acts += self._let_go(now)  # The worker may have waited for hosts that were saving.
        if view.all_done and not self.all_done:
            acts += self._dismiss(view.grace_s, now)
        return acts

    def on_lost(self, *, is_final: bool = True) -> list[Act]:
        """Handle the loss of the leader; `is_final` is True if no other leader will follow."""
        self.finished = True
        self.nothing_follows |= is_final
        return self._give_up()

    def on_program_gone(self, now: float) -> list[Act]:
        """Handle the death of `kinetic.runner`, which started the agent, on a host that is not the
        leader: try for a moment to deliver the report to the leader."""
        self.stopping = self.nothing_follows = True
        self._give_up_at = now + ORPHAN_S
        return self._give_up()

    def _give_up(self) -> list[Act]:
        self._has_end = True
        return [Act.REAP, Act.CONCLUDE]

    # -- this machine ------------------------------------------------------------------------------

    def may_be_taken_away(self) -> bool:
        """True if the host is still needed, and its eviction has not been noticed yet."""
        over = self.stopping or self.all_done or self._report is not None
        return not (over or self._eviction.is_ours)

    def note_eviction(self, eviction: Eviction) -> None:
        """Note the current state of an eviction."""
        self._eviction = eviction

    def on_taken_away(self, grace_s: float, now: float) -> list[Act]:
        """Handle the eviction of this host. In a gang, interrupt the function only once the gang
        knows of the eviction: otherwise the gang could blame a host that fails because of it."""
        self.nothing_follows = self._is_led_from_afar
        return self._end_worker(grace_s, now) if self._alone else [Act.ANNOUNCE]

    # -- decisions ---------------------------------------------------------------------------------

    def _start_if_due(self) -> list[Act]:
        over = self.started or self.stopping or self._eviction.is_known or self._has_end
        if over or not (self.armed and self.ready):
            return []
        self.started = True
        return [Act.START]

    def _end_worker(self, grace_s: float, now: float) -> list[Act]:
        if self._is_gone:
            return []
        self.kill_at = now + grace_s
        if self._has_end or self.activity is not Activity.RUNNING:
            # No function is running, so the worker needs no time to clean up.
            stays = self._has_end and self._eviction.saves_together
            return [] if stays else self._let_go(now)
        self._keeps_worker &= self._keeps_interrupted
        return [] if self._eviction.function_polls else [Act.TERMINATE]

    def _let_go(self, now: float) -> list[Act]:
        """Let the worker exit: its function has ended, and the gang is stopped."""
        if self._is_kept:
            return []
        if self._is_gone or not (self._has_end and self.started):
            return [Act.KILL]
        if self._winds_down:
            return []
        longest_s = SURVIVOR_GRACE_S if self._is_elastic else STOPPED_GRACE_S
        until = now + longest_s
        self._winds_down, self.kill_at = True, min(until, self.kill_at or until)
        return [Act.KEEP if self._keeps_worker else Act.RUN_EXIT_HANDLERS]

    def _dismiss(self, grace_s: float, now: float) -> list[Act]:
        """Let the worker exit like a script: every host has returned."""
        self.all_done = True
        exit_ = None if self._report is None else self._report.exit
        self.nothing_follows = exit_ is Exit.RETURNED and not self._is_held
        self.kill_at = now + max(grace_s, LEAST_EXIT_S)
        return [Act.KEEP if self._keeps_worker else Act.EXIT]


def grace_of(stop: HostView, *, elastic: bool, left_s: float | None) -> float:
    """Return the seconds that a worker has to end by itself after this stop; `left_s` is the time
    until the host is taken away, or None."""
    if stop.stop_exit not in (Exit.STOPPED, Exit.HANG, Exit.DIFFERED):
        return stop.grace_s
    if left_s is not None:
        return left_s
    return min(stop.grace_s, SURVIVOR_GRACE_S if elastic else STOPPED_GRACE_S)
