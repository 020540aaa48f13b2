"""The script that a function comes from: its globals, and its source as it was whenever kinetic saw
it.

In: functions. Out: globals, `ScriptSource`s.

A program may run for hours while its file is edited or removed, or executes it again. What counts
is the source that runs: `matching` finds out which that is.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from types import CodeType, FrameType, FunctionType
from typing import Any

from kinetic._core.values import dataclass

MAIN = ("__main__", "__mp_main__")
"""The script; the second is its name in a process that multiprocessing has spawned."""
_DEEPEST = 32
_OF_MAGIC = "get_ipython().run_cell_magic("
_MAGICS = {"time": "<timed exec>", "prun": "<string>"}
_BLANK_LINES = re.compile(r"\A(?:[ \t]*\n)+")
_INPUT = re.compile(r"<python-input-(\d+)>")
_MOST_VERSIONS = 8
"""Of one file: the first and the newest."""


@dataclass(frozen=True)
class ScriptSource:
    """A file of source, or a cell.

    Attributes:
        file: its name.
        text: the source.
        number: greater for a cell that ran later; 0 for a file, and where it is not known.
    """

    file: str
    text: str
    number: int = field(default=0, compare=False)


class _SeenFile:
    """The globals that a file has made, and the versions of its content, newest last: in a session
    it may be edited and executed again."""

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        self.versions: list[ScriptSource] = []
        self._state: object = None

    def read(self, file: str, space: dict[str, Any]) -> None:
        """Read the file, if it has changed since it was read."""
        with suppress(OSError):
            found = os.stat(file)  # noqa: PTH116
            state = found.st_mtime_ns, found.st_size, found.st_ino
            if state != self._state:
                self._add(file)
            self.space, self._state = space, state

    def _add(self, file: str) -> None:
        with suppress(SyntaxError, UnicodeDecodeError, LookupError), tokenize.open(file) as opened:
            version = ScriptSource(file, opened.read())
            self.versions = [each for each in self.versions if each != version] + [version]
            del self.versions[1 : 1 - _MOST_VERSIONS]


_SEEN: dict[str, _SeenFile] = {}


def walk_code(code: CodeType) -> Iterator[CodeType]:
    """Yield code, and that of the functions and the bodies of classes in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from walk_code(inner)


def list_closed_over(func: FunctionType) -> dict[str, Any]:
    """Return the variables of a closure that have values, by name."""
    found = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with suppress(ValueError):  # It is not set yet.
            found[name] = cell.cell_contents
    return found


def map_path(file: str, source_map: tuple[str, str] | None) -> str:
    """Return the name of a file that lies in the second folder as it does in the first."""
    if source_map and file.startswith(source_map[0].rstrip("/") + "/"):
        return source_map[1].rstrip("/") + file[len(source_map[0].rstrip("/")) :]
    return file


def see(func: object) -> None:
    """Read the source of the function's script, unless it is known."""
    space = _namespace(func)
    if space is not None:
        _read_files(func, space)


def namespaces() -> list[dict[str, Any]]:
    """Return the globals of the scripts that were seen."""
    return [seen.space for seen in _SEEN.values()]


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
    `__main__`: its file, and cells."""
    main = vars(sys.modules["__main__"])
    space = _namespace(func)
    space = main if space is None else space
    sources: list[ScriptSource] = []
    for seen in _read_files(func, space):
        sources += seen.versions
    if _is_typed(func) or (space is main and (not sources or hasattr(sys, "ps1"))):
        sources += _list_typed_sources()
    return space, sources


def _find_innermost(func: object) -> Any:
    """Return the function under decorators."""
    found: Any = func
    for _ in range(_DEEPEST):
        inner = (
            found.func
            if isinstance(found, functools.partial)
            else getattr(found, "__wrapped__", None)
        )
        if inner is None:
            return found
        found = inner
    return None


def _namespace(func: object) -> dict[str, Any] | None:
    """Return the globals of a script's function. They are not always those of the module
    `__main__`: with `python -m cProfile`, for example."""
    space = getattr(_find_innermost(func), "__globals__", None)
    return space if type(space) is dict and space.get("__name__") in MAIN else None


def _find_code_file(func: object) -> str:
    code = getattr(_find_innermost(func), "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else ""


def _read_files(func: object, space: dict[str, Any]) -> list[_SeenFile]:
    """Return the files of a script, up to date: the one that it names, and the function's own."""
    names = [space.get("__file__")]
    if _namespace(func) is space:
        names.append(_find_code_file(func))
    files = {
        os.path.abspath(name): name  # noqa: PTH100
        for name in names[::-1]
        if isinstance(name, str) and name and not name.endswith(".ipynb")
    }
    found = []
    for name in files.values():
        if name in _SEEN or os.path.isfile(name):  # noqa: PTH113
            seen = _SEEN.setdefault(name, _SeenFile())
            seen.read(name, space)
            found.append(seen)
    return found


def _is_typed(func: object) -> bool:
    """Whether a function comes from a cell."""
    entry = linecache.cache.get(_find_code_file(func), ())
    return len(entry) == 4 and entry[1] is None


def _list_typed_sources() -> Iterator[ScriptSource]:
    """What was typed into a notebook or at a prompt, or given to `python -c`; what ran last comes
    last."""
    if sys.argv and sys.argv[0] == "-c" and len(sys.argv) < len(sys.orig_argv):
        yield ScriptSource("<string>", sys.orig_argv[-len(sys.argv)])
    entries = [
        (name, entry)
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and entry[1] is None
    ]
    numbers = _number_cells()
    for name, entry in sorted(entries, key=lambda each: numbers.get(each[0], 0)):
        text, number = "".join(entry[2]), numbers.get(name, 0)
        yield ScriptSource(name, text, number)
        if text.startswith(_OF_MAGIC):
            yield from (ScriptSource(*each, number) for each in _read_magic(text))


@functools.lru_cache(maxsize=256)
def _read_magic(text: str) -> list[tuple[str, str]]:
    """Return what a cell such as `%%time` executes itself, and the file that its code names."""
    with suppress(SyntaxError, ValueError, AttributeError):
        (statement,) = ast.parse(text).body
        call: Any = getattr(statement, "value", None)
        name, _, body = map(ast.literal_eval, call.args)
        if name in _MAGICS:
            return [(_MAGICS[name], _BLANK_LINES.sub("", body))]  # As IPython does.
    return []


def _number_cells() -> Mapping[str, int]:
    """Return when each cell of IPython last ran, and each input at the prompt of Python 3.13:
    `linecache` has them in the order in which they first ran."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    found = getattr(getattr(shell, "compile", None), "_filename_map", {})
    typed = filter(None, map(_INPUT.fullmatch, list(linecache.cache)))
    return {each[0]: int(each[1]) + 1 for each in typed} | dict(found)
