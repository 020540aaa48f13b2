"""The policy on attempts: whether a job goes on after a failure, when, and with which slices.

In: how attempts end, which slices are ready, the time. Out: a `Form`, a `Restart` or a `GiveUp`;
whether the running gang should end so that a slice that is back can join. Pure: no I/O, no clock.

An elastic job forms on a range of slices, and counts losses. Any other job is fixed: it forms on
all slices or not at all, and each failure uses up one of its `retries`.

    GATHERING ──all slices ready, or enough and `start_wait_s` has passed──> RUNNING
    RUNNING ──an attempt failed──> FORMING ──all slices ready, or enough and time is up──> RUNNING
                                      └──too few in time, too many failures──> given up

Promises:
    1. A gang never forms on fewer than `least` slices, nor on a slice whose hosts are not all
       ready.
    2. The job never waits for a slice longer than `slice_timeout_s`; one that shrinks waits only
       while it has too few.
    3. An exception of the function, a cancelled job and a timeout are no loss. After an exception
       another attempt follows while the job has `retries`, on the slices that are ready.
    4. The job gives up after more than `max_failures` failures, and names every failure. Hosts that
       could not be started are not failures, but `MOST_FAULTS` of them end the job.
    5. Where slices come one by one, the first attempt waits `start_wait_s` for more than `least`
       slices. Losses before the first attempt are no failures.
    6. A slice that is lost repeatedly before it takes part is restarted after longer and longer
       pauses.
    7. A fixed job whose host was taken away goes on; only `MOST_TAKEN_AWAY` limits this.
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
"""Number of failed starts of hosts that ends the job."""
READY_S = 30.0
"""Time limit in seconds for hosts that were not lost to ask for their next assignment."""
MOST_TAKEN_AWAY = 100
"""Most attempts of a job that do not count because its cluster took a host away."""
_LONGEST_PAUSE_S = 30.0
_FIRST_PAUSE_S = 0.5


class SliceState(Enum):
    """The state of a slice."""

    TAKES_PART = auto()
    EXPECTED = auto()
    """The slice has not been ready yet."""
    COMING = auto()
    """The slice was not lost, and its hosts get ready for the next attempt."""
    READY = auto()
    """All hosts of the slice are ready."""
    AWAY = auto()
    """The slice was lost."""


@dataclass(frozen=True)
class Loss:
    """The cause of a failed attempt after which another may follow.

    Attributes:
        slices: slices that were lost; () if every host is still alive, because a collective broke
            or all hosts hung.
        why: the cause, in one line.
    """

    slices: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Failure:
    """One failure of the job's history: a `Loss`, and the attempt in which or after which it
    happened."""

    attempt: int
    slices: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        what = f"{name_slices(self.slices)} lost: " if self.slices else ""
        return f"attempt {self.attempt}: {what}{self.why}"


@dataclass(frozen=True)
class Form:
    """The decision to start the next attempt on these slices, in this order."""

    slices: tuple[int, ...]


@dataclass(frozen=True)
class Restart:
    """The decision to end the remaining hosts of these slices, and restart all their hosts."""

    slices: tuple[int, ...]


@dataclass(frozen=True)
class GiveUp:
    """The decision to end the job; `reason` names every failure."""

    reason: str


Decision = Form | Restart | GiveUp


def loss_of(outcome: Outcome, slices: Sequence[int]) -> Loss | None:
    """Return the loss of an attempt; None if another attempt would end in the same way, or is not
    wanted.

    Args:
        outcome: the attempt's outcome, with hosts in the order of slices.
        slices: slices that took part, in order.
    """
    first = outcome.first
    if outcome.verdict is not Verdict.FAILED or first is None or not slices:
        return None
    per_slice = len(outcome.reports) // len(slices)
    # Hosts that aborted count as lost only if no host died in another way; those that JAX aborts
    # after host 0, only if host 0 did not abort.
    ranks = {r.host: blame_rank(r) for r in outcome.reports if r.exit.kind.fatal}
    lowest = min(ranks.values(), default=0)
    dead = [host for host, rank in ranks.items() if rank < ABORTED_RANK or rank == lowest]
    held_up = first.exit in (Exit.HANG, Exit.NEVER_JOINED)
    lost = {slices[host // per_slice] for host in [*dead, *(outcome.blamed if held_up else ())]}
    if held_up and len(lost) == len(slices):  # No slice is to blame.
        if first.exit is Exit.NEVER_JOINED:
            return None
        # All hosts were in a deadlock, which may not happen in another attempt.
        lost = {slices[host // per_slice] for host in dead}
    # A broken collective is a loss, unless it broke because hosts had returned.
    echoes = first.error is not None and first.error.consequence
    is_broken = echoes and not any(report.ok for report in outcome.reports)
    if first.exit.kind.fatal or held_up or is_broken:
        return Loss(tuple(sorted(lost)), first_line(outcome.reason))
    return None


def slices_to_end(outcome: Outcome, per_slice: int) -> tuple[int, ...]:
    """Return the slices (of `per_slice` hosts) with a host that died or gave no sign of life."""
    silent = (Exit.HANG, Exit.NEVER_JOINED)
    hosts = (r.host for r in outcome.reports if r.exit.kind.fatal or r.exit in silent)
    return tuple(sorted({host // per_slice for host in hosts}))


class AttemptPolicy:
    """The state machine that plans a job's attempts. It starts during an attempt on all slices."""

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
        """Begin a job, or go on with this attempt after the loss of a leader.

        Args:
            rules: the policy of an elastic job; of a fixed one, `least` and `most` are equal.
            away_s: seconds for which a lost simulated slice stays away.
            attempt: the current attempt, from 1.
            failures: failures of earlier attempts.
            retries: number of failures of the function after which it is still called again.
            is_fixed: True unless the job is elastic.
            taken_away: number of attempts of a fixed job that ended because a host was taken away.
        """
        self.rules = rules
        self.is_fixed = is_fixed
        self.retries_left = retries
        self._goes_on_when_taken_away = is_fixed and (retries > 0 or attempt > 1)
        self._taken_away = taken_away
        self._away_s = away_s
        self.attempt = attempt
        self.failures = failures
        self.slices = tuple(range(rules.most))
        """Slices of the current attempt, or of the last one."""
        self.faults: tuple[Failure, ...] = ()
        """Failed starts of hosts."""
        self.ran_s = self.paid_s = 0.0
        """Seconds that attempts have run, and seconds of all slices that would cost the same."""
        self._grows = self.gathers = False
        self._enough_since: float | None = None
        self._standing = dict.fromkeys(self.slices, SliceState.TAKES_PART)
        self._forming_since: float | None = None
        self._early_losses = dict.fromkeys(self.slices, 0)
        self._start_at: dict[int, float] = {}
        self._start_errors: set[str] = set()
        self.is_held = False
        """True while a session waits for a call: no attempt forms, and no time limit counts."""

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
        """Return the policy of a job that needs all of its slices. Restarted hosts have
        `start_timeout_s` to get ready; the other arguments are those of the constructor."""
        rules = Elastic(slices, slices, max_failures=0, slice_timeout_s=start_timeout_s)
        return cls(rules, attempt=attempt, retries=retries, is_fixed=True, taken_away=taken_away)

    def gather(self, now: float) -> None:
        """Wait for slices before the first attempt, which forms on the slices that are ready."""
        self.gathers, self._forming_since = True, now
        self._standing = dict.fromkeys(self.slices, SliceState.EXPECTED)

    def take_all(self) -> None:
        """Stop gathering: the first attempt forms on all slices, ready or not."""
        self.gathers, self._forming_since, self._start_at = False, None, {}
        self._standing = dict.fromkeys(self.slices, SliceState.TAKES_PART)

    def hold(self) -> None:
        """Keep the slices ready, without forming an attempt, until `release`. Slices that have just
        taken part count as never lost."""
        self.is_held = True
        for which, standing in self._standing.items():
            if standing is not SliceState.AWAY:
                self._early_losses[which] = 0

    def release(self, now: float) -> None:
        """Form the next attempt; the time limits for it count from now on."""
        self.is_held, self._forming_since = False, now

    # -- state -------------------------------------------------------------------------------------

    @property
    def forming(self) -> bool:
        """True if no attempt runs."""
        return self._forming_since is not None

    @property
    def missing(self) -> tuple[int, ...]:
        """Slices that neither take part nor are ready."""
        states = (SliceState.AWAY, SliceState.COMING, SliceState.EXPECTED)
        return tuple(each for each, standing in self._standing.items() if standing in states)

    @property
    def could_grow(self) -> bool:
        """True if an attempt runs, and a slice that does not take part is ready."""
        return not self.forming and SliceState.READY in self._standing.values()

    def stays_away(self, which: int) -> bool:
        """True if a lost slice must not be restarted yet."""
        return which in self._start_at

    def state_of(self, which: int) -> SliceState:
        """Return the state of a slice."""
        return self._standing[which]

    def find_late(self, now: float) -> tuple[int, ...]:
        """Return the slices that were not lost, but whose hosts take too long to get ready."""
        if self._forming_since is None or now - self._forming_since < READY_S:
            return ()
        return self._slices_with(SliceState.COMING)

    def may_repeat(self, outcome: Outcome) -> bool:
        """True if another attempt follows a failed one that lost no slice. After a timeout, an
        elastic job has no further attempt, because all of its attempts share the time limit."""
        first = outcome.first
        if outcome.verdict is not Verdict.FAILED or first is None or not first.exit.kind.retryable:
            return False
        if _is_taken_away(outcome) and self._goes_on_when_taken_away:
            return self._taken_away < MOST_TAKEN_AWAY
        return self.retries_left > 0 and (self.is_fixed or first.exit is not Exit.TIMEOUT)

    # -- events ------------------------------------------------------------------------------------

    def count_time(self, ran_s: float) -> None:
        """Count the seconds that an attempt has run."""
        self.ran_s += ran_s
        self.paid_s += ran_s * len(self.slices) / self.rules.most

    def note_repeat(self, outcome: Outcome, lost: Sequence[int], now: float) -> None:
        """Note that the function is called again in new processes after a failed attempt; the hosts
        of the slices `lost` have ended with it."""
        if self._goes_on_when_taken_away and _is_taken_away(outcome):
            self._taken_away += 1
        else:
            self.retries_left -= 1
        self._grows = True
        self._leave(lost, now)

    def note_failure(self, loss: Loss, now: float) -> None:
        """Note a loss after which another attempt may follow."""
        self._grows = False
        self._count(loss)
        self._leave(loss.slices, now)

    def note_failed_start(self, which: int, error: str, now: float) -> None:
        """Record a failed restart of a slice's hosts. The same error counts once while enough other
        slices can run."""
        ready = sum(its in (SliceState.COMING, SliceState.READY) for its in self._standing.values())
        if self.forming and not (error in self._start_errors and ready >= self.rules.least):
            why = f"the hosts of slice {which} could not be started: {error}"
            self.faults = (*self.faults, Failure(self.attempt, (which,), why))
            self._start_errors.add(error)
        self._send_away(which, now)

    def note_departure(self, now: float) -> None:
        """Note that the attempt was ended on purpose, to let a returned slice join the next one."""
        self._grows = True
        self._leave((), now)

    def lose_slice(self, which: int, why: str, now: float, *, counts: bool = True) -> None:
        """Record the loss of a slice that does not take part. With `counts`, the loss is a failure
        if the next attempt waits for the slice; without, never."""
        if self._standing[which] is SliceState.TAKES_PART:
            return  # The end of its attempt will record the loss.
        if self.forming and self.is_fixed:
            self.faults = (*self.faults, Failure(self.attempt, (which,), first_line(why)))
        elif self.forming and counts and not self.gathers:
            self._count(Loss((which,), first_line(why)))
        self._send_away(which, now)

    def note_ready(self, which: int) -> None:
        """Note that all hosts of a slice wait for their assignment in the next attempt."""
        if self._standing[which] is not SliceState.TAKES_PART:
            self._standing[which] = SliceState.READY

    def decide(self, now: float) -> Decision | None:
        """Return the decision that is due, if any. A `Form` and a `Restart` take effect at once."""
        if self._forming_since is None:
            return self._restart_due(now)
        if len(self.failures) > self.rules.max_failures:
            return GiveUp(too_many(self.rules, self.failures))
        if len(self.faults) >= MOST_FAULTS:
            limit = "retries" if self.is_fixed else "max_failures"
            return GiveUp(too_many_faults(self.faults, self.failures, limit))
        if self.gathers and not self.is_held:
            return self._form_if_gathered(now)
        if late := self.find_late(now):
            for which in late:
                self.lose_slice(which, f"its hosts were not ready within {READY_S:g} s", now)
            return self.decide(now)
        if self.is_held:
            return self._restart_due(now)
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
    """Return "2 of 11" for attempt 2 of a job that survives 10 failures (`limit`), but "12" for
    attempt 12: attempts that ended for another reason do not count as failures."""
    return f"{number} of {limit + 1}" if number <= limit + 1 else str(number)


