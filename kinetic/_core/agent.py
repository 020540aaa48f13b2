"""What the agent of a host does next, in one attempt: a pure state machine.

In: what has become of the worker, what the coordinator says, what the machine does, the time. Out:
`Act`s, in the order in which they are to be done. No I/O, no clock.

    PREPARING ──ready──> WAITING ──all have joined──> STARTING ──called──> RUNNING ──ended──> ...
    ... reported; the worker exits like a script, or is killed

Promises:
    1. The function is called once, when the worker is armed and the gang is ready, and not after a
       stop.
    2. One report is made, whatever happens, and the agent ends only when it is delivered or nobody
       is left to take it.
    3. A worker that has been asked to end is killed when its time is over.
"""

from __future__ import annotations

from enum import Enum, auto

from kinetic._core.exits import Exit
from kinetic._core.gang.messages import Activity, HostView
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass

STOPPED_GRACE_S = 1.0
"""Longest grace of a host that is stopped because of another one: it is often stuck in native code
and cannot react."""
SURVIVOR_GRACE_S = 0.3
"""The same for elastic jobs, whose next attempt waits for it."""
LEAST_EXIT_S = 5.0
"""How long exit handlers may always take, not counting time in which they get no processor."""
ORPHAN_S = 3.0
"""How long a host whose program was killed tries to tell its leader, which often went with it."""


class Act(Enum):
    """Something to do."""

    START = auto()
    """Call the function."""
    CONCLUDE = auto()
    """Make the report, and deliver it."""
    ANNOUNCE = auto()
    """Tell the gang how this host is about to end."""
    TERMINATE = auto()
    """Interrupt the function."""
    KILL = auto()
    """End the worker with its process group."""
    REAP = auto()
    """End it, and wait until it has ended."""
    EXIT = auto()
    """Let the worker exit the way a script does."""
    RUN_EXIT_HANDLERS = auto()
    """The same, of a world that has broken: it is not left together."""
    REQUEST_REFORM = auto()
    """Tell the function that a slice is back."""
    SAY_LATE = auto()
    """Say that exit handlers took too long."""


@dataclass(frozen=True)
class Eviction:
    """What is known of a host of the gang being taken away.

    Attributes:
        is_known: whether one is.
        is_ours: whether it is this one.
        looks: whether the function sees it for itself, and is not to be interrupted.
        saves_together: whether hosts save together, so that none may leave before all have.
        left_s: how long the function may run on.
    """

    is_known: bool = False
    is_ours: bool = False
    looks: bool = False
    saves_together: bool = False
    left_s: float = 0.0


