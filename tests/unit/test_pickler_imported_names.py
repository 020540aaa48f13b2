"""What a script has imported by name is, on a host, what the host's module has."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from script_host import Host, pickled, sent

from kinetic._pickling.script import Script, ScriptSource

CONFIG = """
class Settings:
    def __init__(self): self.debug = False
class Counter:
    count = 0
    def bump(self): self.count += 1
class Slim:
    __slots__ = ("value",)
CFG, ROWS, TAGS, REGISTRY = {"lr": 0.1}, [1], set(), {}
SETTINGS, MISSING, SLIM = Settings(), object(), Slim()
_counter = Counter()
bump = _counter.bump
SLIM.value = [1]
def read(): return CFG["lr"], ROWS, TAGS, REGISTRY, SETTINGS.debug, _counter.count, SLIM.value
def get(x=MISSING): return x is MISSING
"""
IMPORT = "from imported_config import *\nfrom imported_config import MISSING as M\n"

Send = Callable[..., Host]


@pytest.fixture
def send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Send:
    """Send a function `f` of a script to a host where a module of the project has this source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "imported_config", types.ModuleType(""))
    file = tmp_path / "imported_config.py"

    def write(source: str) -> None:
        file.write_text(source)
        importlib.invalidate_caches()
        sys.modules.pop("imported_config", None)

    def run(text: str, there: str = CONFIG) -> Host:
        write(CONFIG)
        space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        exec(compile(IMPORT + text, "script.py", "exec", dont_inherit=True), space)
        data = pickled(Script(space, [ScriptSource("script.py", IMPORT + text)]), [space["f"]])
        write(there)
        return Host(data, space)

    return run


def test_the_environment_is_the_hosts_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    text = "from os import environ\nimport os\nother = os.environ\ndef f(): return environ, other\n"
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(text, space)
    data = pickled(Script(space), [space["f"]])
    assert b"hush" not in data
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the host")
    environ, other = Host(data, space).value[0]()
    assert environ is other
    assert environ["AWS_SECRET_ACCESS_KEY"] == "of the host"


def test_the_hidden_generators_are_those_of_the_host() -> None:
    host = sent(
        "from random import random, seed\nfrom numpy.random import rand\nimport random as r\n"
        "import numpy\nnormal = numpy.random.normal\n"
        "def f():\n    seed(0)\n    first = random()\n    r.seed(0)\n"
        "    numpy.random.seed(1)\n    one = rand(), normal()\n    numpy.random.seed(1)\n"
        "    return first == r.random() and one == (rand(), normal())\n",
        "f",
    )
    assert host.value[0]()


def test_values_of_python_itself_are_copies() -> None:
    host = sent(
        "from sys import path, argv\nargs = list(argv)\nfrom mimetypes import types_map\n"
        "types_map['.foo'] = 'x/foo'\n"
        "def f(): return argv == args, types_map['.foo'], len(path) > 0\n",
        "f",
    )
    assert host.value[0]() == (True, "x/foo", True)


def test_something_in_place_of_a_generator_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.5)
    assert sent("def f(): return 1\n", "f").value[0]() == 1


def test_relative_imports_count(send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("imported_package")
    package.__path__ = sys.path
    monkeypatch.setitem(sys.modules, "imported_package", package)
    monkeypatch.setitem(sys.modules, "imported_package.imported_config", None)  # to be forgotten
    del sys.modules["imported_package.imported_config"]
    host = send(
        "__package__ = 'imported_package'\nfrom .imported_config import CFG as own\n"
        "def f():\n    from imported_package import imported_config as c\n"
        "    return own is c.CFG\n"
    )
    assert host.value[0]()


def test_values_of_the_project_are_the_modules_own_with_their_content(send: Send) -> None:
    host = send(
        "CFG['lr'] = 5\nROWS.append(CFG)\nTAGS.add('a')\nSETTINGS.debug = True\nbump()\n"
        "held = {'cfg': CFG}\n"
        "def f():\n    import imported_config as c\n    REGISTRY['x'] = 1\n    bump()\n"
        "    same = TAGS and c.CFG is CFG is held['cfg'] is ROWS[1] and c.SETTINGS is SETTINGS\n"
        "    return same, M is c.MISSING, get(M), read()\n"
    )
    cfg = {"lr": 5}
    assert host.value[0]() == (
        True,
        True,
        True,
        (5, [1, cfg], {"a"}, {"x": 1}, True, 2, [1]),
    )


def test_a_value_that_the_script_has_replaced_replaces_that_of_the_host(send: Send) -> None:
    host = send(
        "import imported_config as c\nc.CFG = [1]\nfrom imported_config import CFG\n"
        "def f():\n    import imported_config as c\n    return CFG, CFG is c.CFG\n"
    )
    assert host.value[0]() == ([1], True)


def test_values_of_a_module_that_the_host_cannot_import_are_copies(send: Send) -> None:
    text = "CFG['lr'] = 5\ndef f(): return CFG, ROWS, M\n"
    assert send(text, there="raise SystemExit(2)").value[0]()[:2] == ({"lr": 5}, [1])
    assert send(text, there="import nothing_of_this_name").value[0]()[:2] == ({"lr": 5}, [1])


def test_what_has_its_own_way_of_being_pickled_is_copied(send: Send) -> None:
    assert send("def f():\n    SLIM.value.append(2)\n    return read()[-1], SLIM.value\n").value[
        0
    ]() == ([1], [1, 2])
