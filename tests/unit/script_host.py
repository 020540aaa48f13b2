"""A script whose parts are pickled here, and the `__main__` of a host that unpickles them.

In: text. Out: what arrives.
"""

from __future__ import annotations

import io
import linecache
import sys
import types
import zlib
from typing import Any

import pytest
from cloudpickle import cloudpickle

from kinetic._host.worker.startup.kinetic_awaiting import act_when_imported
from kinetic._pickling import origin
from kinetic._pickling.code_pickler import Circular
from kinetic._pickling.pickler import make_pickler
from kinetic._pickling.script import Script, ScriptSource
from kinetic._pickling.unpickler import CallUnpickler, settle

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
        cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()  # A host has none of the classes.
        unpickler = CallUnpickler(io.BytesIO(data), self.main)
        self.again = unpickler.load()
        self.value = unpickler.load()
        settle(act_when_imported)


def sent(text: str, *names: str, library: types.ModuleType | None = None) -> Host:
    """Run a script here, send what these names stand for, and forget what the library has seen."""
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(text, "script.py", "exec", dont_inherit=True), space)
    script = Script(space, [ScriptSource("script.py", text)])
    data = pickled(script, [space[name] for name in names])
    if library is not None:
        library.SEEN.clear()
    return Host(data, space)


def pickled(script: Script, values: list[Any]) -> bytes:
    rebuilt = frozenset[int]()
    while True:
        file = io.BytesIO()
        pickler = make_pickler(file, script, rebuilt)
        try:
            pickler.dump_registrations((), script.list_registered())
            pickler.dump(values)
            return file.getvalue()
        except Circular as circular:
            rebuilt |= {id(circular.made)}


class Session:
    """A `__main__` in which cells run, as in a notebook, and files are executed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", self.main)
        monkeypatch.setattr(linecache, "cache", {})
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
        self._compile = types.SimpleNamespace(_filename_map={})
        shell = types.SimpleNamespace(compile=self._compile)
        ipython: Any = types.ModuleType("IPython")
        ipython.get_ipython = lambda: shell
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        self._count = 0

    def run(self, text: str) -> None:
        """Run a cell. IPython gives it the same name each time, made of its text."""
        self.execute(text, self._keep(text))

    def run_magic(self, name: str, text: str, file: str) -> None:
        """Run a cell that begins with `%%name`."""
        self._keep(f"get_ipython().run_cell_magic({name!r}, '', {text!r})\n")
        self.execute(text.lstrip("\n"), file)  # As IPython does.

    def _keep(self, text: str) -> str:
        self._count += 1
        name = f"/tmp/ipykernel_1/{zlib.crc32(text.encode())}.py"
        self._compile._filename_map[name] = self._count
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        return name

    def execute(self, text: str, file: str) -> None:
        exec(compile(text, file, "exec", dont_inherit=True), vars(self.main))

    def send(self, *names: str, library: types.ModuleType | None = None) -> Host:
        """Send what these names stand for, the first of which is a function."""
        space = vars(self.main)
        script = Script(*origin.find_script(space[names[0]]))
        data = pickled(script, [space[name] for name in names])
        if library is not None:
            library.SEEN.clear()
        return Host(data, space)
