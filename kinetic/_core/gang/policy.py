"""Whether a job goes on after an attempt has failed, when, and with which slices.

In: how attempts end, which slices are there, the time. Out: a `Form`, a `Restart` or a `GiveUp`;
whether the running gang should make room for a slice that is back. Pure: no I/O, no clock.

An elastic job forms on a range of slices, and counts losses. Any other is a fixed one: it forms on
all slices or not at all, and whatever has failed takes one of its `retries`.

    GATHERING ──all slices there, or enough and nobody has come for a while──> RUNNING
    RUNNING ──an attempt failed──> FORMING ──all slices there, or enough and no time left──> RUNNING
                                      └──too few in time, too many failures──> given up

Promises:
    1. A gang is never formed of fewer slices than `least`, nor of one whose hosts are not all
       there.
    2. It never waits for a slice longer than `slice_timeout_s`; one that shrinks waits only while
       it has too few.
    3. An exception of the function, a cancelled job and one that ran too long are no loss. After
       an exception another attempt follows while `retries` are left, on the slices that are there.
    4. It gives up when it has failed more than `max_failures` times, and names every failure.
       Hosts that could not be started do not count among them; `MOST_FAULTS` of them end it.
    5. The first attempt waits for more slices than `least` for `start_wait_s`, where slices come
       one by one; what happens before it is no failure.
    6. A slice that is lost again before it takes part is started again later and later.
    7. A fixed job whose host was taken away goes on, which counts against no limit but
       `MOST_TAKEN_AWAY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Self

from kinetic._core.exits import ABORTED_RANK, Exit
from kinetic._core.options import Elastic
from kinetic._core.outcome import Outcome, Verdict, blame_rank
from kinetic._core.values import dataclass

MOST_FAULTS = 3
"""How often hosts may fail to start."""
READY_S = 30.0
"""How long hosts that were not lost may take to wait for their place in the next attempt."""
MOST_TAKEN_AWAY = 100
"""How many attempts of a job do not count because its cluster took a host away."""
_LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.5


class SliceState(Enum):
    """Where a slice stands."""

    TAKES_PART = auto()
    EXPECTED = auto()
    """It has not been there yet."""
    COMING = auto()
    """It was not lost; its hosts get ready for the next attempt."""
    READY = auto()
    """All its hosts are ready."""
    AWAY = auto()
    """It was lost."""


@dataclass(frozen=True)
class Loss:
    """Why an attempt has failed that another one may follow.

    Attributes:
        slices: that were lost; () when a collective broke, or all stood still, and all hosts live.
        why: in one line.
    """

    slices: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Failure:
    """One failure of the history: a `Loss`, and the attempt after whose start it happened."""

    attempt: int
    slices: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        what = f"{name_slices(self.slices)} lost: " if self.slices else ""
        return f"attempt {self.attempt}: {what}{self.why}"


@dataclass(frozen=True)
class Form:
    """Start the next attempt on these slices, in this order."""

    slices: tuple[int, ...]


@dataclass(frozen=True)
class Restart:
    """End what is left of these slices, and start their hosts again."""

    slices: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """End the job; `reason` names every failure."""

    reason: str


Decision = Form | Restart | GiveUp


def loss_of(outcome: Outcome, slices: Sequence[int]) -> Loss | None:
    """Return which slices an attempt has lost; None where another attempt would end in the same
    way, or nobody wants one.

    Args:
        outcome: of the attempt, on hosts in the order of slices.
        slices: that took part, in this order.
    """
    first = outcome.first
    if outcome.verdict is not Verdict.FAILED or first is None or not slices:
        return None
    per_slice = len(outcome.reports) // len(slices)
    # Hosts that aborted are lost only if nobody died in another way.
    dead = [r.host for r in outcome.reports if r.exit.kind.fatal and blame_rank(r) != ABORTED_RANK]
    dead = dead or [r.host for r in outcome.reports if r.exit.kind.fatal]
    held_up = first.exit in (Exit.HANG, Exit.NEVER_JOINED)
    lost = {slices[host // per_slice] for host in [*dead, *(outcome.blamed if held_up else ())]}
    if held_up and len(lost) == len(slices):  # No slice is to blame.
        if first.exit is Exit.NEVER_JOINED:
            return None
        # A deadlock of all hosts, which another attempt may not run into.
        lost = {slices[host // per_slice] for host in dead}
    # A collective that broke is a loss, unless hosts that have returned are its cause.
    echoes = first.error is not None and first.error.consequence
    is_broken = echoes and not any(report.ok for report in outcome.reports)
    if first.exit.kind.fatal or held_up or is_broken:
        return Loss(tuple(sorted(lost)), first_line(outcome.reason))
    return None


def slices_to_end(outcome: Outcome, per_slice: int) -> tuple[int, ...]:
    """Return the slices, of so many hosts each, of which a host died or gave no sign of life."""
    silent = (Exit.HANG, Exit.NEVER_JOINED)
    hosts = (r.host for r in outcome.reports if r.exit.kind.fatal or r.exit in silent)
    return tuple(sorted({host // per_slice for host in hosts}))


class AttemptPolicy:
    """The state machine. An attempt begins with it, on all slices."""

    def __init__(
        self,
        rules: Elastic,
        away_s: float = 0.0,
        attempt: int = 1,
        failures: tuple[Failure, ...] = (),
        *,
        retries: int = 0,
        is_fixed: bool = False,
        taken_away: int = 0,
    ) -> None:
        """Begin, or go on with this attempt after those of a leader that was lost.
        `away_s`: how long a lost slice stays away, where the slices are simulated. `retries`: how
        often the function may still fail. `taken_away`: how many attempts of a fixed job have ended
        because a host was taken away."""
        self.rules = rules
        self.is_fixed = is_fixed
        self.retries_left = retries
        self._goes_on_when_taken_away = is_fixed and (retries > 0 or attempt > 1)
        self._taken_away = taken_away
        self._away_s = away_s
        self.attempt = attempt
        self.failures = failures
        self.slices = tuple(range(rules.most))
        """That take part in the current attempt, or took part in the last one."""
        self.faults: tuple[Failure, ...] = ()
        """Hosts that could not be started."""
        self.ran_s = self.paid_s = 0.0
        """How long attempts have run, and all slices could have for what those have cost."""
        self._grows = self.gathers = False
        self._enough_since: float | None = None
        self._standing = dict.fromkeys(self.slices, SliceState.TAKES_PART)
        self._forming_since: float | None = None
        self._early_losses = dict.fromkeys(self.slices, 0)
        self._start_at: dict[int, float] = {}
        self._start_errors: set[str] = set()

    @classmethod
    def make_fixed(
        cls,
        slices: int,
        *,
        start_timeout_s: float = 600.0,
        attempt: int = 1,
        retries: int = 0,
        taken_away: int = 0,
    ) -> Self:
        """Return that of a job that needs all of its slices. Hosts that are started again may take
        `start_timeout_s` to be there."""
        rules = Elastic(slices, slices, max_failures=0, slice_timeout_s=start_timeout_s)
        return cls(rules, attempt=attempt, retries=retries, is_fixed=True, taken_away=taken_away)

    def gather(self, now: float) -> None:
        """Wait for slices before the first attempt, which forms on those that are there."""
        self.gathers, self._forming_since = True, now
        self._standing = dict.fromkeys(self.slices, SliceState.EXPECTED)

    def take_all(self) -> None:
        """Do not gather any longer: the first attempt is on all slices, there or not."""
        self.gathers, self._forming_since, self._start_at = False, None, {}
        self._standing = dict.fromkeys(self.slices, SliceState.TAKES_PART)

    # -- what is known -----------------------------------------------------------------------------

    @property
    def forming(self) -> bool:
        """Whether no attempt runs."""
        return self._forming_since is not None

    @property
    def missing(self) -> tuple[int, ...]:
        """Slices that neither take part nor are ready to."""
        states = (SliceState.AWAY, SliceState.COMING, SliceState.EXPECTED)
        return tuple(each for each, standing in self._standing.items() if standing in states)

    @property
    def could_grow(self) -> bool:
        """Whether an attempt runs, and a slice is there that does not take part."""
        return not self.forming and SliceState.READY in self._standing.values()

    def stays_away(self, which: int) -> bool:
        """Whether a lost slice is not to be started again yet."""
        return which in self._start_at

    def state_of(self, which: int) -> SliceState:
        """Return where a slice stands."""
        return self._standing[which]

    def find_late(self, now: float) -> tuple[int, ...]:
        """Return the slices that were not lost, and whose hosts take too long to get ready."""
        if self._forming_since is None or now - self._forming_since < READY_S:
            return ()
        return self._slices_with(SliceState.COMING)

    def may_repeat(self, outcome: Outcome) -> bool:
        """Whether another attempt follows one that has failed; in an elastic job, though no slice
        was lost, and not where the time is over, which its attempts share."""
        first = outcome.first
        if outcome.verdict is not Verdict.FAILED or first is None or not first.exit.kind.retryable:
            return False
        if _is_taken_away(outcome) and self._goes_on_when_taken_away:
            return self._taken_away < MOST_TAKEN_AWAY
        return self.retries_left > 0 and (self.is_fixed or first.exit is not Exit.TIMEOUT)

    # -- what happens ------------------------------------------------------------------------------

    def count_time(self, ran_s: float) -> None:
        """An attempt has run for this long."""
        self.ran_s += ran_s
        self.paid_s += ran_s * len(self.slices) / self.rules.most

    def note_repeat(self, outcome: Outcome, lost: Sequence[int], now: float) -> None:
        """The function is called again in new processes, because this attempt has failed; these
        slices have ended with it."""
        if self._goes_on_when_taken_away and _is_taken_away(outcome):
            self._taken_away += 1
        else:
            self.retries_left -= 1
        self._grows = True
        self._leave(lost, now)

    def note_failure(self, loss: Loss, now: float) -> None:
        """The attempt has failed in a way that another one may follow."""
        self._grows = False
        self._count(loss)
        self._leave(loss.slices, now)

    def note_failed_start(self, which: int, error: str, now: float) -> None:
        """Record that the hosts of a slice could not be started again. The same error counts once
        while enough other slices can run."""
        ready = sum(its in (SliceState.COMING, SliceState.READY) for its in self._standing.values())
        if self.forming and not (error in self._start_errors and ready >= self.rules.least):
            why = f"the hosts of slice {which} could not be started: {error}"
            self.faults = (*self.faults, Failure(self.attempt, (which,), why))
            self._start_errors.add(error)
        self._send_away(which, now)

    def note_departure(self, now: float) -> None:
        """The attempt has ended to make room for a slice that is back."""
        self._grows = True
        self._leave((), now)

    def lose_slice(self, which: int, why: str, now: float, *, counts: bool = True) -> None:
        """A slice was lost that does not take part. With `counts`, it is a failure if the next
        attempt waits for it; without, never."""
        if self._standing[which] is SliceState.TAKES_PART:
            return  # Its attempt is about to end, and says so.
        if self.forming and self.is_fixed:
            self.faults = (*self.faults, Failure(self.attempt, (which,), first_line(why)))
        elif self.forming and counts and not self.gathers:
            self._count(Loss((which,), first_line(why)))
        self._send_away(which, now)

    def note_ready(self, which: int) -> None:
        """All hosts of a slice wait for their place in the next attempt."""
        if self._standing[which] is not SliceState.TAKES_PART:
            self._standing[which] = SliceState.READY

    def decide(self, now: float) -> Decision | None:
        """Return what to do now, if anything. A `Form` and a `Restart` take effect at once."""
        if self._forming_since is None:
            return self._restart_due(now)
        if len(self.failures) > self.rules.max_failures:
            return GiveUp(too_many(self.rules, self.failures))
        if len(self.faults) >= MOST_FAULTS:
            limit = "retries" if self.is_fixed else "max_failures"
            return GiveUp(too_many_faults(self.faults, self.failures, limit))
        if self.gathers:
            return self._form_if_gathered(now)
        if late := self.find_late(now):
            for which in late:
                self.lose_slice(which, f"its hosts were not ready within {READY_S:g} s", now)
            return self.decide(now)
        waited_s = now - self._forming_since
        ready, over = self._slices_with(SliceState.READY), waited_s >= self.rules.slice_timeout_s
        enough = len(ready) >= self.rules.least and not self._slices_with(SliceState.COMING)
        goes_on = over or self._grows or self.rules.shrinks
        if len(ready) == self.rules.most or (enough and goes_on):
            return self._form(ready)
        if over and not self._slices_with(SliceState.COMING):
            away = self._slices_with(SliceState.AWAY)
            if self.is_fixed:
                return GiveUp(too_late(self.rules))
            return GiveUp(too_few(self.rules, self.failures, away, len(ready)))
        return self._restart_due(now)

    def _form_if_gathered(self, now: float) -> Decision | None:
        ready = self._slices_with(SliceState.READY)
        if len(ready) < self.rules.least:
            self._enough_since = None
            return self._restart_due(now)
        since = self._enough_since = now if self._enough_since is None else self._enough_since
        if len(ready) == self.rules.most or now - since >= self.rules.start_wait_s:
            return self._form(ready)
        return self._restart_due(now)

    # -- details -----------------------------------------------------------------------------------

    def _count(self, loss: Loss) -> None:
        self.failures = (*self.failures, Failure(self.attempt, loss.slices, loss.why))

    def _leave(self, lost: Sequence[int], now: float) -> None:
        self._forming_since = now
        for which, standing in self._standing.items():
            if which in lost:
                self._early_losses[which] = 0
                self._send_away(which, now)
            elif standing is SliceState.TAKES_PART:
                self._standing[which] = SliceState.COMING

    def _send_away(self, which: int, now: float) -> None:
        times = self._early_losses[which]
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** (times - 1), _LONGEST_PAUSE_S) if times else 0.0
        self._early_losses[which] = times + 1
        self._standing[which], self._start_at[which] = SliceState.AWAY, now + pause_s + self._away_s

    def _restart_due(self, now: float) -> Restart | None:
        due = tuple(sorted(each for each, at in self._start_at.items() if now >= at))
        for which in due:
            del self._start_at[which]
        return Restart(due) if due else None

    def _slices_with(self, standing: SliceState) -> tuple[int, ...]:
        return tuple(each for each, its in self._standing.items() if its is standing)

    def _form(self, ready: tuple[int, ...]) -> Form:
        self.attempt += not self.gathers
        self.gathers, self.slices, self._forming_since = False, ready, None
        self._standing |= dict.fromkeys(ready, SliceState.TAKES_PART)
        return Form(ready)


def name_attempt(number: int, limit: int) -> str:
    """Return "2 of 11" for a job that survives `limit` failures, and "12" beyond: attempts that end
    for another reason do not count."""
    return f"{number} of {limit + 1}" if number <= limit + 1 else str(number)


def too_many(rules: Elastic, failures: Sequence[Failure]) -> str:
    """Say that a job has failed too often, with all its failures."""
    most = rules.max_failures
    times = "once" if most == 0 else f"{most + 1} times"
    return f"Given up: it failed {times}, and max_failures is {most}. {_history(failures)}"


def too_many_faults(faults: Sequence[Failure], failures: Sequence[Failure], limit: str) -> str:
    """Say that processes of kinetic's own have failed too often, with all failures of the job;
    `limit` is the option that they do not count against."""
    history = "; ".join(f"attempt {each.attempt}: {each.why.rstrip('.')}" for each in faults)
    others = f" Losses besides: {_history(failures)}" if failures else ""
    return (
        f"Given up: processes of kinetic's own failed {len(faults)} times, which is no fault of "
        f"the function: {history}. Look for what kills them (memory? `dmesg`); {limit} was not "
        f"used up by them.{others}"
    )


def too_few(rules: Elastic, failures: Sequence[Failure], away: Sequence[int], ready: int) -> str:
    """Say that slices did not come back in time, with all failures of the job."""
    rest = f"{count_slices(ready)} left of at least {rules.least}"
    return (
        f"Given up: {name_slices(away)} did not return within {rules.slice_timeout_s:g} s "
        f"(slice_timeout), and there {'is' if ready == 1 else 'are'} {rest}. {_history(failures)}"
    )


def too_late(rules: Elastic) -> str:
    """Say that hosts that were started again were not there in time."""
    return (
        "Given up: not all hosts were ready for the next attempt within "
        f"{rules.slice_timeout_s:g} s (start_timeout)."
    )


def _is_taken_away(outcome: Outcome) -> bool:
    """Whether it ended because the cluster took a host away."""
    return outcome.first is not None and outcome.first.exit is Exit.EVICTED


def _history(failures: Sequence[Failure]) -> str:
    return "; ".join(str(failure).rstrip(".") for failure in failures) + "."


def name_slices(which: Sequence[int]) -> str:
    """Return "slice 1" or "slices 0 and 2"."""
    names = [str(each) for each in which]
    if len(names) < 2:
        return f"slice {names[0]}" if names else "no slice"
    return f"slices {', '.join(names[:-1])} and {names[-1]}"


def describe_returned(which: Sequence[int]) -> str:
    """Return what is said when the function has left its attempt so that these slices, which are
    back, can take part."""
    if not which:
        return "the function has left its attempt, and no slice is back: the next one has as many."
    return f"{name_slices(which)} back: the next attempt begins with more slices."


def count_slices(number: int) -> str:
    """Return "1 slice" or "2 slices"."""
    return f"{number} slice{'' if number == 1 else 's'}"


def first_line(text: str) -> str:
    """Return the first line of a text; "" if it has none."""
    return (text.splitlines() or [""])[0]
