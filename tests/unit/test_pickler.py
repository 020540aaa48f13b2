"""How the parts of a script are pickled, and what they are in the `__main__` of a host."""

from __future__ import annotations

import importlib.machinery
import io
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import script_host
from script_host import Host, sent

from kinetic._pickling.matching import look_of
from kinetic._pickling.pickler import CallPickler
from kinetic._pickling.script import Script, ScriptSource
from kinetic._pickling.unpickler import CallUnpickler

library = script_host.library

IMPORT = "from picklertest_library import *\nimport picklertest_library as lib\n"


@pytest.mark.parametrize(
    ("statement", "seen"),
    [
        ("@register\nclass A:\n    x = 1\n", ["A"]),
        ("@lib.register\nclass A:\n    x = 1\n", ["A"]),
        ("@lib.register_with()\nclass A:\n    x = 1\n", ["A"]),
        ("class A(Base, key=2):\n    x: int\n    y = 1\n", [("A", ["y"], {"key": 2})]),
        ("class A(metaclass=Meta):\n    y = 1\n    def f(self): return A\n", [("A", ["f", "y"])]),
        ("if True:\n    @register\n    class A:\n        x = 1\n", ["A"]),
        ("class A:\n    x = 1\nlib.register_with(A, key=1)\n", ["A"]),
        ("class A:\n    pass\n", []),
        ("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass A:\n    x: int = 1\n", []),
    ],
)
def test_what_a_library_registers_is_registered_again(
    statement: str, seen: list[Any], library: Any
) -> None:
    host = sent(IMPORT + statement, "A", library=library)
    assert seen == library.SEEN
    assert host.value[0].__name__ == "A"


def test_what_the_call_does_not_use_is_registered_too(library: Any) -> None:
    sent(
        IMPORT
        + "@register\nclass A: pass\n@register\ndef f(): pass\n@register_with()\ndef g(): pass\n"
        "x = 1\n",
        "x",
        library=library,
    )
    assert sorted(library.SEEN) == ["A", "f", "g"]


def test_what_is_registered_is_so_before_the_call_is_unpickled(library: Any) -> None:
    text = (
        "import picklertest_library as lib\n@lib.register\nclass A: pass\n"
        "class B: pass\nlib.register_with(B)\nlooking = lib.Looking()\n"
    )
    assert sent(text, "looking", library=library).value == [("A", "B")]


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
    host = sent("import picklertest_library as lib\nboth = lib.make()\n", "both", library=library)
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
    assert sent(script, "double", library=library).value[0](2) == 4
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
    found = host.value[0] if names == ("all",) else dict(zip(names, host.value, strict=True))
    found["bump"]()
    copy = found["outside"]
    assert (copy.N, copy.read(), outside.N) == (1, (1, outside.__name__), 0)  # type: ignore[attr-defined]
    assert copy.bump is found["bump"]


def test_an_object_that_is_known_by_its_name_is_there_under_it() -> None:
    text = """
import functools
class Missing:
    def __reduce__(self): return "MISSING"
MISSING = Missing()
MISSING.seen = [1]
class Cached:
    def __init__(self, f): functools.update_wrapper(self, f)
    def __call__(self, x): return self.__wrapped__(x)
    def __reduce__(self): return self.__qualname__
@Cached
def double(x): return 2 * x
def f(x=MISSING): return x is MISSING, x is given["it"], double(2)
given = {"it": MISSING}
"""
    host = sent(text, "f", "given")
    assert host.value[0]() == (True, True, 4)
    assert host.main["MISSING"] is host.value[1]["it"]
    assert host.main["MISSING"].seen == [1]


