"""A script whose parts are pickled here, and the `__main__` of a host that unpickles them.

In: text. Out: what arrives.
"""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest

from kinetic._pickling.pickler import CallPickler, Circular
from kinetic._pickling.script import Script, ScriptSource
from kinetic._pickling.unpickler import CallUnpickler

REGISTERED: list[Any] = []


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library that registers classes in every way there is; hosts import the same one."""
    source = """
SEEN = []

def register(thing):
    SEEN.append(thing.__name__)
    return thing

def register_with(*things, **options):
    SEEN.extend(thing.__name__ for thing in things)
    return register

def look():
    return tuple(SEEN)

class Looking:
    def __reduce__(self):
        return look, ()

class Base:
    def __init_subclass__(cls, **options):
        SEEN.append((cls.__name__, sorted(k for k in vars(cls) if not k.startswith('_')), options))

class Meta(type):
    def __new__(meta, name, bases, fields):
        SEEN.append((name, sorted(k for k in fields if not k.startswith('_'))))
        return super().__new__(meta, name, bases, fields)

class Needy:
    def __new__(cls, function):
        return super().__new__(cls)
    def __init__(self, function):
        self.__wrapped__ = self.function = function
    def __call__(self, *args):
        return self.function(*args)
"""
    made = types.ModuleType("picklertest_library")
    exec(compile(source, "picklertest_library.py", "exec", dont_inherit=True), vars(made))
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


class Host:
    """The `__main__` of a host after it has unpickled, and what was unpickled."""

    def __init__(self, data: bytes, here: dict[str, Any]) -> None:
        self.here = here
        self.main: dict[str, Any] = {"__name__": "__main__"}
        unpickler = CallUnpickler(io.BytesIO(data), self.main)
        self.again = unpickler.load()
        self.value = unpickler.load()


def sent(text: str, *names: str, library: types.ModuleType | None = None) -> Host:
    """Run a script here, send what these names stand for, and forget what the library has seen."""
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(text, "script.py", "exec", dont_inherit=True), space)
    script, rebuilt, data = Script(space, [ScriptSource("script.py", text)]), frozenset[int](), b""
    while not data:
        file = io.BytesIO()
        pickler = CallPickler(file, script, rebuilt)
        try:
            pickler.dump_registrations((), script.list_registered())
            pickler.dump([space[name] for name in names])
            data = file.getvalue()
        except Circular as circular:
            rebuilt |= {id(circular.made)}
    if library is not None:
        library.SEEN.clear()
    return Host(data, space)
