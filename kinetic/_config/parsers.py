"""Parsers of settings, from text or from values written in code.

In: the variable's name for messages, and the value. Out: the checked value, or a `UsageError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kinetic._core import checks
from kinetic.errors import UsageError


def text(_variable: str, value: Any) -> str:
    """Accept any value; return it as text."""
    return str(value)


def path(variable: str, value: Any) -> str:
    """Check a path of any kind."""
    text = str(value)
    if "\0" in text:
        raise UsageError(f"{variable} must be a path without NUL characters.")
    return text


def absolute_path(variable: str, value: Any) -> str:
    """Check an absolute path; it may start with "~"."""
    text = path(variable, value)
    if not text.startswith(("/", "~/")) and text != "~":
        raise UsageError(
            f"{variable} must be an absolute path: {text!r} depends on the working directory. "
            f"Write {str(Path(text).absolute())!r}."
        )
    return text


def store(variable: str, value: Any) -> str:
    """Check the address of a store: a URI or an absolute path."""
    return path(variable, value) if "://" in str(value) else absolute_path(variable, value)


def number(variable: str, value: Any) -> float:
    """Check a number that is not negative."""
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        parsed = math.nan
    if not math.isfinite(parsed) or parsed < 0 or isinstance(value, bool):
        raise UsageError(
            f"{variable} must be a number that is not negative, for example 30; got {value!r}."
        )
    return parsed


def positive(variable: str, value: Any) -> float:
    """Check a number above 0."""
    parsed = number(variable, value)
    if parsed == 0:
        raise UsageError(f"{variable} must be more than 0; got {value!r}.")
    return parsed


_SWITCH = dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True) | dict.fromkeys(
    ("0", "false", "f", "no", "n", "off"), False
)


def flag(variable: str, value: Any) -> bool:
    """Parse a switch, such as "1", "true" or "no"."""
    text = str(value).strip().lower()
    if text not in _SWITCH:
        raise UsageError(f"{variable} must be 1 or 0; got {value!r}.")
    return _SWITCH[text]


def comparison(variable: str, value: Any) -> checks.Comparison:
    """Parse the setting for comparing programs: a switch, "inputs" or "strict"."""
    try:
        return checks.comparison(variable, _SWITCH.get(str(value).strip().lower(), value))
    except UsageError:
        raise UsageError(f"{variable} must be 1, 0, inputs or strict; got {value!r}.") from None


def one_of(*names: str) -> Callable[[str, Any], str]:
    """Return a parser that accepts only these names."""

    def parse(variable: str, value: Any) -> str:
        if str(value) not in names:
            raise UsageError(f"{variable} must be {' or '.join(names)}; got {value!r}.")
        return str(value)

    return parse


def prices(variable: str, value: Any) -> dict[str, float]:
    """Parse the user's prices by family: "v6e=2.10, v6e:spot=0.80, l4=0.5", or a mapping."""
    from kinetic._core.accelerators.prices import check_family

    pairs = value
    if not isinstance(value, Mapping):
        parts = [part.partition("=") for part in str(value).split(",") if part.strip()]
        pairs = {name: amount.strip().removeprefix("$") for name, _, amount in parts}
    named = {check_family(str(name).strip()): amount for name, amount in pairs.items()}
    if None in named or "" in named.values():
        raise UsageError(
            f"{variable} must have prices of accelerator families; got {value!r}. Write dollars an "
            'hour for one chip or GPU, for example "v6e=2.10, v6e:spot=0.80, l4=0.5".'
        )
    return {str(name): number(variable, amount) for name, amount in named.items()}


def _adapt_check(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda variable, value: check(variable.removesuffix("="), value)


local_storage = _adapt_check(checks.local_storage)
network_devices = _adapt_check(checks.network_devices)
reservation = _adapt_check(checks.reservation)


def level(variable: str, value: Any) -> str:
    """Check the name of a level of the `logging` package."""
    levels = {"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"}
    text = {"WARN": "WARNING", "FATAL": "CRITICAL"}.get(
        str(value).strip().upper(), str(value).strip().upper()
    )
    if text not in levels:
        raise UsageError(
            f"{variable} must be DEBUG, INFO, WARNING, ERROR or CRITICAL; got {value!r}."
        )
    return text
