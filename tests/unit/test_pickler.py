"""Pickling the parts of a script, and their state in `__main__` of a host."""

from __future__ import annotations

import importlib.machinery
import io
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import script_host
from script_host import Host, sent

from kinetic._pickling import upstream
from kinetic._pickling.pickler import CallPickler
from kinetic._pickling.unpickler import CallUnpickler

library = script_host.library


def test_functions_that_a_module_has_made_find_what_it_has(library: Any) -> None:
    text = """
STATE = [4]
def make():
    def plain(): return len('abc')
    def needs(): return STATE[0]
    return plain, needs
"""
    exec(compile(text, "picklertest_library.py", "exec", dont_inherit=True), vars(library))
    library.__spec__ = importlib.machinery.ModuleSpec(library.__name__, None)
    host = sent("import picklertest_library as lib\nboth = lib.make()\n", "both")
    (plain, needs) = host.value[0]
    assert (plain(), needs()) == (3, 4)
    assert needs.__globals__ is vars(library)


def test_a_decorator_of_a_module_works_with_what_the_module_has(library: Any) -> None:
    text = """
import functools
CALLS = []
def logged(f):
    @functools.wraps(f)
    def inner(*args):
        CALLS.append(f.__name__)
        return f(*args)
    return inner
"""
    exec(compile(text, "picklertest_library.py", "exec", dont_inherit=True), vars(library))
    library.__spec__ = importlib.machinery.ModuleSpec(library.__name__, None)
    script = "import picklertest_library as lib\n@lib.logged\ndef double(x): return 2 * x\n"
    assert sent(script, "double").value[0](2) == 4
    assert library.CALLS == ["double"]


@pytest.mark.parametrize("names", [("outside", "bump"), ("bump", "outside"), ("all",)])
def test_a_module_that_is_sent_has_the_namespace_of_its_functions(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = types.ModuleType("picklertest_outside")
    text = "N = 0\ndef bump():\n    global N\n    N += 1\ndef read(): return N, __name__\n"
    exec(text, vars(outside))
    monkeypatch.setitem(sys.modules, outside.__name__, outside)
    cloudpickle.register_pickle_by_value(outside)
    try:
        script = "import picklertest_outside as outside\nfrom picklertest_outside import *\n"
        host = sent(script + "all = {'bump': bump, 'outside': outside}\n", *names)
    finally:
        cloudpickle.unregister_pickle_by_value(outside)
    values = host.value[0] if names == ("all",) else dict(zip(names, host.value, strict=True))
    values["bump"]()
    copy = values["outside"]
    assert (copy.N, copy.read(), outside.N) == (1, (1, outside.__name__), 0)  # type: ignore[attr-defined]
    assert copy.bump is values["bump"]


def test_functions_that_share_a_variable_share_it_there() -> None:
    (inc, get, read_unset), held = sent(
        "def counter():\n    n = 0\n"
        "    def inc():\n        nonlocal n\n        n += 1\n        return inc\n"
        "    def get(): return n\n    def unset(): return later\n    return inc, get, unset\n"
        "    later = 1\n"
        "both = counter()\nheld = {'get': both[1], 'own': counter()[1]}\n",
        "both",
        "held",
    ).value
    inc()()
    assert (get(), held["get"](), held["own"]()) == (2, 2, 0)
    with pytest.raises(NameError):
        read_unset()


def test_what_registers_in_the_script_itself_is_sent_with_what_it_knows() -> None:
    text = """
KNOWN = {}
def register(cls):
    KNOWN[cls.__name__] = cls
    return cls
@register
class A:
    pass
class Plugin:
    kinds = []
    def __init_subclass__(cls, kind): Plugin.kinds.append(cls)
class First(Plugin, kind=1):
    pass
class Meta(type):
    made = []
    def __new__(meta, name, bases, fields, tag):
        meta.made.append(name)
        return super().__new__(meta, name, bases, fields)
class Tagged(metaclass=Meta, tag=2):
    pass
"""
    registry, plugin, first, meta, tagged = sent(
        text, "KNOWN", "Plugin", "First", "Meta", "Tagged"
    ).value
    assert list(registry) == ["A"]
    assert plugin.kinds == [first]
    assert (meta.made, type(tagged)) == (["Tagged"], meta)
    with pytest.raises(TypeError, match="kind"):
        type("Second", (plugin,), {})


def test_functions_of_a_script_share_the_main_of_the_host() -> None:
    text = """
COUNT = 0
def add():
    global COUNT
    COUNT += 1
def read(): return COUNT
"""
    host = sent(text, "add", "read")
    add, read = host.value
    add()
    assert (read(), host.main["COUNT"]) == (1, 1)
    assert add.__globals__ is host.main


def calls(host: Host, *args: Any) -> Any:
    return host.value[0](*args)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (
            "import functools\n@functools.cache\n"
            "def f(n): return n if n < 2 else f(n - 1) + f(n - 2)\n",
            55,
        ),
        (
            "import functools\n@functools.lru_cache(maxsize=3)\n"
            "def f(n): return f.cache_parameters()['maxsize']\n",
            3,
        ),
        (
            "import functools\nclass A:\n    @functools.cached_property\n"
            "    def p(self): return 5\ndef f(n): return A().p\n",
            5,
        ),
        (
            "from functools import *\n@singledispatch\ndef g(x): return 0\n@g.register\n"
            "def _(x: int): return 7\ng(1)\nf = g\n",
            7,
        ),
        (
            "import weakref\nclass A: pass\na = A()\nW = weakref.WeakKeyDictionary({a: 3})\n"
            "def f(n): return W[a]\n",
            3,
        ),
        (
            "import weakref\nclass A: pass\na = A()\nW = weakref.WeakValueDictionary({3: a})\n"
            "def f(n): return W[3] is a\n",
            True,
        ),
        (
            "from picklertest_library import Needy\n@Needy\ndef g(n): return n * 2\n"
            "def f(n): return g(n)\n",
            20,
        ),
    ],
)
def test_what_plain_cloudpickle_cannot(text: str, value: object, library: Any) -> None:
    assert calls(sent(text, "f"), 10) == value