class AgentMachine:
    """One attempt of one host.

    Attributes:
        activity: what the host is doing, as it is shown.
        ready: whether the gang is; a host that is alone is.
        armed: whether the worker can be given the function.
        started: whether it was.
        stopping: whether the worker was asked to end.
        all_done: whether every host has returned.
        has_reported: whether the report is where somebody looks for it.
        nothing_follows: every host has returned, or nobody leads any more.
        finished: nothing is left to do.
        view: the last one of the coordinator.
        kill_at: when the worker is killed; None while it need not end.
    """

    def __init__(
        self,
        *,
        alone: bool = False,
        is_elastic: bool = False,
        is_led_from_afar: bool = False,
    ) -> None:
        """`alone`: no gang has to be waited for, and the report need not be delivered."""
        self._alone = alone
        self._is_elastic = is_elastic
        self._is_led_from_afar = is_led_from_afar
        self.activity = Activity.PREPARING
        self.ready, self.armed = alone, False
        self.started = self.stopping = self.all_done = self.finished = False
        self.nothing_follows = False
        self.view: HostView | None = None
        self.kill_at: float | None = None
        self._give_up_at: float | None = None
        self.has_reported = self._has_end = self._is_gone = False
        self._winds_down = False
        self._report: HostReport | None = None
        self._eviction = Eviction()

    # -- the worker --------------------------------------------------------------------------------

    def on_prepared(self, *, failed: bool = False) -> list[Act]:
        """The folder of the host is ready, or cannot be."""
        if failed:
            self._has_end = True
            return [Act.CONCLUDE]
        self.activity = Activity.STARTING if self.ready else Activity.WAITING
        return []

    def on_armed(self) -> list[Act]:
        """The worker waits for the function."""
        self.armed = True
        return self._start_if_due()

    def on_called(self) -> None:
        """The function runs."""
        self.activity = Activity.RUNNING

    def on_end(self, *, returned: bool) -> list[Act]:
        """The worker has said how the function ended; `on_concluded` follows."""
        self._has_end = True
        self.activity = Activity.RETURNED if returned else Activity.RUNNING
        return [Act.CONCLUDE]

    def on_concluded(self, now: float) -> list[Act]:
        """The report on that end was made."""
        if self.stopping and not self._eviction.saves_together:
            return self._let_go(now)
        if self._alone and self.has_reported:
            return self._dismiss(0.0, now)
        return []

    def on_death(self, *, has_end: bool) -> list[Act]:
        """The worker has ended; `has_end`: it has said before how the function did."""
        self._has_end |= has_end
        self.note_gone()
        return [Act.CONCLUDE]

    def note_gone(self) -> None:
        """The worker has been reaped."""
        self._is_gone, self.kill_at = True, None

    def note_report(self, report: HostReport, *, arrives: bool) -> None:
        """It was made; `arrives`: it is where somebody looks for it, or will."""
        self._report = report
        self.has_reported |= arrives

    def note_delivery(self) -> None:
        """The coordinator has the report."""
        self.has_reported = True

    def tick(self, now: float) -> list[Act]:
        """Do what is due."""
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            return self.on_lost()
        if self.kill_at is None or now < self.kill_at:
            return []
        self.kill_at = None
        return [Act.SAY_LATE, Act.KILL] if self.all_done else [Act.KILL]

    def settle(self) -> None:
        """See whether all is done. A host that is taken away waits for the gang to say who is to
        blame."""
        if self.has_reported and self._report is not None and self._is_gone:
            self.finished |= self._alone or self.all_done or self.stopping

    # -- the coordinator ---------------------------------------------------------------------------

    def on_ready(self, view: HostView) -> list[Act]:
        """The coordinator says that all have joined; `on_view` follows."""
        self.view = view
        waits = not self.ready and self.activity is Activity.WAITING
        self.activity = Activity.STARTING if waits else self.activity
        self.ready = True
        return self._start_if_due()

    def on_view(self, view: HostView, now: float) -> list[Act]:
        """The coordinator says how the gang stands."""
        self.view = view
        acts = [Act.REQUEST_REFORM] if view.reform_requested and self.started else []
        if view.stop and not self.stopping and not self.all_done:
            self.stopping = True
            left_s = self._eviction.left_s if self._eviction.is_known else None
            grace_s = grace_of(view, elastic=self._is_elastic, left_s=left_s)
            acts += self._end_worker(grace_s, now)
        if view.stop and not view.preempted and self._report is not None:
            acts += self._let_go(now)  # It may have been kept for hosts that were still saving.
        if view.all_done and not self.all_done:
            acts += self._dismiss(view.grace_s, now)
        return acts

    def on_lost(self, *, is_final: bool = True) -> list[Act]:
        """Nobody leads any more; `is_final`: nor will again."""
        self.finished = True
        self.nothing_follows |= is_final
        return self._give_up()

    def on_program_gone(self, now: float) -> list[Act]:
        """The program of this host was killed, which does not lead: the leader gets the report,
        unless it is gone as well."""
        self.stopping = self.nothing_follows = True
        self._give_up_at = now + ORPHAN_S
        return self._give_up()

    def _give_up(self) -> list[Act]:
        self._has_end = True
        return [Act.REAP, Act.CONCLUDE]

    # -- this machine ------------------------------------------------------------------------------

    def may_be_taken_away(self) -> bool:
        """Whether it is news that this host is."""
        over = self.stopping or self.all_done or self._report is not None
        return not (over or self._eviction.is_ours)

    def note_eviction(self, eviction: Eviction) -> None:
        """This is what is known now."""
        self._eviction = eviction

    def on_taken_away(self, grace_s: float, now: float) -> list[Act]:
        """This host is taken away. Its function is interrupted when the gang has found out who is
        to blame: until then, no other host fails because of its end."""
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
            # No function is running that could clean up.
            stays = self._has_end and self._eviction.saves_together
            return [] if stays else self._let_go(now)
        return [] if self._eviction.looks else [Act.TERMINATE]

    def _let_go(self, now: float) -> list[Act]:
        """The function has ended, and the gang is stopped."""
        if self._is_gone or not (self._has_end and self.started):
            return [Act.KILL]
        if self._winds_down:
            return []
        longest_s = SURVIVOR_GRACE_S if self._is_elastic else STOPPED_GRACE_S
        until = now + longest_s
        self._winds_down, self.kill_at = True, min(until, self.kill_at or until)
        return [Act.RUN_EXIT_HANDLERS]

    def _dismiss(self, grace_s: float, now: float) -> list[Act]:
        """The worker is not needed any more."""
        self.all_done = True
        exit_ = None if self._report is None else self._report.exit
        self.nothing_follows = exit_ is Exit.RETURNED
        self.kill_at = now + max(grace_s, LEAST_EXIT_S)
        return [Act.EXIT]


def grace_of(stop: HostView, *, elastic: bool, left_s: float | None) -> float:
    """Return how long a worker may take to end by itself after this stop; `left_s` is the time that
    it has left on a host that is taken away."""
    if stop.stop_exit not in (Exit.STOPPED, Exit.HANG):
        return stop.grace_s
    if left_s is not None:
        return left_s
    return min(stop.grace_s, SURVIVOR_GRACE_S if elastic else STOPPED_GRACE_S)
