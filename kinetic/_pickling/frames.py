"""Frames of a traceback as plain tuples, and tracebacks made of them again: an exception raised on
a host is shown as if it were raised here.

In: a traceback, or frames. Out: the other. Pure. Terminals, notebooks and debuggers show the result
like their own: the right file, function and line, with carets below the expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import CodeType, TracebackType
from typing import Any

Frame = tuple[Any, ...]
"""file, function, line, first line of the function, last line of the expression, its first column,
its last column."""

_NO_COLUMNS, _LONG_FORM = 13, 14
"""Kinds of entries in a table of positions (Objects/locations.md of CPython)."""
_UNITS_PER_ENTRY = 8


def describe_frame(traceback: TracebackType, file: str) -> Frame:
    """Return what is needed to show the traceback's outermost frame, under another file name."""
    code = traceback.tb_frame.f_code
    line = max(traceback.tb_lineno or 1, 1)
    found = next(islice(code.co_positions(), max(traceback.tb_lasti, 0) // 2, None), (None,) * 4)
    positions = found[1:] if found[0] == line else (None, None, None)
    return (file, code.co_name, line, code.co_firstlineno, *positions)


def traceback_of(frames: Sequence[Frame]) -> TracebackType | None:
    """Make a traceback of frames, outermost first; each runs code that only raises."""
    made: TracebackType | None = None
    for frame in reversed(frames):
        below, made = made, _raise_in(frame)
        if made is not None:
            made.tb_next = below
    return made


def _raise_in(frame: Frame) -> TracebackType | None:
    full = [*frame, *[None] * (7 - len(frame))]
    file, function, line, first = full[:4]
    positions = full[4:]
    stub = compile("raise error", "<kinetic>", "exec")
    code = stub.replace(
        co_filename=file,
        co_name=function,
        co_qualname=function,
        co_firstlineno=first or line,
        co_linetable=_table(stub, line - (first or line), positions, line),
    )
    try:
        exec(code, {"__file__": file, "__name__": "?", "error": _Marker()})
    except _Marker as error:
        return error.__traceback__.tb_next if error.__traceback__ is not None else None
    return None


class _Marker(Exception):
    """Raised in the frames, and caught here."""


def _table(code: CodeType, delta: int, positions: Sequence[int | None], line: int) -> bytes:
    """Map all instructions of the code to one position."""
    left, table = len(code.co_code) // 2, bytearray()
    while left > 0:
        units = min(left, _UNITS_PER_ENTRY)
        table += _entry(units, delta, positions, line)
        left, delta = left - units, 0
    return bytes(table)


def _entry(units: int, delta: int, positions: Sequence[int | None], line: int) -> bytes:
    end_line, first_column, last_column = positions
    if end_line is None or first_column is None or last_column is None:
        return bytes([0x80 | _NO_COLUMNS << 3 | (units - 1)]) + _encode_signed(delta)
    place = (
        _encode_signed(delta)
        + _number(max(end_line - line, 0))
        + _number(first_column + 1)
        + _number(last_column + 1)
    )
    return bytes([0x80 | _LONG_FORM << 3 | (units - 1)]) + place


def _number(value: int) -> bytes:
    """Six bits a byte, lowest first; the seventh bit says that more follow."""
    out = bytearray()
    while value >= 64:
        out.append(0x40 | (value & 0x3F))
        value >>= 6
    out.append(value)
    return bytes(out)


def _encode_signed(value: int) -> bytes:
    return _number((-value << 1) | 1 if value < 0 else value << 1)
