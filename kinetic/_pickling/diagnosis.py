"""Why a call cannot be pickled, and what makes it large: its parts, named.

In: the call, and a function that tries to pickle. Out: a `Diagnosis`; parts with their sizes.
"""

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
# Since Python 3.12, code in C has a limit of its own, which is fixed.
_FLATTEN = "It is nested too deeply: flatten it" + (
    ", or raise sys.setrecursionlimit." if sys.version_info < (3, 12) else "."
)
_GATHER = (
    "It is a jax.Array that is sharded over several hosts, and this host holds only a part of it. "
    "Gather it on all hosts before you return it: `from jax.experimental import multihost_utils`, "
    "then `return multihost_utils.process_allgather(value, tiled=True)`, which takes a whole dict "
    "of arrays, too. Large ones belong in a checkpoint below KINETIC_OUTPUT_DIR."
)
_TOO_LARGE = (
    "Memory ran out meanwhile: what is sent is in memory twice. Leave what is large in a file, a "
    "checkpoint or kinetic.Data, and send its name."
)
_WITHOUTSHELL = (
    "The function calls get_ipython(), as `!command` and `%magic` in it do, and hosts have no "
    "notebook. Run commands by subprocess.run, and leave magic outside of the function."
)
_GATHER_FIRST = (
    "It is a jax.Array of which other processes hold parts: gather it first with "
    "jax.experimental.multihost_utils.process_allgather(value, tiled=True)."
)


@dataclass(frozen=True)
class Diagnosis:
    """The part of a call that cannot be pickled.

    Attributes:
        component: the part of the call: "argument 2 (list)", "global 'client' used by train".
        type_name: class of the innermost part that fails.
        path: how to get from the component to it, "" when it is the component itself:
            "[3]['lock']".
        returned: whether it is a return value, which the function made.
    """

    component: str
    type_name: str
    path: str = ""
    returned: bool = False

    def as_error(self, cause: BaseException) -> PicklingError:
        """Make the exception that the user sees."""
        if self.component == SHELL:
            return PicklingError(_WITHOUTSHELL, component=self.component)
        where = f"{self.component} cannot be pickled"
        if self.path:
            where += f": its part {self.path} is {with_article(self.type_name)}"
        elif f"({self.type_name})" not in self.component:
            where += f": it is {with_article(self.type_name)}"
        if isinstance(cause, Unsuitable) and f"empty {self.type_name} " in str(cause):
            advice = str(cause)
        elif isinstance(cause, RecursionError) or "recursion" in str(cause).lower():
            advice = _FLATTEN
        elif isinstance(cause, MemoryError):
            advice = _TOO_LARGE
        elif isinstance(cause, RuntimeError) and "non-addressable" in str(cause):
            advice = _GATHER if self.returned else _GATHER_FIRST
        else:
            what_to_do = _advice(self.type_name, self.path, returned=self.returned)
            advice = f"{what_to_do} ({type(cause).__name__}: {cause})"
        return PicklingError(f"{where[0].upper()}{where[1:]}. {advice}", component=self.component)


def of_call(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, attempt: Attempt
) -> Diagnosis:
    """Name the part of the call that fails: an argument, or something that the function uses."""
    for number, value in enumerate(args, 1):
        if attempt(value):
            return of_value(value, f"argument {number} ({type(value).__name__})", attempt=attempt)
    for name, value in kwargs.items():
        if attempt(value):
            return of_value(value, f"keyword {name!r}", attempt=attempt)
    if attempt(func):
        return _of_used(func, "the function", attempt, set()) or Diagnosis(
            "the function", type(func).__name__
        )
    return Diagnosis("the call as a whole", type(func).__name__)


def of_value(value: object, component: str, *, attempt: Attempt) -> Diagnosis:
    """Follow the failure into containers and attributes as far as it goes."""
    try:
        return _follow_parts(value, component, attempt)
    except Exception:  # noqa: BLE001 - looking at an object may run its own code, which may raise anything
        return Diagnosis(component, type(value).__name__)


def _follow_parts(value: object, component: str, attempt: Attempt) -> Diagnosis:
    path, visited = "", {id(value)}
    while len(visited) < _DEEPEST:
        step = next(((name, part) for name, part in _parts(value, attempt) if attempt(part)), None)
        if step is None or id(step[1]) in visited:
            break
        path, value = path + step[0], step[1]
        visited.add(id(value))
    inner = (
        _of_used(value, "", attempt, set())
        if isinstance(value, FunctionType | ModuleType | type)
        else None
    )
    if inner and inner.component:
        return Diagnosis(
            component, inner.type_name, f"{path} ({inner.component}{inner.path})".strip()
        )
    return Diagnosis(component, type(value).__name__, path)


def _parts(value: object, attempt: Attempt) -> Iterator[tuple[str, object]]:
    if isinstance(value, list | tuple):
        yield from _bisect_items(value, attempt)
    elif isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", part) for key, part in value.items())
        yield from ((f" key {key!r:.40}", key) for key in value)
    elif isinstance(value, set | frozenset):
        yield from ((" member", part) for part in value)
    elif not isinstance(value, type | ModuleType | FunctionType):
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())


def _bisect_items(items: Sequence[Any], attempt: Attempt) -> Iterator[tuple[str, object]]:
    """Find one failing item of many in few attempts."""
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if attempt(list(items[low:middle])) else (middle, high)
    if low < high:
        yield f"[{low}]", items[low]


def _of_used(thing: Any, component: str, attempt: Attempt, visited: set[int]) -> Diagnosis | None:
    """Follow the failure through functions, classes and modules to the variable that holds it; None
    for a circle."""
    inner = find_wrapped(thing)
    if isinstance(inner, FunctionType) and not isinstance(thing, FunctionType | type):
        thing = inner  # A decorator has put it into an object.
    if id(thing) in visited or len(visited) > _MOST:
        return None
    visited.add(id(thing))
    circle = False
    for name, part in list_parts(thing):
        if attempt(part):
            culprit = _of_used(part, name, attempt, visited)
            if culprit:
                return culprit
            circle = True
    if circle or isinstance(thing, FunctionType | ModuleType | type):
        return None if circle else Diagnosis(component, type(thing).__name__)
    return of_value(thing, component, attempt=attempt)


def _advice(type_name: str, path: str, *, returned: bool) -> str:
    kind = type_name.lower()
    if "generator" in kind or "iterator" in kind:
        return "Make a list of it first."
    if returned:
        return "Return what it is made from, or what it holds."
    if "._sink" in path:  # of loguru
        return "Remove the sink before the call (logger.remove), and add it inside the function."
    if kind.endswith(("contextvar", "functionwrapper")):
        return "Put it into a module of the project: hosts import that."
    if kind.endswith(("iowrapper", "reader", "writer")):
        return "Pass the file's path and open it inside the function."
    # absl parses them only where the program starts.
    if kind.endswith(("flag", "flagvalues", "flagholder")):
        return "Pass the values of the flags instead."
    return "Create it inside the function or in a project's module, or pass what it is made from."


# -- what makes a call large -----------------------------------------------------------------------


def sizes_of_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: Callable[[object], int],
) -> list[tuple[str, int]]:
    """Return the arguments and what the function uses, each with its size when pickled alone,
    largest first."""
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
    """Yield what is pickled along with a function, and with the functions that it uses."""
    if id(thing) in visited:
        return
    visited.add(id(thing))
    for name, value in list_parts(thing):
        if isinstance(value, FunctionType | MethodType | functools.partial):
            yield from _list_used(value, visited)
        else:
            yield name, value
