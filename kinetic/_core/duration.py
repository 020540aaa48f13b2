"""Durations as users write them: 90, "90", "90s", "1h30m", timedelta(minutes=2). Pure."""

from __future__ import annotations

import math
from datetime import timedelta

from kinetic.errors import UsageTypeError

Duration = float | str | timedelta
"""The type of every option that is a duration; a bare number is seconds."""

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def parse_duration_s(text: str, *, may_be_zero: bool = False) -> float:
    """Parse "90", "10s", "5m", "1h30m" or "7d", and return seconds; a bare number is seconds.

    Raises:
        ValueError: the text is not a duration, or the duration is not above zero.
    """
    text = text.strip().lower()
    try:
        total_s = float(text)
    except ValueError:
        total_s = sum(value * _SECONDS[unit] for value, unit in _split_units(text))
    if may_be_zero and total_s == 0:
        return 0.0
    if not 0 < total_s < float("inf"):
        raise ValueError(f"{text!r} is not above zero")
    return total_s


def in_seconds(value: object) -> float | None:
    """Convert a duration to seconds, without checking its size; None for another type.

    Raises:
        ValueError: the value is text that is not a duration, or is below zero.
    """
    if isinstance(value, str):
        return parse_duration_s(value, may_be_zero=True)
    if isinstance(value, timedelta):
        return value.total_seconds()
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value


def patience_s(timeout: object) -> float:
    """Check a caller's `timeout`, and return it in seconds.

    Raises:
        UsageTypeError: the value is not a duration.
    """
    try:
        patience = in_seconds(timeout)
    except ValueError:
        patience = None
    if patience is None or not patience <= math.inf:
        raise UsageTypeError(
            'timeout must be a number of seconds, text such as "90s" or "1h30m", a timedelta, or '
            f"None to wait without limit; got {timeout!r}."
        )
    return float(min(patience, 1e300))


def _split_units(text: str) -> list[tuple[float, str]]:
    parts: list[tuple[float, str]] = []
    while text:
        digits = len(text) - len(text.lstrip("0123456789."))
        letters = len(text[digits:]) - len(text[digits:].lstrip("abcdefghijklmnopqrstuvwxyz"))
        unit = text[digits : digits + letters]
        if not digits or unit not in _SECONDS:
            raise ValueError(f"{text!r} is not a duration")
        parts.append((float(text[:digits]), unit))
        text = text[digits + letters :]
    if not parts:
        raise ValueError("an empty text is not a duration")
    return parts