def test_a_class_in_a_function_has_the_globals_that_only_its_body_uses() -> None:
    text = (
        "import functools\nlimit = 3\ndef f():\n    class A:\n        size = limit\n"
        "        @functools.cache\n        def g(self): return self.size\n    return A().g()\n"
    )
    assert sent(text, "f").value[0]() == 3


def test_an_object_that_only_looks_like_a_decorator_runs_no_code() -> None:
    class Nosy:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

        def __call__(self) -> None: ...

        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return int, ()

    file = io.BytesIO()
    CallPickler(file, {}).dump([Nosy()])
    file.seek(0)
    assert CallUnpickler(file).load() == [0]


def test_what_a_call_holds_can_be_pickled_there_by_its_name() -> None:
    text = """
import enum
class Model: pass
class Kind(enum.Enum): A = 1
def double(x): return x
def make():
    class Inner: pass
    return Inner(), lambda: 1
held = Model(), Kind.A, double, *make()
class Model: pass
"""
    host = sent(text, "held")
    model, kind, double, *_ = host.value[0]
    names = {name: value for name, value in host.main.items() if not name.startswith("__")}
    assert names == {"Model": type(model), "Kind": type(kind), "double": double}


def test_a_module_of_a_class_of_its_own_travels_by_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    lazy = Lazy("picklertest_lazy")
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    assert sent("import picklertest_lazy as lazy", "lazy").value == [lazy]


def test_the_environment_is_the_hosts_and_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    text = "from os import environ\nimport os\nother = os.environ\ndef f(): return environ, other\n"
    host = sent(text, "f")
    assert b"hush" not in host.data
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the host")
    environ, other = host.value[0]()
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


def test_private_names_of_cloudpickle_are_in_one_place() -> None:
    private = re.compile(r"from cloudpickle(\.cloudpickle)? import|cloudpickle\._[a-z]")
    files = Path(upstream.__file__).parents[1].rglob("*.py")
    assert [file.name for file in files if private.search(file.read_text())] == ["upstream.py"]
