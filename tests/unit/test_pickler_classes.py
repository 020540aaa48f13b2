"""Classes of a script, and of libraries, as hosts get them."""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

import pytest
import script_host
from script_host import sent

from kinetic._pickling import results
from kinetic._pickling.pickler import CallPickler
from kinetic._pickling.script import Script
from kinetic.errors import UsageError

library = script_host.library


@pytest.mark.parametrize("slots", ["'x', 'y'", "'x', '__y'", "'x', '__dict__'"])
def test_a_class_keeps_its_slots(slots: str) -> None:
    host = sent(
        f"class A:\n    __slots__ = ({slots})\n    def put(self, x): self.x = x; return self\n"
        "a = A().put(3)\n",
        "A",
        "a",
    )
    cls, one = host.value
    here = host.here["A"]
    assert (cls.__slots__, one.x) == (here.__slots__, 3)
    assert hasattr(one, "__dict__") == hasattr(host.here["a"], "__dict__")
    set_by_looking = {"__slotnames__", "__annotate_func__", "__annotations_cache__"}
    assert vars(cls).keys() - set_by_looking == vars(here).keys() - set_by_looking


def test_slots_of_one_name_and_of_a_subclass() -> None:
    host = sent(
        "class A:\n    __slots__ = 'x'\nclass B(A):\n    __slots__ = ('y',)\n"
        "b = B(); b.x, b.y = 1, 2\n",
        "b",
    )
    (one,) = host.value
    assert (one.x, one.y, hasattr(one, "__dict__")) == (1, 2, False)


def test_typed_classes_and_names_of_a_script_arrive() -> None:
    host = sent(
        "from __future__ import annotations\nfrom typing import *\n"
        "class Params(NamedTuple):\n    w: float\n    b: float = 0.5\n"
        "Id, P, Ts = NewType('Id', int), ParamSpec('P'), TypeVarTuple('Ts')\n"
        "Options = TypedDict('Options', {'lr': float})\n"
        "class More(TypedDict, total=False):\n    lr: float\n"
        "params = Params(1.0)\n"
        "class Slots:\n    __slots__ = iter(['x'])\n",
        "params",
        "Id",
        "P",
        "Ts",
        "Options",
        "More",
        "Slots",
    )
    params, made, spec, ts, options, more, slots = host.value
    assert (params._asdict(), type(params)._field_defaults) == ({"w": 1.0, "b": 0.5}, {"b": 0.5})
    assert (made(3), made.__name__, made.__supertype__, made.__module__) == (
        3,
        "Id",
        int,
        "__main__",
    )
    assert (spec.__name__, ts.__name__) == ("P", "Ts")
    assert (options(lr=1), options.__total__, more.__total__) == ({"lr": 1}, True, False)
    assert not hasattr(slots(), "__dict__")


def test_what_only_the_caller_has_of_a_decorated_function_says_so() -> None:
    host = sent(
        "import kinetic\n@kinetic.run('cpu')\ndef f(n):\n    return f(n - 1) + 1 if n else 0\n"
        "def g(): return f\n",
        "g",
    )
    (g,) = host.value
    function = g()
    assert (type(function), function(3)) == (types.FunctionType, 3)
    for name in ("run_async", "run_async_map", "with_options", "plan"):
        with pytest.raises(UsageError, match=rf"f\.{name} is of the script that submits jobs") as e:
            getattr(function, name)(1, x=2)
        assert len(e.traceback) == 1, "it is shown where it was called"
    assert function.local(2) == 2, "it runs right there, as everywhere"


def test_a_class_with_another_name_than_its_module_has_for_it_arrives_as_itself(
    library: Any,
) -> None:
    made = type("Array", (), {"__module__": library.__name__, "__qualname__": "inner._c.Array"})
    library.Array = made
    file = io.BytesIO()
    CallPickler(file, Script({})).dump(made)
    for data in (file.getvalue(), results.pack_value(made)):
        assert b"_make_skeleton_class" not in data, "a copy is another class in another process"
    assert pickle.loads(file.getvalue()) is made
    assert results.unpack_value(results.pack_value(made)) is made


CHECKING = """
import functools, weakref
KEPT = []
def check(function):
    KEPT.append(function)
    held = [weakref.ref(function)]
    @functools.wraps(function)
    def call(*args): return held[0]()(*args)
    return call
"""


