"""The lines that a program's operations come from, before it is compiled: so that a report that was
made of the same program names the lines of where it is now.

In: a StableHLO module as text, with its locations. Out: a line for each operation; a report with
other lines. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kinetic._compile import hlo
from kinetic._compile.report import CompileReport

_TABLE = re.compile(r"^#(loc\d*) = loc\((.*)\)$", re.MULTILINE)
_USE = re.compile(r"\bloc\(#(loc\d*)\)")
_PLACE = re.compile(r'"([^"]*)":(\d+)')
_NAMED = re.compile(r'"([^"]*)"\(#(loc\d*)\)')
_CALL = re.compile(r"callsite\(#(loc\d*) at #(loc\d*)\)")
_DEEPEST = 100

Frame = tuple[str, str, str]
"""A file, a line in it, and a function."""


def read_origins(text: str) -> tuple[str, ...]:
    """Return "file:line (function)" of each operation, in order: of the user's line, as in the
    reports; "" where none is known."""
    table = dict(_TABLE.findall(text))

    @functools.cache
    def name_origin(name: str) -> str:
        return hlo.name_frame((file, f"{file}:{line} ({function})") for file, line, function in
                              _read_frames(table, name))  # fmt: skip

    body = text[: _find_end(text)]
    return tuple(name_origin(name) for name in _USE.findall(body))


def _find_end(text: str) -> int:
    """Where the operations end, and the table of their locations begins."""
    return text.rfind("\n}") + 1 or len(text)


def _read_frames(table: Mapping[str, str], name: str, depth: int = 0) -> Iterator[Frame]:
    """The frames of a location, the innermost first."""
    said = table.get(name, "")
    if depth > _DEEPEST:
        return
    if call := _CALL.fullmatch(said):
        for inner in call.groups():
            yield from _read_frames(table, inner, depth + 1)
    elif named := _NAMED.fullmatch(said):
        if place := _PLACE.match(table.get(named[2], "")):
            yield place[1], place[2], named[1]
        else:
            yield from _read_frames(table, named[2], depth + 1)


def rename_origins(
    report: CompileReport, before: Sequence[str], now: Sequence[str]
) -> CompileReport:
    """Return a report of the same program when its lines were others, with those of now."""
    moved = dict(zip(before, now, strict=False))
    buffers = tuple(
        replace(each, source=moved.get(each.source, each.source)) for each in report.buffers
    )
    return replace(report, buffers=buffers)
