"""Source lines of a program's operations. A cached report of the same program gets the current
lines: the code may have moved since. Pure."""

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
_JAX_FOLDER = "/jax/_src/"
_PMAP_NAME = "_fun"
"""The name that `jax.pmap` gives to every function."""

Frame = tuple[str, str, str]
"""A file, a line in it, and a function."""


def read_origins(text: str) -> tuple[str, ...]:
    """Return the user's source line of each operation, "file:line (function)"; "" if unknown.

    Args:
        text: A StableHLO module with its locations.
    """
    return tuple(origin for _, origin in read_operations(text))


def read_operations(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text before each location of a StableHLO module, and the user's source line as in
    `read_origins`."""
    table = dict(_TABLE.findall(text))

    @functools.cache
    def name_origin(name: str) -> str:
        return hlo.choose_frame((file, f"{file}:{line} ({function})") for file, line, function in
                              _read_frames(table, name))  # fmt: skip

    pieces = _USE.split(text[: _find_end(text)])
    for operation, name in zip(pieces[::2], pieces[1::2], strict=False):
        yield operation, name_origin(name)


def _find_end(text: str) -> int:
    """Return the index at which the operations end and the table of their locations begins."""
    return text.rfind("\n}") + 1 or len(text)


def _read_frames(table: Mapping[str, str], name: str, depth: int = 0) -> Iterator[Frame]:
    """Yield the frames of a location, innermost first."""
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
    """Return a report in which the present source lines, `now`, replace those of `before`."""
    moved = dict(zip(before, now, strict=False))
    buffers = tuple(
        replace(buffer, source=moved.get(buffer.source, buffer.source)) for buffer in report.buffers
    )
    return replace(report, buffers=buffers)


# -- functions -------------------------------------------------------------------------------------


def name_source(function: Any) -> str:
    """Return "file:line" of a function under its wrappers; "" if it has none."""
    with contextlib.suppress(TypeError, OSError, ValueError):
        code = getattr(unwrap(function), "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def unwrap(function: Any) -> Any:
    """Return the function under its wrappers; for a callable object, its `__call__`."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return type(inner).__call__ if callable(inner) and not hasattr(inner, "__code__") else inner


def name_function(function: Any) -> str:
    """Return the name of a function; for a callable object, that of its class."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return str(getattr(inner, "__name__", type(inner).__name__))


def is_own(name: str, source: str) -> bool:
    """True if a function is the user's, not a library's.

    Args:
        name, source: From `lowering.find_origin`.
    """
    return name == _PMAP_NAME or not hlo.is_library(source)


def is_from_jax(source: str) -> bool:
    """True if the function belongs to JAX."""
    return _JAX_FOLDER in source


def find_own(name: str, origins: Sequence[str]) -> tuple[str, str] | None:
    """Return the function of this name from which operations come, and its first line; None if
    there is none. Under `jax.pmap`, whose functions have no names, return the function that most
    operations come from."""
    parts = [origin.removesuffix(")").rpartition(" (") for origin in origins]
    own = [(function.rpartition(".")[2], line) for line, _, function in parts
           if not hlo.is_library(line)]  # fmt: skip
    most = Counter(function for function, _ in own).most_common(1)
    wanted = most[0][0] if most and name == _PMAP_NAME else name
    return next((origin for origin in own if origin[0] == wanted), None)