def test_a_function_in_a_closure_that_cannot_be_sent_is_defined_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library: Any = types.ModuleType("jaxtyping._like")
    exec(compile(CHECKING, "like.py", "exec", dont_inherit=True), vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    text = """
import jaxtyping._like as lib
BY = 3
@lib.check
def grow(n): return n * BY
def look(n): return grow(n) + 1
class Layer:
    @lib.check
    def grow(self, n): return n * BY
layer = Layer()
"""
    look, layer = sent(text, "look", "layer").value
    assert (look(2), layer.grow(2)) == (7, 6)
    assert len(library.KEPT) == 4, "checked on the host, too"
    again = results.unpack_value(results.pack_value(layer))
    assert again.grow(2) == 6


def test_attributes_set_by_name_travel_with_a_class_that_is_defined_again(library: Any) -> None:
    text = (
        "import picklertest_library as lib\n@lib.register\nclass A: pass\n"
        "setattr(A, 'more', 7)\nB = A\nsetattr(B, 'most', 8)\nvars(A)\n"
    )
    (made,) = sent(text, "A", library=library).value
    assert (made.more, made.most) == (7, 8)


def test_a_class_keeps_its_bases_where_their_names_stand_for_others_now(library: Any) -> None:
    text = """
import picklertest_library as lib
class One: size = 1
class Two: size = 2
Base = One
@lib.register
class Model(Base, lib.Base):
    def look(self): return self.size, Base.size
@lib.register
class Again(Model): pass
Base = Two
"""
    host = sent(text, "Again", "Base", "One", library=library)
    again, base, one = host.value
    assert again().look() == (1, 2)
    assert again.__mro__[1].__bases__ == (one, library.Base)
    assert host.main["Base"] is base


def test_functions_put_into_a_class_travel_with_it_when_it_is_defined_again(library: Any) -> None:
    text = """
import functools, threading
import picklertest_library as lib
def keep(function):
    lock = threading.Lock()  # It cannot be sent.
    return functools.wraps(function)(lambda self: (lock, function(self))[1])
@lib.register
class Net:
    def __call__(self, x): return x
    def __str__(self): return "old"
    def kept(self): return 1
    @keep
    def wrapped(self): return 2
    @property
    def size(self): return 0
    @classmethod
    def name(cls): return "old"
    __repr__ = __str__
def add_to_class(cls):
    def put(function):
        setattr(cls, function.__name__, function)
    return put
Net.__call__ = lambda self, x: 100 * x
@add_to_class(Net)
def __str__(self): return "new"
@add_to_class(Net)
def forward(self): return Net.name()
for each, value in {"size": property(lambda self: 3), "name": classmethod(lambda cls: "n")}.items():
    setattr(Net, each, value)
Net.__bool__ = lib.register
Net.__hash__ = None
"""
    (made,) = sent(text, "Net", library=library).value
    one = made()
    assert (one(2), str(one), repr(one), one.forward(), one.size) == (200, "new", "old", "n", 3)
    assert (one.kept(), one.wrapped()) == (1, 2)
    assert vars(made)["__bool__"] is library.register
    assert vars(made)["__hash__"] is None


def test_a_class_of_which_it_cannot_be_known_what_made_it_is_rebuilt(library: Any) -> None:
    text = """
import picklertest_library as lib
@lib.register
class Point:
    x: int = 1
def old(): return vars(here)["x"]
here = Point
Point.extra = 5
@lib.register
class Point:
    x: int = lib.SEEN and 2
def wrap(cls):
    class Inner(cls): pass
    Inner.__name__, Inner.__qualname__ = cls.__name__, cls.__qualname__
    return lib.register(Inner)
@wrap
class Mine(lib.Base):
    pass
"""
    host = sent(text, "here", "Mine", library=library)
    old, mine = host.value
    assert (old.x, old.extra) == (1, 5)
    assert [each.__name__ for each in mine.__mro__] == ["Mine", "Mine", "Base", "object"]


def test_what_annotations_name_is_left_out_where_it_cannot_be_sent(library: Any) -> None:
    text = """
from __future__ import annotations
import threading, types
import picklertest_library as lib
class Locked:
    lock = threading.Lock()
space = types.SimpleNamespace(lock=Locked.lock)
class Plain:
    locked: Locked
    axes: space
def look(x: Locked, y: space): return Plain
@lib.register
class Registered:
    locked: Locked
"""
    host = sent(text, "look", "Registered")
    assert host.value[0](1, 2).__annotations__ == {"locked": "Locked", "axes": "space"}
    assert "Locked" not in host.main


def test_odd_wrappers_of_methods_have_no_defaults(library: Any) -> None:
    text = """
import functools
import picklertest_library as lib
def loop(): pass
loop.__wrapped__ = loop
@lib.register
class Odd:
    @functools.wraps(functools.partial(print))
    def of_a_partial(self, n=1): return n
    @functools.wraps(loop)
    def of_itself(self, n=2): return n
Odd.of_itself.__wrapped__ = Odd.of_itself
"""
    made = sent(text, "Odd", library=library).value[0]()
    assert (made.of_a_partial(), made.of_itself()) == (1, 2)


def test_a_cached_function_of_a_module_comes_back_as_itself(library: Any) -> None:
    exec("import functools\n@functools.cache\ndef double(n): return 2 * n", vars(library))
    library.double.__module__ = library.__name__
    assert results.unpack_value(results.pack_value([library.double]))[0] is library.double


def test_what_cannot_be_sent_is_left_to_the_statement(library: types.ModuleType) -> None:
    host = sent(
        "import threading\nfrom picklertest_library import register\n"
        "def locked():\n    lock = threading.Lock()\n"
        "    def go(self):\n        with lock: return 7\n"
        "    return go\n"
        "@register\nclass A:\n    go = locked()\n",
        "A",
        library=library,
    )
    (cls,) = host.value
    assert cls().go() == 7
