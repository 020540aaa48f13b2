"""Source that lies in no file: typed into a notebook's cells or at a prompt. It is sent with the
code made of it.

In: pickles, and the interpreter's cache of source lines. Out: `Cell`s of a plan; on a host,
tracebacks that show their lines. Only definitions are sent: anything else in a cell, a password for
example, is left blank.
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

_LOOKED_AT_BYTES = 64 << 20
"""Of a pickle. A function's code comes early in it; the data after that do not matter here."""
_MOST_BYTES = 1 << 20
"""The most source in one plan."""


def find_referenced(
    pickles: Sequence[bytes], titles: Callable[[str], str], cache: Mapping[str, Any] | None = None
) -> tuple[Cell, ...]:
    """Return the cells whose code is in one of the pickles; `titles` gives the name that a notebook
    shows for a cell, or ""."""
    sources = _without_file(linecache.cache if cache is None else cache)
    if not sources:
        return ()
    pattern = re.compile(
        b"|".join(re.escape(name) for name in sorted(sources, key=len, reverse=True))
    )
    names = {
        match.group()
        for data in pickles
        for match in pattern.finditer(memoryview(data)[:_LOOKED_AT_BYTES])
    }
    cells, bytes_left = [], _MOST_BYTES
    for name in sorted(names):
        file, source = name.decode(), definitions(sources[name])
        bytes_left -= len(source)
        if source and bytes_left >= 0:
            cells.append(Cell(file, titles(file) or file, source))
    return tuple(cells)


def definitions(source: str) -> str:
    """Return the source, blank except for definitions; "" when it is not
    Python."""
    import ast

    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    numbers = {number for node in tree.body for number in _lines_of(node)}
    lines = _lines(source)
    return (
        "".join(line if number in numbers else "\n" for number, line in enumerate(lines, 1))
        if numbers
        else ""
    )


def remember(cells: Sequence[Mapping[str, str]]) -> None:
    """Make tracebacks of this process show the lines of these cells."""
    for cell in cells:
        source = cell["source"]
        # Without a time of change the entry is never compared with a file.
        linecache.cache[cell["file"]] = (len(source), None, _lines(source), cell["file"])


def _lines(source: str) -> list[str]:
    """Return the lines as Python counts them: a form feed does not end one."""
    return io.StringIO(source, newline=None).readlines()


def title_cells(text: str, cells: Sequence[Mapping[str, str]]) -> str:
    """Return a traceback that names cells as the notebook does."""
    for cell in cells:
        text = text.replace(f'File "{cell["file"]}", line', f"{cell['title']}, line")
    return text


def _without_file(cache: Mapping[str, Any]) -> dict[bytes, str]:
    """Source in the cache that was never read from a file, by name."""
    entries = [
        (name, entry) for name, entry in list(cache.items()) if len(entry) == 4 and entry[1] is None
    ]
    return {name.encode(errors="replace"): "".join(entry[2]) for name, entry in entries if name}


def _lines_of(node: ast.stmt) -> Iterator[int]:
    """The lines of a statement, if it defines code that runs later."""
    import ast

    defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.GeneratorExp)
    if any(isinstance(each, defines) for each in ast.walk(node)):
        decorators = [each.lineno for each in getattr(node, "decorator_list", ())]
        yield from range(min([node.lineno, *decorators]), (node.end_lineno or node.lineno) + 1)
