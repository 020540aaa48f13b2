"""The script that a function comes from: its globals, and its source as it was when kinetic first
saw it.

In: functions. Out: globals, `ScriptSource`s.

A program may run for hours while its file is edited or removed. What counts is the source
that runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kinetic._core.values import dataclass

MAIN = ("__main__", "__mp_main__")
"""The script; the second is its name in a process that multiprocessing has spawned."""
_DEEPEST = 32
_SEEN: dict[str, tuple[dict[str, Any], bytes]] = {}
"""By file: the globals it made, and its content."""
_NONE: tuple[dict[str, Any], bytes] = ({}, b"")


@dataclass(frozen=True)
class ScriptSource:
    """A file of source, or a cell."""

    file: str
    text: str


def see(func: object) -> None:
    """Read the source of the function's script, unless it was read before."""
    space = _namespace(func)
    file = None if space is None else _file(func, space)
    if space is not None and file is not None and space is not _SEEN.get(file, _NONE)[0]:
        with suppress(OSError):
            _SEEN[file] = space, Path(file).read_bytes()


def namespaces() -> list[dict[str, Any]]:
    """Return the globals of the scripts that were seen."""
    return [space for space, _ in _SEEN.values()]


def find_class_of(made: Any) -> type | None:
    """Return the class that has the object in a `classmethod`. Since Python 3.13 the object is not
    told which class it is called on: https://docs.python.org/3.13/library/functions.html#classmethod
    """
    found: Any = sys.modules.get(made.__module__)
    *parents, name = made.__qualname__.split(".")
    for parent in parents:
        found = getattr(found, parent, None)
    method = vars(found).get(name) if isinstance(found, type) else None
    return found if isinstance(method, classmethod) and method.__func__ is made else None


def is_found(made: Any) -> bool:
    """Whether the object is what its module has under its name, as pickle wants it of functions."""
    found: Any = sys.modules.get(made.__module__)
    for name in made.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is made


def is_cloudpickle(caller: FrameType) -> bool:
    """Whether an object is asked by cloudpickle how it is pickled: for a process that may lack the
    script, so that a name would not do."""
    return str(caller.f_globals.get("__name__")).startswith(("cloudpickle", __package__))


def find_script(func: object) -> tuple[dict[str, Any], list[ScriptSource]]:
    """Return the globals and the source of the script that a function comes from, or else of
    `__main__`."""
    see(func)
    space = _namespace(func)
    main = vars(sys.modules["__main__"])
    if space is None:
        space = main
    file = _file(func, space)
    if file is not None:
        return space, list(_decode_source(file, space))
    return space, list(_list_typed_sources()) if space is main else []


def _namespace(func: object) -> dict[str, Any] | None:
    """Return the globals of a script's function. They are not always those of the module
    `__main__`: with `python -m cProfile`, for example."""
    found: Any = func
    for _ in range(_DEEPEST):
        space = getattr(found, "__globals__", None)
        inner = (
            found.func
            if isinstance(found, functools.partial)
            else getattr(found, "__wrapped__", None)
        )
        if inner is None:
            return space if type(space) is dict and space.get("__name__") in MAIN else None
        found = inner
    return None


def _file(func: Any, space: dict[str, Any]) -> str | None:
    code = getattr(func, "__code__", None)
    for name in (space.get("__file__"), getattr(code, "co_filename", None)):
        if isinstance(name, str) and (name in _SEEN or Path(name).is_file()):
            return name
    return None


def _decode_source(file: str, space: dict[str, Any]) -> Iterator[ScriptSource]:
    import io
    import tokenize

    with suppress(OSError, SyntaxError, UnicodeDecodeError, LookupError):
        owner, data = _SEEN.get(file, _NONE)
        data = data if owner is space else Path(file).read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        yield ScriptSource(file, io.TextIOWrapper(io.BytesIO(data), encoding).read())


def _list_typed_sources() -> Iterator[ScriptSource]:
    """What was typed into a notebook or at a prompt, or given to `python -c`."""
    import linecache

    if sys.argv and sys.argv[0] == "-c" and len(sys.argv) < len(sys.orig_argv):
        yield ScriptSource("<string>", sys.orig_argv[-len(sys.argv)])
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None:
            yield ScriptSource(name, "".join(entry[2]))
