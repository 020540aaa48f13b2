"""Source code typed into a notebook's cells or at a prompt. It has no file, so it is sent with the
call: tracebacks on hosts can then show its lines.

Only definitions are sent: everything else in a cell, such as a password, is blanked out.
"""

from __future__ import annotations

import io
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinetic._core.plan import Cell

if TYPE_CHECKING:
    import ast

_SEARCHED_BYTES = 64 << 20
"""Number of bytes to search at the start of a pickle: code comes before large data."""
_MOST_BYTES = 1 << 20
"""Limit of the source in one plan, in bytes."""


def find_referenced(
    pickles: Sequence[bytes], titles: Callable[[str], str], cache: Mapping[str, Any] | None = None
) -> tuple[Cell, ...]:
    """Return the cells whose code is in one of the pickles.

    Args:
        pickles: The pickles.
        titles: Returns the name that a notebook shows for a cell, or "".
        cache: Cache of source lines; by default that of `linecache`.
    """
    sources = _list_sources(linecache.cache if cache is None else cache)
    if not sources:
        return ()
    pattern = re.compile(
        b"|".join(re.escape(name) for name in sorted(sources, key=len, reverse=True))
    )
    names = {
        match.group()
        for data in pickles
        for match in pattern.finditer(memoryview(data)[:_SEARCHED_BYTES])
    }
    cells, bytes_left = [], _MOST_BYTES
    for name in sorted(names):
        file, source = name.decode(), keep_definitions(sources[name])
        bytes_left -= len(source)
        if source and bytes_left >= 0:
            cells.append(Cell(file, titles(file) or file, source))
    return tuple(cells)


def keep_definitions(source: str) -> str:
    """Blank out all lines but definitions; line numbers stay. Return "" if it is not Python."""
    import ast

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    numbers = {number for node in tree.body for number in _list_line_numbers(node)}
    lines = _split_lines(source)
    return (
        "".join(line if number in numbers else "\n" for number, line in enumerate(lines, 1))
        if numbers
        else ""
    )


def cache_lines(cells: Sequence[Mapping[str, str]]) -> None:
    """Make tracebacks of this process show the lines of these cells."""
    for cell in cells:
        source = cell["source"]
        # Entries without a modification time are never compared with a file.
        linecache.cache[cell["file"]] = (len(source), None, _split_lines(source), cell["file"])


def _split_lines(source: str) -> list[str]:
    """Split at line ends as Python does: a form feed, unlike in `splitlines`, ends no line."""
    return io.StringIO(source, newline=None).readlines()


def title_cells(text: str, cells: Sequence[Mapping[str, str]]) -> str:
    """Replace file names of cells in a traceback by the names that the notebook shows."""
    for cell in cells:
        text = text.replace(f'File "{cell["file"]}", line', f"{cell['title']}, line")
    return text


def _list_sources(cache: Mapping[str, Any]) -> dict[bytes, str]:
    """Return the sources in linecache's cache that do not come from a file, by file name."""
    entries = [
        (name, entry) for name, entry in list(cache.items()) if len(entry) == 4 and entry[1] is None
    ]
    return {name.encode(errors="replace"): "".join(entry[2]) for name, entry in entries if name}


def _list_line_numbers(node: ast.stmt) -> Iterator[int]:
    """Yield all line numbers of a statement if it contains a function, class or lambda."""
    import ast

    defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
    if any(isinstance(inner, defines) for inner in ast.walk(node)):
        decorators = [inner.lineno for inner in getattr(node, "decorator_list", ())]
        yield from range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)
