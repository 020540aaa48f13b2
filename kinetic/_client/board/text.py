"""Formatting for people: ages, sizes, costs, aligned tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic._core.plan import Cost

_AGES = ((86400, "d"), (3600, "h"), (60, "m"))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_JOINERS = "\u200c\u200d"
"""Characters that join letters and emoji: harmless, though Python calls them not printable."""


def age(seconds: float) -> str:
    """Return a duration in its largest sensible unit: "0.4s", "45s", "12m", "5h", "9d"."""
    if 0 < seconds < 1:
        return _fraction(seconds)
    whole_s = max(0, int(seconds))
    return next(
        (f"{whole_s // unit_s}{name}" for unit_s, name in _AGES if whole_s >= 2 * unit_s),
        f"{whole_s}s",
    )


def duration(seconds: float) -> str:
    """Return a duration more precisely than `age`: "0.4s", "8.2s", "45s", "12m30s", "3h05m"."""
    if seconds < 10:
        return _fraction(max(0.0, seconds))
    whole_s = int(seconds)
    if whole_s < 120:
        return f"{whole_s}s"
    if whole_s < 2 * 3600:
        return f"{whole_s // 60}m{whole_s % 60:02d}s"
    return f"{whole_s // 3600}h{whole_s // 60 % 60:02d}m"


def limit(seconds: float) -> str:
    """Return a time limit exactly: "90 s", "30 min", "12 h"."""
    unit_s, name = next((u for u in ((3600, "h"), (60, "min")) if seconds % u[0] == 0), (1, "s"))
    return f"{seconds / unit_s:g} {name}"


def _fraction(seconds: float) -> str:
    return f"{seconds:.2f}s" if 0.005 <= seconds < 0.1 else f"{seconds:.1f}s"


def size(size_bytes: float) -> str:
    """Return a size in its largest sensible unit: "812 B", "1.5 GiB"."""
    power = 0
    while size_bytes >= 1024 and power < len(_SIZES) - 1:
        size_bytes, power = size_bytes / 1024, power + 1
    return f"{size_bytes:.1f} {_SIZES[power]}" if power else f"{size_bytes:.0f} B"


def describe_cost(cost: Cost, so_far_usd: float, *, is_over: bool) -> str:
    """Return a job's cost: "about $1.20 so far ($43.20 an hour, list price, us-east5)"."""
    if cost.is_simulated:
        return f"nothing: the job is simulated (a real one: {cost.rate})"
    from kinetic._core.accelerators.prices import in_usd  # not needed by lists

    return f"about {in_usd(so_far_usd)}{'' if is_over else ' so far'} ({cost.rate})"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 job", "3 jobs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(value: object) -> str:
    """Return a value as one line with control characters replaced by blanks, so that a name from a
    record cannot control the terminal."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _JOINERS else " " for c in text).strip()


def printable_lines(value: str) -> str:
    """Return lines of text with control characters escaped: they cannot control the terminal."""
    allowed = f"\n\t{_JOINERS}"
    return "".join(
        c if c.isprintable() or c in allowed else c.encode("unicode_escape").decode() for c in value
    )


def align_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header, padded with blanks. No cell is cut, so programs can read it."""
    table = [tuple(columns), *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    )


def align_pairs(items: Sequence[tuple[str, str]]) -> str:
    """Return "Name:  value" lines with aligned values."""
    width = max(len(name) for name, _ in items) + 1
    return "\n".join(f"{name + ':':<{width}}  {printable(value)}".rstrip() for name, value in items)
