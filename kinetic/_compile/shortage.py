"""What the compiler says of a program that is too large, read: by how much, and which arrays are
the largest.

In: its text. Out: `MemoryUse`, `Buffer`s. Pure.
"""

from __future__ import annotations

import re

from kinetic._compile.report import Buffer, MemoryUse
from kinetic._core.accelerators.chips import GIB

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB, "T": GIB << 10}
_SIZE = r"([\d.]+)([KMGT]?)"
_NEEDED = (
    rf"Used {_SIZE} of [\d.]+[KMGT]? hbm",
    rf"memory required for [^()]*\({_SIZE}\)",
    rf"requires {_SIZE}",
)
_AVAILABLE = (
    rf"Used [\d.]+[KMGT]? of {_SIZE} hbm",
    rf"available HBM \({_SIZE}\)",
    rf"{_SIZE} (?:is )?available",
)
_ALLOCATION = re.compile(
    rf"Size: {_SIZE}B?\s+(?:Operator: (?P<operator>.*)\s+)?"
    rf"Shape: (?P<array>[^\s{{]+)\S*\s+(?:Unpadded size: (?P<data>[\d.]+)(?P<unit>[KMGT]?))?"
)
_NAME = re.compile(r'op_name="([^"]*)"')
_LINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')


def read_shortage(message: str) -> MemoryUse:
    """Return what all of it needs and what there is, where it is said."""
    return MemoryUse(needed=_find_size(message, _NEEDED), available=_find_size(message, _AVAILABLE))


def read_allocations(message: str) -> tuple[Buffer, ...]:
    """Return the arrays that it lists as the largest, in its order; some texts list none."""
    return tuple(map(_read_allocation, _ALLOCATION.finditer(message)))


def _read_allocation(match: re.Match[str]) -> Buffer:
    padded_bytes = _bytes_of(match[1], match[2])
    data = _bytes_of(match["data"], match["unit"]) if match["data"] else padded_bytes
    operator = match["operator"] or ""
    name, line = _NAME.search(operator), _LINE.search(operator)
    return Buffer(
        array=match["array"],
        bytes=padded_bytes,
        data_bytes=data,
        what=name[1].rpartition("/")[2] if name else "",
        source=f"{line[1]}:{line[2]}" if line else "",
    )


def _find_size(message: str, patterns: tuple[str, ...]) -> int:
    match = next(filter(None, (re.search(pattern, message) for pattern in patterns)), None)
    return _bytes_of(match[1], match[2]) if match else 0


def _bytes_of(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])