def too_many(rules: Elastic, failures: Sequence[Failure]) -> str:
    """Return the reason to give up a job that has failed too often."""
    most = rules.max_failures
    times = "once" if most == 0 else f"{most + 1} times"
    return f"Given up: it failed {times}, and max_failures is {most}. {_list_failures(failures)}"


def too_many_faults(faults: Sequence[Failure], failures: Sequence[Failure], limit: str) -> str:
    """Return the reason to give up a job after too many failures of kinetic's own processes;
    `limit` names the option whose limit does not apply to them."""
    history = "; ".join(f"attempt {each.attempt}: {each.why.rstrip('.')}" for each in faults)
    others = f" Other losses: {_list_failures(failures)}" if failures else ""
    return (
        f"Given up: kinetic's own processes failed {len(faults)} times, which is no fault of the "
        f"function: {history}. Find out what kills them (memory? `dmesg`); {limit} does not count "
        f"them.{others}"
    )


def too_few(rules: Elastic, failures: Sequence[Failure], away: Sequence[int], ready: int) -> str:
    """Return the reason to give up a job whose slices did not come back in time."""
    return (
        f"Given up: {name_slices(away)} did not return within {rules.slice_timeout_s:g} s "
        f"(slice_timeout). The job has {count_slices(ready)} and needs {rules.least}. "
        f"{_list_failures(failures)}"
    )


