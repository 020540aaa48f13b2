"""Code that tests of payloads pickle, and a process that unpickles it."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import types

import pytest


def double(x):
    return 2 * x


def in_main(source: str) -> dict:
    """Run source as `__main__`, so that functions are pickled by value; return its namespace."""
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(source, space)
    return space


def elsewhere(code: str, data: bytes) -> str:
    """Run code on `data` in a process that cannot import this project; return the code's output."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; data = sys.stdin.buffer.read()\n" + code],
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


LOCK = threading.Lock()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Yield a project's root and its two importable modules, of which `locked` holds a lock."""
    (tmp_path / "proj_mod.py").write_text(
        "import threading\n"
        "FACTOR = 3\n"
        "class Box:\n    def __init__(self, v): self.v = v\n"
        "    def get(self): return self.v * FACTOR\n"
        "class Color(__import__('enum').Enum):\n    RED = 1\n"
        "class Odd(Exception):\n    pass\n"
        "def times(x): return x * FACTOR\n"
    )
    (tmp_path / "proj_locked.py").write_text(
        "import threading\n"
        "LOCK = threading.Lock()\n"
        "def locked(x):\n    with LOCK: return x\n"
        "class Decorated:\n    def __init__(self, f): self.f = f\n"
        "@Decorated\ndef decorated(): return LOCK\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("proj_mod", "proj_locked")
    module, locked = map(importlib.import_module, names)
    yield types.SimpleNamespace(root=tmp_path, module=module, locked=locked)
    for name in names:
        del sys.modules[name]
