"""Values that the program has changed in modules of the project since their import. Hosts import
the files, and get the original values.

A value is compared only if the function, or one of the script that it calls, reads it; and only if
the file assigns it once, as an immutable literal at top level, and no function of the file sets it.
The caller cannot know the host's value of any other variable.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import sys
from collections import ChainMap, Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kinetic._pickling.origin import MAIN
from kinetic._pickling.uses import list_closed_over, unwrap, walk_code

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST", "LOAD_CLOSURE", "IMPORT_NAME")
_READS = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def list_changes(func: object, modules: Collection[str]) -> tuple[str, ...]:
    """Return a warning for each changed value, because hosts see the original one. Warnings do not
    show current values, which may be secrets.

    Args:
        func: The function of the call.
        modules: Names of the modules that hosts import from files.
    """
    sentences = {}
    for module, name in _list_read(func, frozenset(modules)) if modules else ():
        literals = _read_literals(getattr(module, "__file__", None))
        value = vars(module).get(name)
        if name in literals and type(value) in _PLAIN and value != literals[name]:
            sentences[f"{module.__name__}.{name}"] = (
                f"{module.__name__}.{name} was changed since {module.__name__} was imported. Hosts "
                f"import the file, where it is {literals[name]!r}: pass the value as an argument."
            )
    return tuple(sentences.values())


def _list_read(func: object, modules: frozenset[str]) -> Iterator[tuple[ModuleType, str]]:
    """Yield module and name for each value in these modules that is read by the function, or by
    functions of the script that it calls."""
    waiting, visited = [func], set[int]()
    imported = {name: sys.modules.get(name) for name in modules}  # The function may import them.
    while waiting:
        reader = unwrap(waiting.pop())
        if not isinstance(reader, FunctionType) or id(reader) in visited:
            continue
        visited.add(id(reader))
        own = sys.modules.get(reader.__module__)
        space = ChainMap(list_closed_over(reader), reader.__globals__, imported)
        for code in walk_code(reader.__code__):
            steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
            stored = {name for kind, name in steps if kind == "STORE_ATTR"}
            for (kind, name), (then, inner) in itertools.pairwise(steps):
                value = space.get(name) if kind in _LOADS and isinstance(name, str) else None
                if isinstance(value, ModuleType) and value.__name__ in modules:
                    if then in _READS and inner not in stored:
                        yield value, inner
                elif isinstance(value, FunctionType) and value.__module__ in MAIN:
                    waiting.append(value)
                elif own is not None and own.__name__ in modules and kind == "LOAD_GLOBAL":
                    yield own, name


def _read_literals(file: object) -> dict[str, Any]:
    try:
        return _find_literals(Path(str(file)).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return {}


@functools.lru_cache(maxsize=64)
def _find_literals(source: bytes) -> dict[str, Any]:
    """Return the variables that a source sets once, to a literal, and never in a function."""
    tree = ast.parse(source)
    top, *inner = walk_code(compile(tree, "", "exec", dont_inherit=True))
    times = Counter(_list_stored(top, "STORE_NAME", "STORE_GLOBAL"))
    set_later = {name for code in inner for name in _list_stored(code, "STORE_GLOBAL")}
    values: dict[str, Any] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value, target = getattr(node, "value", None), targets[0]
        if len(targets) == 1 and isinstance(target, ast.Name) and times[target.id] == 1:
            with suppress(ValueError):
                values |= {} if value is None else {target.id: ast.literal_eval(value)}
    return {n: v for n, v in values.items() if type(v) in _PLAIN and n not in set_later}


def _list_stored(code: CodeType, *kinds: str) -> list[str]:
    return [step.argval for step in dis.get_instructions(code) if step.opname in kinds]
