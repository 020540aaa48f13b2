"""A script whose values are pickled here, and a stand-in for the host that unpickles them.

In: the script's text, names in it. Out: the unpickled values.
"""

from __future__ import annotations

import io
import sys
import types
from typing import Any

import pytest
from cloudpickle import cloudpickle

from kinetic._pickling.pickler import CallPickler
from kinetic._pickling.unpickler import CallUnpickler


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library, also on hosts, that registers classes by decorator, base class or metaclass."""
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
    """A host that has unpickled data: its `__main__` namespace and the unpickled value."""

    def __init__(self, data: bytes, here: dict[str, Any]) -> None:
        self.data = data
        self.here = here
        self.main: dict[str, Any] = {"__name__": "__main__"}
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()  # A host has not seen the classes.
        self.value = CallUnpickler(io.BytesIO(data), self.main).load()


def sent(text: str, *names: str) -> Host:
    """Run a script, pickle the values of these names, and unpickle them as a host does."""
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(text, "script.py", "exec", dont_inherit=True), space)
    file = io.BytesIO()
    CallPickler(file, space).dump([space[name] for name in names])
    return Host(file.getvalue(), space)
