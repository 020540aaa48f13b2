"""The policy of an elastic job with a single controller: whether, and on which slices, its function
is called again after an error.

In: how a call of the function ended, which slices respond. Out: a `NextCall`, a `GiveUp`, or None
if the error is the function's own. Pure: no I/O, no clock.

Pathways raises JAX's runtime error for anything that goes wrong on a slice, so that only the
error's text can tell its cause.

Promises:
    1. An exception of the function never counts as the loss of a slice.
    2. An error that may have another cause counts as a loss if a slice does not respond. If all
       slices respond, the function is called again, but not twice in a row for such errors.
    3. The job is given up after more than `max_failures` failures, and names every failure.
    4. The next call has at least `least` slices, and waits for more for at most `slice_timeout_s`;
       a job that shrinks waits only while it has too few.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kinetic._core.gang.policy import (
    Failure,
    GiveUp,
    first_line,
    name_slices,
    too_few,
    too_many,
)
from kinetic._core.options import Elastic
from kinetic._core.values import dataclass

_CERTAIN = ("DATA_LOSS",)
_LIKELY = ("DEADLINE_EXCEEDED", "NOT_FOUND", "INTERNAL")
_OWN_CODE = ("Callback error", "callback failed")
"""Text of INTERNAL errors that were raised by a callback of the user's code in a computation."""


class Cause(Enum):
    """The cause of a runtime error of JAX, by its text."""

    LOSS = auto()
    PERHAPS_LOSS = auto()
    """The loss of a slice, or another cause."""
    OTHER = auto()


def cause_of(text: str) -> Cause:
    """Return the cause of a runtime error of JAX with this text."""
    if any(word in text for word in _CERTAIN):
        return Cause.LOSS
    if any(word in text for word in _OWN_CODE):
        return Cause.OTHER
    return Cause.PERHAPS_LOSS if any(word in text for word in _LIKELY) else Cause.OTHER


@dataclass(frozen=True)
class NextCall:
    """The decision to call the function again.

    Attributes:
        wanted: number of slices for which the call waits, for at most `slice_timeout_s`.
        enough: number of slices with which the call begins after that time.
    """

    wanted: int
    enough: int


class Calls:
    """Counts the calls of a job's function and their failures, and decides what follows each."""

    def __init__(self, rules: Elastic) -> None:
        self.rules = rules
        self.attempt = 1
        self.failures: tuple[Failure, ...] = ()
        self._in_doubt = False

    def handle_failure(
        self, cause: Cause, lost: Sequence[int], why: str
    ) -> NextCall | GiveUp | None:
        """Decide what follows a call that ended in a runtime error of JAX.

        Args:
            cause: the error's cause.
            lost: slices that do not respond.
            why: the error, in one line.

        Returns:
            The decision; None if the error is the function's own.
        """
        in_doubt = cause is Cause.PERHAPS_LOSS and not lost
        if cause is Cause.OTHER or (in_doubt and self._in_doubt):
            return None
        self._in_doubt = in_doubt
        self.failures = (*self.failures, Failure(self.attempt, tuple(lost), first_line(why)))
        rules = self.rules
        if len(self.failures) > rules.max_failures:
            return GiveUp(too_many(rules, self.failures))
        return NextCall(rules.least if rules.shrinks else rules.most, rules.least)

    def handle_departure(self) -> NextCall:
        """Return the call that follows after the function has ended to let a slice take part."""
        return NextCall(self.rules.least, self.rules.least)

    def begin_attempt(self) -> None:
        """Count the next call."""
        self.attempt += 1

    def too_few(self, answering: Sequence[int]) -> GiveUp:
        """Return the decision to give up, because too few slices have come back in time."""
        lost = [each for each in range(self.rules.most) if each not in answering]
        return GiveUp(too_few(self.rules, self.failures, lost, len(answering)))

    def describe_failure(self) -> str:
        """Return a line about the last failure for the log."""
        last, number, most = self.failures[-1], len(self.failures), self.rules.max_failures
        what = f"{name_slices(last.slices)} lost" if last.slices else "a computation broke"
        limit = f"of at most {most}" if number <= most else f"and max_failures is {most}"
        return f"{what} (failure {number} {limit}): {last.why}"
