"""What makes a call large: the size of each of its parts, in words.

In: the call and a way to measure. Out: names of parts with bytes, largest first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from kinetic._pickling import diagnosis

Part = tuple[str, int]
_MOST = 200


def of_call(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    size: Callable[[object], int],
) -> list[Part]:
    """Return the arguments and what the function uses, each with its size when pickled alone,
    largest first."""
    found = [
        (f"argument {number} ({type(value).__name__})", value)
        for number, value in enumerate(args, 1)
    ]
    found += [
        (f"keyword {name!r} ({type(value).__name__})", value) for name, value in kwargs.items()
    ]
    found += _used(func, set())
    return sorted(((name, size(value)) for name, value in found[:_MOST]), key=lambda part: -part[1])


def _used(thing: Any, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield what goes with a function, and with the functions that it uses."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    for name, value in diagnosis.uses(thing):
        if isinstance(value, FunctionType | MethodType | functools.partial):
            yield from _used(value, seen)
        else:
            yield name, value
