"""Values that options take, and options that several commands share.

In: words of the command line. Out: numbers with units, names with values. Called by commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    _FloatType = click.ParamType[float]
    _PairType = click.ParamType[tuple[str, str]]
else:  # older versions of click have no type parameter here
    _FloatType = _PairType = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_duration_s(text: str) -> float:
    """Read "90", "10s", "5m", "1h30m" or "7d" as seconds; a bare number is seconds.

    Raises:
        ValueError: the text is no duration above zero.
    """
    text = text.strip().lower()
    try:
        total_s = float(text)
    except ValueError:
        total_s = sum(value * _SECONDS[unit] for value, unit in _parts(text))
    if not 0 < total_s < float("inf"):
        raise ValueError(f"{text!r} is not above zero")
    return total_s


def _parts(text: str) -> list[tuple[float, str]]:
    parts: list[tuple[float, str]] = []
    while text:
        digits = len(text) - len(text.lstrip("0123456789."))
        letters = len(text[digits:]) - len(text[digits:].lstrip("abcdefghijklmnopqrstuvwxyz"))
        unit = text[digits : digits + letters]
        if not digits or unit not in _SECONDS:
            raise ValueError(f"{text!r} is no duration")
        parts.append((float(text[:digits]), unit))
        text = text[digits + letters :]
    if not parts:
        raise ValueError("nothing is no duration")
    return parts


class Duration(_FloatType):
    """A length of time with its unit, as seconds."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds."""
        if isinstance(value, int | float):
            return float(value)
        try:
            return parse_duration_s(value)
        except ValueError:
            self.fail(f"{value!r} is no length of time. Write a number and a unit: 30s, 5m, 2h, 1h30m, 7d.", param, ctx)


class Assignment(_PairType):
    """A variable and its value: NAME=VALUE."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the name and the value."""
        if isinstance(value, tuple):
            return value
        name, equals, content = str(value).partition("=")
        if not equals or not name:
            self.fail(
                f"{value!r} is not NAME=VALUE. To pass a value of your own environment unseen, use --secret {name}.", param, ctx
            )
        return name, content


DURATION = Duration()
ASSIGNMENT = Assignment()


def json_option(command: F) -> F:
    """Add --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def accepted(*names: str, is_flag: bool = False) -> Callable[[F], F]:
    """Take an option of keras-kinetic that has nothing to change here, so that commands written for it go on working."""
    return click.option(*names, hidden=True, expose_value=False, is_flag=is_flag)


def yes_option(command: F) -> F:
    """Add --yes."""
    return click.option("--yes", "-y", is_flag=True, help="Do not ask.")(command)
