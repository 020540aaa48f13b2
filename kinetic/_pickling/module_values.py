"""Values that the program has set in modules of the project since they were imported: hosts import
the files, and find there what these say.

In: the function of a call, the names of those modules. Out: what to tell the caller.

Only values are compared that a file gives once, by a literal at its top level, and only those that
the function, or a function of the script that it calls, reads.
"""

from __future__ import annotations

import ast
import dis
import functools
import reprlib
import sys
from collections import ChainMap, Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kinetic._core.values import dataclass
from kinetic._pickling.origin import MAIN

_MADE = (FunctionType, ModuleType, type)


@dataclass(frozen=True)
class _Source:
    """What a file says.

    Attributes:
        literals: the values that it gives once.
        set_later: the names that its functions set, as for what is made when it is first needed.
    """

    literals: dict[str, Any]
    set_later: frozenset[str]


def list_changes(
    func: object, modules: Collection[str], sent: Collection[int] = ()
) -> tuple[str, ...]:
    """Return a sentence about each value that hosts find as its module's file gives it.

    Args:
        func: the function of the call.
        modules: the modules that hosts import from files.
        sent: ids of values whose content is sent where the function uses them by name.
    """
    found = {}
    for module, name, is_own in _list_read(func, frozenset(modules)) if modules else ():
        source = _read(getattr(module, "__file__", None))
        if name not in source.literals or (is_own and name in source.set_later):
            continue
        value, given = vars(module)[name], source.literals[name]
        if id(value) not in sent and _differs(value, given):
            found[f"{module.__name__}.{name}"] = (
                f"{module.__name__}.{name} has changed since {module.__name__} was imported: hosts "
                f"import the file and find {reprlib.repr(given)} there in place of "
                f"{_describe(value)}. Pass it as an argument."
            )
    return tuple(found.values())


def _list_read(func: object, modules: frozenset[str]) -> Iterator[tuple[ModuleType, str, bool]]:
    """List what the function, and those of the script that it calls, read of these modules, and
    whether a function reads it of its own module."""
    waiting, seen = [func], set[int]()
    imported = {name: sys.modules.get(name) for name in modules}  # by the function itself
    while waiting:
        each = waiting.pop()
        each = getattr(each, "__func__", getattr(each, "func", each))
        if not isinstance(each, FunctionType) or id(each) in seen:
            continue
        seen.add(id(each))
        own = sys.modules.get(each.__module__)
        space = ChainMap(_list_closed_over(each), each.__globals__, imported)
        for code in _list_code(each.__code__):
            for name in (*code.co_names, *code.co_freevars):
                value = space.get(name)
                if isinstance(value, ModuleType) and value.__name__ in modules:
                    names = (inner for inner in code.co_names if _is_value(value, inner))
                    yield from ((value, inner, False) for inner in names if not _sets(code, inner))
                elif isinstance(value, FunctionType) and value.__module__ in MAIN:
                    waiting.append(value)
                elif own is not None and own.__name__ in modules and _is_value(own, name):
                    yield own, name, True


def _list_closed_over(func: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
        with suppress(ValueError):  # It is not set yet.
            found[name] = cell.cell_contents
    return found


def _is_value(module: ModuleType, name: str) -> bool:
    return name in vars(module) and not isinstance(vars(module)[name], _MADE)


def _list_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _list_code(inner)


def _sets(code: CodeType, name: str) -> bool:
    """Whether the code sets an attribute of this name itself."""
    return ("STORE_ATTR", name) in (
        (step.opname, step.argval) for step in dis.get_instructions(code)
    )


def _read(file: object) -> _Source:
    try:
        return _find_literals(Path(str(file)).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return _Source({}, frozenset())


@functools.lru_cache(maxsize=64)
def _find_literals(source: bytes) -> _Source:
    tree = ast.parse(source)
    top, *inner = _list_code(compile(tree, "", "exec", dont_inherit=True))
    times = Counter(_list_stored(top, "STORE_NAME", "STORE_GLOBAL"))
    found: dict[str, Any] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and times[targets[0].id] == 1:
            try:
                found |= {} if value is None else {targets[0].id: ast.literal_eval(value)}
            except ValueError:
                continue
    set_later = frozenset(name for code in inner for name in _list_stored(code, "STORE_GLOBAL"))
    return _Source(found, set_later)


def _list_stored(code: CodeType, *kinds: str) -> list[str]:
    return [step.argval for step in dis.get_instructions(code) if step.opname in kinds]


def _differs(value: object, given: object) -> bool:
    numbers = int | float
    if type(value) is not type(given) and not (
        isinstance(value, numbers) and isinstance(given, numbers)
    ):
        return True
    try:
        return bool(value != given)
    except Exception:  # noqa: BLE001 - user-defined comparison, of what a list holds
        return True


def _describe(value: object) -> str:
    """Return how a value is shown; of a kind that is not Python's own, its kind."""
    kind = type(value)
    return reprlib.repr(value) if kind.__module__ == "builtins" else f"a {kind.__name__}"
