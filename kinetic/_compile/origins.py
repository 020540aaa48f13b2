"""The lines that a program's operations come from, before it is compiled: so that a report that was
made of the same program names the lines of where it is now.

In: a StableHLO module as text, with its locations; functions. Out: a line for each operation; a
report with other lines; names and lines of functions, and whose they are. Pure.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kinetic._compile import hlo
from kinetic._compile.report import CompileReport

_TABLE = re.compile(r"^#(loc\d*) = loc\((.*)\)$", re.MULTILINE)
_USE = re.compile(r"\bloc\(#(loc\d*)\)")
_PLACE = re.compile(r'"([^"]*)":(\d+)')
_NAMED = re.compile(r'"([^"]*)"\(#(loc\d*)\)')
_CALL = re.compile(r"callsite\(#(loc\d*) at #(loc\d*)\)")
_DEEPEST = 100
_OF_JAX = "/jax/_src/"
_OF_PMAP = "_fun"
"""What `jax.pmap` calls every function."""

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
    location = table.get(name, "")
    if depth > _DEEPEST:
        return
    if call := _CALL.fullmatch(location):
        for inner in call.groups():
            yield from _read_frames(table, inner, depth + 1)
    elif named := _NAMED.fullmatch(location):
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
        replace(buffer, source=moved.get(buffer.source, buffer.source)) for buffer in report.buffers
    )
    return replace(report, buffers=buffers)


# -- functions -------------------------------------------------------------------------------------


def name_source(function: Any) -> str:
    """Return "file:line" of a function, under whatever wraps it; "" if it has none."""
    with contextlib.suppress(TypeError, OSError, ValueError):
        code = getattr(unwrap(function), "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def unwrap(function: Any) -> Any:
    """Return the function under whatever wraps it; an object's, if that is what can be called."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return type(inner).__call__ if callable(inner) and not hasattr(inner, "__code__") else inner


def name_function(function: Any) -> str:
    """Return the name of a function; of an object that can be called, that of its class."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_own(name: str, source: str) -> bool:
    """Return whether a function is no library's, as `find_origin` tells it."""
    return name == _OF_PMAP or not hlo.is_of_library(source)


def is_of_jax(source: str) -> bool:
    """Return whether a function is JAX's own."""
    return _OF_JAX in source


def find_own(name: str, origins: Sequence[str]) -> tuple[str, str] | None:
    """Return the function of this name that operations are from, and its first line; under
    `jax.pmap`, which has no name, the one that most are from."""
    places = [each.removesuffix(")").rpartition(" (") for each in origins]
    own = [(function.rpartition(".")[2], line) for line, _, function in places
           if not hlo.is_of_library(line)]  # fmt: skip
    most = Counter(function for function, _ in own).most_common(1)
    wanted = most[0][0] if most and name == _OF_PMAP else name
    return next((each for each in own if each[0] == wanted), None)
