"""Values that a script has imported by name, `from config import CFG`: hosts take what their own
module has under that name, not a copy.

In: the globals of the script, and its source. Out: `ImportedValue`s, by the ids of the values.

Functions, classes and modules are none of these: they travel by reference anyway. What a module
holds may have changed since it was imported, so its content is sent as well, and set into the
object that the host's module has, if the host has imported that by then: importing it may take
long. What has its own way of being pickled is copied, and so is what is of the standard library.
"""

from __future__ import annotations

import ast
import copy
import copyreg
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import util
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from kinetic._pickling import statements, unpickler
from kinetic._pickling.code_pickler import CodePickler, is_by_value
from kinetic._pickling.origin import MAIN, ScriptSource

CONTAINERS = (dict, list, set, bytearray)
"""What can change, and is pickled without asking `reducer_override`."""
_ALWAYS = (
    ("os", "environ"),  # It may hold secrets.
    ("random", "random.__self__"),
    ("numpy.random", "rand.__self__"),
)
"""Where values are that are taken from the host's modules under any name: a copy of a hidden
generator would draw the same numbers in each call."""
_UNCHANGING = (type(None), int, float, complex, str, bytes, tuple, frozenset)
_SENT_OTHERWISE = (ModuleType, FunctionType, type, *_UNCHANGING)
_HOOKS = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")


class ImportedValue:
    """Stands for a value that hosts have in a module.

    Args:
        value: it.
        module: the module's name.
        path: its name there, with dots for attributes.
        has_content: whether its content is sent.
    """

    def __init__(self, value: Any, module: str, path: str, *, has_content: bool) -> None:
        self.value = value
        self._place = module, path
        self._has_content = has_content

    def __reduce__(self) -> Any:
        if not self._has_content:
            return unpickler.find_undecorated, (*self._place, 0)
        kind = type(self.value)
        of = self.value if kind in CONTAINERS else getattr(self.value, "__dict__", None)
        content = None if of is None else copy.copy(of)
        return unpickler.find_changed, (*self._place, kind), content, None, None, unpickler.fill


def find_imported(
    namespace: Mapping[str, Any], sources: Sequence[ScriptSource]
) -> dict[int, ImportedValue]:
    """Return, by id, the values that a script has imported by name."""
    found: dict[int, ImportedValue] = {}
    for name, path in _ALWAYS:
        with suppress(KeyError, AttributeError):  # A test may have put something in its place.
            value = unpickler.follow_path(sys.modules[name], path)
            found[id(value)] = ImportedValue(value, name, path, has_content=False)
    for node in (each for source in sources for each in statements.parse(source)):
        module = _find_module(node, namespace) if isinstance(node, ast.ImportFrom) else None
        if isinstance(node, ast.ImportFrom) and module is not None:
            for path, value in _list_values(node, module, namespace):
                if _is_ordinary(value):
                    made = ImportedValue(value, module.__name__, path, has_content=True)
                    found.setdefault(id(value), made)
    return found


def _find_module(node: ast.ImportFrom, namespace: Mapping[str, Any]) -> ModuleType | None:
    """Return the module from which a statement imports, if hosts import it, too."""
    name = node.module or ""
    if node.level:
        with suppress(ImportError):  # It was executed in another package.
            name = util.resolve_name("." * node.level + name, namespace.get("__package__") or "")
    module = sys.modules.get(name)
    is_of_python = name.partition(".")[0] in sys.stdlib_module_names or name in MAIN
    is_there = isinstance(module, ModuleType) and not is_of_python and not is_by_value(name)
    return module if is_there else None


def _list_values(
    node: ast.ImportFrom, module: ModuleType, namespace: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """List the values that a statement has imported and that are still in both places, each with
    its path in the module. Of a method it is the object that has it."""
    held = vars(module)
    pairs = [(each.name, each.asname or each.name) for each in node.names]
    for name, here in zip(held, held, strict=True) if pairs == [("*", "*")] else pairs:
        value, path = held.get(name), name
        if here not in namespace or namespace[here] is not value:
            continue
        if hasattr(type(value), "__self__"):
            value, path = getattr(value, "__self__", None), f"{name}.__self__"
        if not issubclass(type(value), _SENT_OTHERWISE):
            yield path, value


def _is_ordinary(value: Any) -> bool:
    """Whether an object consists of what it holds, so that it can be set into another one."""
    kind = type(value)
    if kind in CONTAINERS or kind in (object, SimpleNamespace):
        return True
    if kind in CodePickler.dispatch_table or kind in copyreg.dispatch_table:
        return False
    if any(getattr(kind, name, None) is not getattr(object, name, None) for name in _HOOKS):
        return False
    if getattr(kind, "is_plain_in_jobs", False):
        return False
    try:
        parts: Any = object.__reduce_ex__(value, 4)
        _, args, state, items, pairs = parts
    except Exception:  # noqa: BLE001 - it cannot be pickled
        return False
    return args == (kind,) and not items and not pairs and type(state) in (dict, type(None))
