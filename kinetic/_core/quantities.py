"""Amounts of processors and memory as people write them, such as 500m and 60Gi.

In: text. Out: numbers.
"""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([mkMGTP]|[KMGTP]i)?", re.ASCII)


def bytes_of(quantity: str) -> int:
    """Return the bytes of a quantity as clusters write it, such as 60Gi; 0 if it is none."""
    return int(amount_of(quantity))


def amount_of(quantity: str) -> float:
    """Return a quantity as clusters write it, such as 60Gi or 500m, as a number; 0 if it is
    none."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return 0.0
    unit = match[2] or ""
    if unit == "m":
        return float(match[1]) / 1000
    base = 1024 if unit.endswith("i") else 1000
    return float(match[1]) * float(base ** " KMGTP".index(unit[:1].upper() or " "))
