"""Findings: the results of the checks that `kinetic doctor` and backends make. Pure."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Any

from kinetic._core.values import dataclass


class Level(StrEnum):
    """The severity of a finding: fine, a warning, or a problem that will stop a job."""

    OK = "ok"
    WARN = "warn"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check, in one word or two.
        level: severity.
        detail: the result, and what it means.
        remedy: what to do; "" if nothing is to be done.
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
