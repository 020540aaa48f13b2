"""Declared data on the host's side of a pickle: a reference is pickled, a path comes out.

In: the place of each data on this host. Out: the path, as a plain string, where the caller had
passed `Data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kinetic.errors import SetupFailed

_places: tuple[str, ...] = ()
"""Of the job whose worker this process is."""


@dataclass(frozen=True)
class Reference:
    """Stands for the data with this position in the plan."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return delivered, (self.number,)


def expect(places: Sequence[str]) -> None:
    """Say where the data of the plan lies on this host, before the call is unpickled."""
    global _places
    _places = tuple(places)


def delivered(number: int) -> str:
    """Return the path of one data.

    Raises:
        SetupFailed: this process runs no job that has it.
    """
    if not 0 <= number < len(_places):
        raise SetupFailed(
            f"The call needs its data {number}, which is not on this host. Submit the job again."
        )
    return _places[number]
