"""Things of one class inside nested containers: finding them, and putting others in their place.

In: any value. Out: the things found; the value with replacements. Pure.

Looked into are lists, tuples, dicts, deques and their subclasses, at any depth; not attributes of
objects. What holds nothing to replace is left as it is, the very object. What does is copied with
its own class; containers that were one stay one, and circles stay circles.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kinetic.errors import UsageError

_SEQUENCES = (list, tuple, deque)
_CONTAINERS = (*_SEQUENCES, dict)
_UNORDERED = (set, frozenset)


@dataclass
class Found:
    """What a search has found.

    Attributes:
        things: each thing once, in the order in which it was met.
        holders: the ids of all containers that hold one, directly or not.
    """

    things: list[Any] = field(default_factory=list)
    holders: set[int] = field(default_factory=set)


def find(value: object, kind: type) -> Found:
    """Search for instances of a class.

    Raises:
        UsageError: one is a member of a set or (part of) the key of a dict, where no replacement
            could go.
    """
    found, seen = Found(), set[int]()
    holds: dict[int, list[int]] = {}
    met: set[int] = set()
    todo: list[object] = [value]
    direct: set[int] = set()
    while todo:
        at = todo.pop()
        if isinstance(at, kind):
            if id(at) not in met:
                met.add(id(at))
                found.things.append(at)
        elif isinstance(at, _UNORDERED):
            _refuse(at, kind, "a member of a set")
        elif isinstance(at, _CONTAINERS) and id(at) not in seen:
            seen.add(id(at))
            parts = list(_parts(at, kind))
            for part in parts:
                if isinstance(part, kind):
                    direct.add(id(at))
                elif isinstance(part, _CONTAINERS):
                    holds.setdefault(id(part), []).append(id(at))
            todo.extend(
                part
                for part in reversed(parts)
                if isinstance(part, (kind, *_CONTAINERS, *_UNORDERED))
            )
    found.holders = _upwards(direct, holds)
    return found


def _parts(container: Any, kind: type) -> Iterable[object]:
    if isinstance(container, dict):
        _refuse(dict.keys(container), kind, "a key of a dict")
        return dict.values(container)
    base: Any = next(b for b in _SEQUENCES if isinstance(container, b))
    return base.__iter__(container)  # type: ignore[no-any-return]


def _refuse(values: Iterable[object], kind: type, where: str) -> None:
    """Refuse the kind among hashable values, which hold only hashable values."""
    for value in values:
        if isinstance(value, kind):
            raise UsageError(
                f"{value!r} is {where}: a path could not take its place. Use a list, or the value "
                "of a dict."
            )
        if isinstance(value, (tuple, *_UNORDERED)):
            _refuse(value, kind, where)


def _upwards(start: set[int], holds: dict[int, list[int]]) -> set[int]:
    reached, todo = set(start), list(start)
    while todo:
        for above in holds.get(todo.pop(), ()):
            if above not in reached:
                reached.add(above)
                todo.append(above)
    return reached


def replaced(value: Any, found: Found, replacement: Callable[[Any], object], kind: type) -> Any:
    """Return the value with a replacement for each thing found in it; the value itself is not
    changed."""
    return _Copy(found, replacement, kind).of(value)


class _Copy:
    def __init__(self, found: Found, replacement: Callable[[Any], object], kind: type) -> None:
        self._holders = found.holders
        self._kind = kind
        self._replacement = {id(thing): replacement(thing) for thing in found.things}
        self._made: dict[int, Any] = {}
        self._todo: list[tuple[Any, Any]] = []

    def of(self, value: Any) -> Any:
        new = self._part(value)
        while self._todo:
            self._fill(*self._todo.pop())
        return new

    def _part(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return self._replacement[id(value)]
        if id(value) not in self._holders:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = (
                self._tuple(value) if isinstance(value, tuple) else self._empty(value)
            )
        return self._made[id(value)]

    def _empty(self, value: Any) -> Any:
        """A copy whose parts are put in later, so that a circle finds it."""
        new = copy.copy(value)
        self._todo.append((value, new))
        return new

    def _fill(self, old: Any, new: Any) -> None:
        # Through the base classes: methods that a subclass overrides may do anything.
        if isinstance(old, dict):
            for key, part in dict.items(old):
                dict.__setitem__(new, key, self._part(part))
        elif isinstance(old, list):
            list.__setitem__(new, slice(None), [self._part(part) for part in list.__iter__(old)])
        else:
            for index, part in enumerate(list(deque.__iter__(old))):
                deque.__setitem__(new, index, self._part(part))

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        new = tuple.__new__(type(value), [self._part(part) for part in tuple.__iter__(value)])
        if type(value) is not tuple and getattr(value, "__dict__", None):
            vars(new).update(vars(value))
        return new