def too_late(rules: Elastic) -> str:
    """Return the reason to give up a fixed job whose restarted hosts were not ready in time."""
    return (
        "Given up: not all hosts were ready for the next attempt within "
        f"{rules.slice_timeout_s:g} s (start_timeout)."
    )


def _is_taken_away(outcome: Outcome) -> bool:
    """True if the attempt ended because the cluster took a host away."""
    return outcome.first is not None and outcome.first.exit is Exit.EVICTED


def _list_failures(failures: Sequence[Failure]) -> str:
    return "; ".join(str(failure).rstrip(".") for failure in failures) + "."


def name_slices(which: Sequence[int]) -> str:
    """Return "slice 1" or "slices 0 and 2"."""
    names = [str(each) for each in which]
    if len(names) < 2:
        return f"slice {names[0]}" if names else "no slice"
    return f"slices {', '.join(names[:-1])} and {names[-1]}"


def describe_returned(which: Sequence[int]) -> str:
    """Return the notice that an attempt was ended on purpose, so that these slices can join."""
    if not which:
        return (
            "the function has left its attempt, but no lost slice is back: the next attempt has as "
            "many slices."
        )
    be = "is" if len(which) == 1 else "are"
    return f"{name_slices(which)} {be} back: the next attempt begins with more slices."


def count_slices(number: int) -> str:
    """Return "1 slice" or "2 slices"."""
    return f"{number} slice{'' if number == 1 else 's'}"


def first_line(text: str) -> str:
    """Return the first line of a text; "" if it has none."""
    return (text.splitlines() or [""])[0]
