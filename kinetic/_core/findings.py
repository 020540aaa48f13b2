"""What the doctor and preflights say of a machine, a store, a cluster: one word for all of them.
Pure.

In: what was checked, and what was found. Out: `Finding`, a frozen value.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Any

from kinetic._core.values import dataclass


class Level(StrEnum):
    """How serious it is: nothing to do, something to know, something that will go wrong."""

    OK = "ok"
    WARN = "warn"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: what was checked, in one word or two.
        level: how serious it is.
        detail: what was found, and what it means.
        remedy: what to do; "" if there is nothing to do.
    """

    check: str
    level: Level
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"level": str(self.level)}


def ok(check: str, detail: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, Level.OK, detail)


def warn(check: str, detail: str, remedy: str) -> Finding:
    """Return a warning."""
    return Finding(check, Level.WARN, detail, remedy)


def problem(check: str, detail: str, remedy: str = "") -> Finding:
    """Return a finding that stops something from working."""
    return Finding(check, Level.PROBLEM, detail, remedy)
