"""Quantities of processors and memory as Kubernetes writes them, such as 500m and 60Gi."""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([mkMGTP]|[KMGTP]i)?", re.ASCII)


def bytes_of(quantity: str) -> int:
    """Return the bytes of a quantity such as 60Gi; 0 if the text is not a quantity."""
    return int(amount_of(quantity))


def amount_of(quantity: str) -> float:
    """Return a quantity such as 60Gi or 500m as a number; 0 if the text is not a quantity."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return 0.0
    unit = match[2] or ""
    if unit == "m":
        return float(match[1]) / 1000
    base = 1024 if unit.endswith("i") else 1000
    return float(match[1]) * float(base ** " KMGTP".index(unit[:1].upper() or " "))