def test_functions_that_share_a_variable_share_it_there() -> None:
    (inc, get, again), held = sent(
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
        again()


def test_definitions_have_the_globals_that_they_need_now_and_later(library: Any) -> None:
    text = f"""{IMPORT}
WIDTH, LATER = 3, [4]
def helper(): return A().y + LATER[0]
class Root(Base):
    z = 5
@register
class A(Root, extra=WIDTH):
    y: int = WIDTH
    sums = [WIDTH + i for i in range(2)]
    def f(self): return helper() + self.z
"""
    host = sent(text, "A", library=library)
    made = host.value[0]
    assert (made().f(), made.sums, made.__mro__[1].__name__) == (12, [3, 4], "Root")
    assert host.main["A"] is made
    assert [each if isinstance(each, str) else each[0] for each in library.SEEN] == [
        "Root",
        "A",
        "A",
    ]
    assert made.f.__code__.co_filename == "script.py"
    assert (
        made.f.__code__.co_firstlineno
        == text.splitlines().index("    def f(self): return helper() + self.z") + 1
    )


def test_a_decorator_of_the_script_registers_with_a_library_on_the_host_as_well(
    library: Any,
) -> None:
    text = f"""{IMPORT}
def pytree(cls):
    cls.is_tree = True
    return register(cls)
@pytree
class A:
    pass
def plain(cls): return cls
@plain
class B:
    pass
"""
    host = sent(text, "A", "B", library=library)
    assert [each.__name__ for each in host.value] == ["A", "B"]
    assert host.value[0].is_tree
    assert library.SEEN == ["A"]


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
    known, plugin, first, meta, tagged = sent(
        text, "KNOWN", "Plugin", "First", "Meta", "Tagged"
    ).value
    assert list(known) == ["A"]
    assert plugin.kinds == [first]
    assert (meta.made, type(tagged)) == (["Tagged"], meta)
    with pytest.raises(TypeError, match="kind"):
        type("Second", (plugin,), {})


def test_a_definition_that_needs_itself_is_rebuilt_from_its_parts(library: Any) -> None:
    text = f"""{IMPORT}
def mine(cls):
    mine.last = cls
    return A if 'A' in globals() else cls
@register
@mine
class A:
    def f(self): return mine.last is A
"""
    host = sent(text, "mine", "A", library=library)
    assert host.value[1]().f()


def test_a_source_that_has_changed_since_is_not_executed(library: Any) -> None:
    text = f"{IMPORT}@register\nclass A(Base):\n    def f(self): return 1\n"
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(text, "script.py", "exec", dont_inherit=True), space)
    moved = Script(space, [ScriptSource("script.py", f"# another line\n{text}")])
    assert moved.definition(space["A"]) is None
    assert Script(space, [ScriptSource("script.py", text)]).definition(space["A"]) is not None
    assert Script(space, [ScriptSource("script.py", "not ( python")]).definition(space["A"]) is None
    del space["register"]
    assert Script(space, [ScriptSource("script.py", text)]).definition(space["A"]) is None, (
        "a name is gone"
    )


def test_an_exit_handler_is_not_registered_again(library: Any) -> None:
    text = "import atexit\n@atexit.register\ndef last(): pass\nx = 1\n"
    assert sent(text, "x").again == [None]


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
    CallPickler(file, Script({})).dump([Nosy()])
    file.seek(0)
    assert CallUnpickler(file).load() == [0]


@pytest.mark.parametrize(
    "text",
    [
        "class Point: pass\nx = [1]; register(Point)",
        "class Point: pass\nif True: register(Point)",
        "class Point: pass\nPoint = register(Point)",
        "class Point: pass\nclass Other: pass\nfor each in (Point,): register(each)",
        "class Point: pass\nALL = [Point]\nfor each in ALL:\n    register(each)",
        "@register\nclass Point:\n    '''\x0c \x0b \x1c \u2028'''\n    pass",
        "if True:\n    x = 1\n    \x0c\n    @register\n    class Point: pass\n",
    ],
)
def test_registrations_are_found_however_they_are_written(
    text: str, library: types.ModuleType
) -> None:
    host = sent(f"from picklertest_library import register\n{text}\n", "Point", library=library)
    assert library.SEEN == ["Point"]
    assert host.value[0].__name__ == "Point"


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


def test_a_class_that_is_defined_again_has_the_attributes_that_it_had(
    library: types.ModuleType,
) -> None:
    text = """
from picklertest_library import register
import random
N = 1
@register
class Point:
    made = 0
    all = {}
    none = {}
    n = N
    drawn = random.random()
    def __init__(self):
        type(self).made += 1
    def kept(self):
        return 1
    def changed(self):
        return 2
N = 2
Point.origin = Point()
Point.all["origin"] = Point.origin
Point.changed = lambda self: 3
"""
    host = sent(text, "Point", "N", library=library)
    point, n = host.value
    assert library.SEEN == ["Point"]
    assert (point.made, point.n, n, point.none) == (1, 1, 2, {})
    assert type(point.origin) is point
    assert point.all == {"origin": point.origin}
    assert (point.origin.kept(), point.origin.changed()) == (1, 3)
    assert point.drawn == host.here["Point"].drawn


def test_of_two_definitions_the_one_that_was_executed_counts(library: types.ModuleType) -> None:
    text = """
from picklertest_library import register
if True:
    @register
    class Point:
        version = 1
else:
    @register
    class Point:
        version = 2
"""
    assert sent(text, "Point", library=library).value[0].version == 1
    assert library.SEEN == ["Point"]


def test_a_registration_at_a_function_of_a_module_is_done_again(library: types.ModuleType) -> None:
    text = """
import picklertest_library as lib
class Point: pass
@lib.show.register
def _(x: Point): return "point"
"""
    exec("import functools\n@functools.singledispatch\ndef show(x): return 'other'", vars(library))
    host = sent(text, "Point", library=library)
    assert library.show(host.value[0]()) == "point"
    assert library.show(1) == "other"


def test_a_module_of_a_class_of_its_own_travels_by_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> None:
            raise AssertionError(name)

    made = Lazy("picklertest_lazy")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    assert sent("import picklertest_lazy as lazy", "lazy").value == [made]


def test_code_with_an_integer_of_thousands_of_digits_has_a_look() -> None:
    text = f"def f(x):\n    return x % 0x{'f' * 4000}\n"
    assert look_of(compile(text, "a.py", "exec")) == look_of(compile(text, "b.py", "exec"))
