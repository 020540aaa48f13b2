"""Classes of scripts and libraries that are pickled by value, and rebuilt on hosts."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import pytest
import script_host
from script_host import sent

from kinetic._pickling import results
from kinetic._pickling.pickler import CallPickler
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
    original = host.here["A"]
    assert (cls.__slots__, one.x) == (original.__slots__, 3)
    assert hasattr(one, "__dict__") == hasattr(host.here["a"], "__dict__")
    set_by_looking = {"__slotnames__", "__annotate_func__", "__annotations_cache__"}
    assert vars(cls).keys() - set_by_looking == vars(original).keys() - set_by_looking


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
        "params = Params(1.0)\n",
        "params",
        "Id",
        "P",
        "Ts",
        "Options",
        "More",
    )
    params, new_type, spec, ts, options, more = host.value
    assert (params._asdict(), type(params)._field_defaults) == ({"w": 1.0, "b": 0.5}, {"b": 0.5})
    assert (new_type(3), new_type.__name__, new_type.__supertype__, new_type.__module__) == (
        3,
        "Id",
        int,
        "__main__",
    )
    assert (spec.__name__, ts.__name__) == ("P", "Ts")
    assert (options(lr=1), options.__total__, more.__total__) == ({"lr": 1}, True, False)


@pytest.mark.starts_processes
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
        with pytest.raises(UsageError, match=rf"f\.{name} was called inside a job") as e:
            getattr(function, name)(1, x=2)
        assert len(e.traceback) == 1, "it is shown where it was called"
    assert function.local(2) == 2, "it runs right there, as everywhere"


def test_a_class_with_another_name_than_its_module_has_for_it_arrives_as_itself(
    library: Any,
) -> None:
    cls = type("Array", (), {"__module__": library.__name__, "__qualname__": "inner._c.Array"})
    library.Array = cls
    file = io.BytesIO()
    CallPickler(file, {}).dump(cls)
    for data in (file.getvalue(), results.pack_value(cls)):
        assert b"_make_skeleton_class" not in data, "a copy is another class in another process"
    assert pickle.loads(file.getvalue()) is cls
    assert results.unpack_value(results.pack_value(cls)) is cls


def test_a_cached_function_of_a_module_comes_back_as_itself(library: Any) -> None:
    exec("import functools\n@functools.cache\ndef double(n): return 2 * n", vars(library))
    library.double.__module__ = library.__name__
    assert results.unpack_value(results.pack_value([library.double]))[0] is library.double
