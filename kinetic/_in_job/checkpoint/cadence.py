"""When a step is saved, and in which tier. Pure.

In: the options of a checkpointer, a step, what the hosts have agreed on. Out: tiers.
"""

from __future__ import annotations

from kinetic._core.duration import Duration, in_seconds
from kinetic._core.values import dataclass
from kinetic.errors import UsageError, UsageTypeError


@dataclass(frozen=True)
class Cadence:
    """How often.

    Attributes:
        every: the persistent tier has the steps that this divides; None for none of them.
        every_s: ... and one after so many seconds without; None for never.
        local_every: the local tier has the steps that this divides; None to have no such tier.
    """

    every: int | None
    every_s: float | None
    local_every: int | None

    def is_persistent(self, step: int, *, asked: bool) -> bool:
        """Whether a step goes to the persistent tier."""
        return asked or (self.every is not None and step % self.every == 0)

    def is_local(self, step: int) -> bool:
        """Whether a step goes to the local tier."""
        return self.local_every is not None and step % self.local_every == 0


def cadence(every: object, at_least_every: Duration | None, local_every: object) -> Cadence:
    """Check the options of a checkpointer.

    Args:
        every: steps, or a length of time with a unit ("10m", a timedelta).
        at_least_every: a length of time, or None.
        local_every: steps, or None.

    Raises:
        UsageError: one of them cannot work.
    """
    every_s = _seconds("at_least_every", at_least_every)
    if isinstance(every, float):  # `steps / 10` is one, and means steps
        raise UsageTypeError(
            f'every= is a number of steps, an int, or a length of time with a unit, such as "10m"; '
            f"it is {every!r}."
        )
    if isinstance(every, int | None) and not isinstance(every, bool):
        steps = _steps("every", every)
    else:
        spent = _seconds("every", every)
        assert spent is not None  # every=None is above
        steps, every_s = None, spent
    return Cadence(steps, every_s, _steps("local_every", local_every))


def _steps(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"{name}= is a number of steps, or None; it is {value!r}.")
    if value < 1:
        raise UsageError(f"{name}= must be at least 1 step; it is {value}. None switches it off.")
    return value


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = in_seconds(value)
    except ValueError:
        seconds = None
    if seconds is None or not seconds > 0:
        raise UsageError(
            f'{name}= is a length of time, such as "10m", "1h30m" or a timedelta; it is {value!r}.'
        )
    return seconds
