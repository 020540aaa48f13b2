"""Diagnosis of calls: the part that cannot be pickled, and the parts that make a call large."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

from kinetic._core.values import dataclass
from kinetic._pickling.code_pickler import Unsuitable
from kinetic._pickling.uses import SHELL, find_wrapped, list_parts
from kinetic.errors import PicklingError, with_article

Attempt = Callable[[object], BaseException | None]
_DEEPEST = 20
_MOST = 500
_MOST_PARTS = 200
# Since Python 3.12, sys.setrecursionlimit does not apply to code in C, such as pickle.
_FLATTEN = "It is nested too deeply: flatten it" + (
    ", or raise sys.setrecursionlimit." if sys.version_info < (3, 12) else "."
)
_GATHER = (
    "It is a jax.Array that is sharded over several hosts, and this host holds only a part of it. "
    "Gather it on all hosts before you return it: `from jax.experimental import multihost_utils`, "
    "then `return multihost_utils.process_allgather(value, tiled=True)`, which accepts a dict of "
    "arrays as well. Save large arrays in a checkpoint below KINETIC_OUTPUT_DIR."
)
_GATHER_PARTS = (
    "It has arrays that are sharded over several hosts, and this host holds only a part of them. "
    "Gather them on all hosts and return them instead: `from jax.experimental import "
    "multihost_utils`, then `return multihost_utils.process_allgather(arrays, tiled=True)`; of a "
    "Keras model, `arrays` is `[w.value for w in model.weights]`."
)
_TOO_LARGE = (
    "Memory ran out while it was pickled, which needs as much memory again. Put large data into a "
    "file, a checkpoint or kinetic.Data, and send its name."
)
_NO_SHELL = (
    "The function calls get_ipython(), as `!command` and `%magic` do, but hosts have no notebook. "
    "Run commands with subprocess.run, and move magics out of the function."
)
_GATHER_FIRST = (
    "Other processes hold parts of this jax.Array: gather it first with "
    "jax.experimental.multihost_utils.process_allgather(value, tiled=True)."
)
_NOT_BY_NAME = "module (`module.name`, without `from module import name`)"


@dataclass(frozen=True)
class Diagnosis:
    """The part of a call that cannot be pickled.

    Attributes:
        component: Part of the call: "argument 2 (list)", "global 'client' used by train".
        type_name: Class of the innermost part that fails.
        path: Path from the component to that part, such as "[3]['lock']"; "" for the component
            itself.
        returned: True if the component is a return value of the function.
    """

    component: str
    type_name: str
    path: str = ""
    returned: bool = False

    def as_error(self, cause: BaseException) -> PicklingError:
        """Make the exception for the user."""
        if self.component == SHELL:
            return PicklingError(_NO_SHELL, component=self.component)
        where = f"{self.component} cannot be pickled"
        if self.path:
            where += f": its part {self.path} is {with_article(self.type_name)}"
        elif f"({self.type_name})" not in self.component:
            where += f": it is {with_article(self.type_name)}"
        if isinstance(cause, Unsuitable) and f" {self.type_name} " in str(cause):
            advice = str(cause)
        elif isinstance(cause, RecursionError) or "recursion" in str(cause).lower():
            advice = _FLATTEN
        elif isinstance(cause, MemoryError):
            advice = _TOO_LARGE
        elif isinstance(cause, RuntimeError) and "non-addressable" in str(cause):
            gather = _GATHER if self.type_name == "ArrayImpl" else _GATHER_PARTS
            advice = gather if self.returned else _GATHER_FIRST
        else:
            advice = _advise(self.type_name, self.path, returned=self.returned)
            advice = f"{advice} ({type(cause).__name__}: {cause})"
        return PicklingError(f"{where[0].upper()}{where[1:]}. {advice}", component=self.component)


def diagnose_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, attempt: Attempt
) -> Diagnosis:
    """Find the part of a call that fails: an argument, or something that the function uses."""
    for number, value in enumerate(args, 1):
        if attempt(value):
            return diagnose_value(
                value, f"argument {number} ({type(value).__name__})", attempt=attempt
            )
    for name, value in kwargs.items():
        if attempt(value):
            return diagnose_value(value, f"keyword {name!r}", attempt=attempt)
    if attempt(func):
        return _diagnose_used(func, "the function", attempt, set()) or Diagnosis(
            "the function", type(func).__name__
        )
    return Diagnosis("the call as a whole", type(func).__name__)


def diagnose_value(value: object, component: str, *, attempt: Attempt) -> Diagnosis:
    """Find the innermost part of a value that cannot be pickled, in containers and attributes."""
    try:
        return _follow_parts(value, component, attempt)
    except Exception:  # noqa: BLE001 - reading an object may run its own code, which may raise anything
        return Diagnosis(component, type(value).__name__)


def _follow_parts(value: object, component: str, attempt: Attempt) -> Diagnosis:
    path, visited = "", {id(value)}
    while len(visited) < _DEEPEST:
        step = next(
            ((name, part) for name, part in _iterate_parts(value, attempt) if attempt(part)), None
        )
        if step is None or id(step[1]) in visited:
            break
        path, value = path + step[0], step[1]
        visited.add(id(value))
    inner = (
        _diagnose_used(value, "", attempt, set())
        if isinstance(value, FunctionType | ModuleType | type)
        else None
    )
    if inner and inner.component:
        return Diagnosis(
            component, inner.type_name, f"{path} ({inner.component}{inner.path})".strip()
        )
    return Diagnosis(component, type(value).__name__, path)


def _iterate_parts(value: object, attempt: Attempt) -> Iterator[tuple[str, object]]:
    if isinstance(value, list | tuple):
        yield from _bisect_items(value, attempt)
    elif isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
        yield from ((f" key {key!r:.40}", key) for key in value)
    elif isinstance(value, set | frozenset):
        yield from ((" member", part) for part in value)
    elif hasattr(type(value), "_unpickle_model"):
        return  # Keras pickles its objects by their configuration, not by their attributes.
    elif not isinstance(value, type | ModuleType | FunctionType):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _bisect_items(items: Sequence[Any], attempt: Attempt) -> Iterator[tuple[str, object]]:
    """Find an item that cannot be pickled, by binary search; yield its path and the item."""
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(list(items[low:middle])) else (middle, high)
    if low < high:
        yield f"[{low}]", items[low]


def _diagnose_used(
    thing: Any, component: str, attempt: Attempt, visited: set[int]
) -> Diagnosis | None:
    """Search functions, classes and modules for the variable with the object that cannot be
    pickled. None if all objects on the way were visited before."""
    inner = find_wrapped(thing)
    if isinstance(inner, FunctionType) and not isinstance(thing, FunctionType | type):
        thing = inner  # `thing` comes from a decorator, such as `jax.jit`.
    if id(thing) in visited or len(visited) > _MOST:
        return None
    visited.add(id(thing))
    is_circle = False
    for name, part in list_parts(thing):
        if attempt(part):
            culprit = _diagnose_used(part, name, attempt, visited)
            if culprit:
                return culprit
            is_circle = True
    if is_circle or isinstance(thing, FunctionType | ModuleType | type):
        return None if is_circle else Diagnosis(component, type(thing).__name__)
    return diagnose_value(thing, component, attempt=attempt)


def _advise(type_name: str, path: str, *, returned: bool) -> str:
    kind = type_name.lower()
    if "generator" in kind or "iterator" in kind:
        return "Make a list of it first."
    if returned:
        return "Return the data that it was made from, or that it holds."
    if "._sink" in path:  # An output of loguru's logger.
        return "Remove the sink before the call (logger.remove), and add it inside the function."
    if kind.endswith(("contextvar", "functionwrapper")):
        return f"Move it into a module of the project, and use it through that {_NOT_BY_NAME}."
    if kind.endswith(("iowrapper", "reader", "writer")):
        return "Pass the file's path and open it inside the function."
    # No program starts on hosts that would parse absl's flags.
    if kind.endswith(("flag", "flagvalues", "flagholder")):
        return "Pass the values of the flags instead."
    return (
        "Create it inside the function, or pass the data that it is made from. Or create it in a "
        f"module of the project, and use it through that {_NOT_BY_NAME}."
    )


# -- what makes a call large -----------------------------------------------------------------------


def measure_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: Callable[[object], int],
) -> list[tuple[str, int]]:
    """Return the arguments and the objects that the function uses, each with its size in bytes when
    pickled alone, largest first."""
    parts = [
        (f"argument {number} ({type(value).__name__})", value)
        for number, value in enumerate(args, 1)
    ]
    parts += [
        (f"keyword {name!r} ({type(value).__name__})", value) for name, value in kwargs.items()
    ]
    parts += _list_used(func, set())
    return sorted(
        ((name, size(value)) for name, value in parts[:_MOST_PARTS]), key=lambda part: -part[1]
    )


def _list_used(thing: Any, visited: set[int]) -> Iterator[tuple[str, object]]:
    """Yield the objects, with names, that are pickled with a function and functions it calls."""
    if id(thing) in visited:
        return
    visited.add(id(thing))
    for name, value in list_parts(thing):
        if isinstance(value, FunctionType | MethodType | functools.partial):
            yield from _list_used(value, visited)
        else:
            yield name, value
