"""Calls that cannot be pickled or rebuilt: the error names the part that is the cause."""

from __future__ import annotations

import functools
import sys
import threading
import types
from typing import Any

import payload_cases
import pytest
from payload_cases import LOCK, double, elsewhere, in_main

from kinetic._pickling import call, envelope, results
from kinetic._pickling.modules import Shipped
from kinetic.errors import (
    PicklingError,
    ResultUnavailable,
    SetupFailed,
    UserCodeFailed,
)


def pack(func, *args, **kwargs):
    return call.pack(func, args, kwargs, env_vars={})


project = payload_cases.project


class Holder:
    def __init__(self):
        self.inner = {"lock": threading.Lock()}


def test_arguments_are_named():
    with pytest.raises(PicklingError, match=r"\[1\]\['a'\] is a lock") as caught:
        pack(double, 1, [0, {"a": LOCK}])
    assert caught.value.component == "argument 2 (list)"
    with pytest.raises(PicklingError, match=r"\.inner\['lock'\]") as caught:
        pack(double, model=Holder())
    assert caught.value.component == "keyword 'model'"
    with pytest.raises(PicklingError, match="list"):
        pack(double, (i for i in range(3)))


def test_one_bad_item_of_many_is_found_quickly():
    tried = []

    class Item:
        def __reduce__(self):
            tried.append(1)
            return (int, ())

    items = [*(Item() for _ in range(1000)), LOCK]
    with pytest.raises(PicklingError, match=r"\[1000\]"):
        pack(double, items)
    assert len(tried) < 8000


def make_closure():
    lock = LOCK

    def train():
        return lock

    return train


SCRIPT = """
import functools, threading
client = threading.Lock()
def train(): return client
def outer(): return train()
def defaults(x, y=client): return y
def keyword_only(*, z=client): return z
class Model:
    def fit(self): return client
def build(): return Model()
class Slots:
    __slots__ = ("x",)
@functools.cache
def cached(n): return cached(n - 1), Slots, client
def calls_itself(): return cached(1)
"""


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("train", "global 'client' used by train"),
        ("outer", "global 'client' used by train"),
        ("defaults", "default of parameter 'y'"),
        ("keyword_only", "default of parameter 'z'"),
        ("build", "global 'client' used by fit"),
        ("calls_itself", "global 'client' used by cached"),
    ],
)
def test_what_a_function_uses_is_named(name, component):
    with pytest.raises(PicklingError, match="lock") as caught:
        pack(in_main(SCRIPT)[name], 1)
    assert caught.value.component == component
    assert caught.value.__cause__ is not None


def test_closures_partials_methods_and_callables_are_named():
    def component(func):
        with pytest.raises(PicklingError) as caught:
            pack(func)
        return caught.value.component

    assert component(make_closure()) == "closure variable 'lock' of train"
    assert component(functools.partial(double, LOCK)) == "argument 1 of the partial"
    assert component(functools.partial(make_closure())) == "closure variable 'lock' of train"
    assert (
        component(types.MethodType(double, Holder()))
        == "the object (Holder) whose method 'double' is called"
    )
    holder = Holder()
    holder.__class__ = type("CallableHolder", (Holder,), {"__call__": lambda self: 1})
    assert component(holder) == "the function"


def test_what_calls_the_shell_of_a_notebook_is_told_what_to_do():
    class Shell(Holder):
        def get_ipython(self):
            return self

    names = {"get_ipython": Shell().get_ipython}
    exec("def list_chips():\n    get_ipython().system('nvidia-smi -L')", names)
    with pytest.raises(
        PicklingError, match=r"`!command` and `%magic` .* subprocess\.run"
    ) as caught:
        pack(names["list_chips"])
    assert "cannot be pickled" not in str(caught.value)


def test_modules_of_the_project_are_searched(project):
    with pytest.raises(PicklingError) as caught:
        call.pack(project.locked.decorated.f, (), {}, env_vars={}, shipped=Shipped())
    assert caught.value.component == "global 'LOCK' used by decorated"


def test_functions_among_the_arguments_are_searched():
    with pytest.raises(PicklingError, match=r"global 'client' used by train.* is a lock") as caught:
        pack(double, {"f": in_main(SCRIPT)["outer"]})
    assert caught.value.component == "argument 1 (dict)"


def test_deep_nesting_is_named():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(PicklingError, match="nested too deeply") as caught:
        pack(double, deep)
    assert caught.value.component == "argument 1 (list)"
    helps = sys.version_info < (3, 12)
    assert ("setrecursionlimit" in str(caught.value)) is helps
    while deep:  # Free the lists one by one, or the interpreter would recurse too deeply.
        deep = deep.pop()


def test_open_files_and_views_arrive_as_their_content(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    with (tmp_path / "notes.txt").open() as file:
        packed = pack(double, [file, memoryview(b"view")])
        _, ((content, view),), _ = call.unpack(packed.data)
    assert (content.read(), view) == ("text", b"view")


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 4), reason="its pickle has a limit that nobody can set"
)
def test_functions_may_use_each_other_more_deeply_than_they_may_call():
    space: dict = {"__name__": "__main__"}
    text = "".join(f"def f{i}(n): return f{i + 1}(n) if n else 0\n" for i in range(400))
    exec(f"{text}def f400(n): return n", space)
    limit = sys.getrecursionlimit()
    func, _, _ = call.unpack(pack(space["f0"]).data)
    assert (func(0), func.__globals__["f399"](7)) == (0, 7)
    assert results.unpack_value(results.pack_value(space["f0"]))(0) == 0
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_reduce_that_raises_is_reported(kind):
    class Bad:
        def __reduce__(self):
            raise kind("no way")

    with pytest.raises(PicklingError, match="no way"):
        pack(double, Bad())
    with pytest.raises(PicklingError, match="no way") as caught:
        results.pack_value({"a": Bad()})
    assert caught.value.component == "the returned value (dict)"


def test_functions_that_refer_to_themselves_end():
    space = in_main(
        "import threading\nlock = threading.Lock()\ndef a(): return b\ndef b(): return a, lock\n"
    )
    with pytest.raises(PicklingError) as caught:
        pack(space["a"])
    assert caught.value.component == "global 'lock' used by b"


@pytest.mark.starts_processes
def test_a_missing_module_is_named(project):
    packed = pack(project.module.times)
    code = (
        "from kinetic._pickling import call as payload\nfrom kinetic.errors import SetupFailed\n"
        "try: payload.unpack(data)\nexcept SetupFailed as e: print(e, type(e.__cause__).__name__)"
    )
    output = elsewhere(code, packed.data)
    assert "'proj_mod' is missing" in output
    assert output.endswith("ModuleNotFoundError")


def test_another_python_is_refused_before_unpickling():
    version = envelope.read_versions().python
    data = pack(double, 1).data.replace(f'"python": "{version}"'.encode(), b'"python": "3.7"', 1)
    with pytest.raises(SetupFailed, match=rf"3\.7.*{version}"):
        call.unpack(data)


class Unreadable:
    def __reduce__(self):
        return (sys.exit, (3,))


def test_a_value_that_cannot_be_rebuilt_is_unavailable():
    with pytest.raises(ResultUnavailable, match="SystemExit"):
        results.unpack_value(results.pack_value(Unreadable()))
    with pytest.raises(SetupFailed, match="SystemExit"):
        call.unpack(pack(double, Unreadable()).data)


class ReadsVariable:
    def __reduce__(self):
        return (eval, ("__import__('os').environ['KINETIC_TEST_MODEL']",))


def test_a_missing_variable_is_named_with_how_to_set_it():
    message = "variable 'KINETIC_TEST_MODEL' is not set here: name it in env= or capture_env_vars="
    with pytest.raises(SetupFailed, match=message):
        call.unpack(pack(double, ReadsVariable()).data)


def test_a_class_that_needs_arguments_of_its_statement_is_said_to_belong_into_a_module(
    monkeypatch,
):
    library: Any = types.ModuleType("blame_library")
    text = "class Plugin:\n    def __init_subclass__(cls, kind): pass\n"
    exec(text, vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    space: dict[str, Any] = {"__name__": "__main__", "Plugin": library.Plugin}
    exec("class First(Plugin, kind='first'): pass\ndef use(): return First\n", space)
    with pytest.raises(SetupFailed, match="move it into a module of the project"):
        call.unpack(pack(space["use"]).data)


@pytest.mark.starts_processes
def test_importing_loads_no_vendor():
    code = (
        "import kinetic._pickling.call\nprint(sorted({'cloudpickle', 'tblib', 'pathspec'} & "
        "set(sys.modules)))"
    )
    assert elsewhere(code, b"") == "[]"


# -- records of another Python version -------------------------------------------------------------


def of_python_2(data: bytes) -> bytes:
    """Return the record with a pickle as Python 2.7 would have written it."""
    version = f'"python": "{envelope.read_versions().python}"'.encode()
    assert version in data
    return data.replace(version, b'"python": "2.7"', 1)


def test_code_of_another_python_is_refused() -> None:  # Running such bytecode would crash.
    space = in_main("class Point:\n    def double(self): return 2\nvalue = [Point(), 1]")
    for value in (lambda: 1, space["value"]):
        with pytest.raises(ResultUnavailable, match=r"code of Python 2\.7.*Made with Python 2\.7"):
            results.unpack_value(of_python_2(results.pack_value(value)))
        results.unpack_value(results.pack_value(value))


def test_versions_are_named_only_where_they_differ() -> None:
    space = in_main("class Odd:\n    def __reduce__(self): return int, ('x',)\nvalue = Odd()")
    with pytest.raises(ResultUnavailable, match="invalid literal") as caught:
        results.unpack_value(results.pack_value(space["value"]))
    assert "Made with" not in str(caught.value)


def test_values_without_code_come_from_any_python() -> None:
    value = {"loss": 0.5, "steps": [1, 2], "how": double}
    assert results.unpack_value(of_python_2(results.pack_value(value))) == value


def test_an_exception_with_code_of_another_python_arrives_as_text() -> None:
    error = in_main(
        "class Oops(Exception):\n    def why(self): return 'x'\nerror = Oops('no rows')"
    )["error"]
    with pytest.raises(UserCodeFailed, match=r"Oops: no rows\n.*code of Python 2\.7"):
        results.unpack_exception(of_python_2(results.pack_exception(error)))
    rebuilt = results.unpack_exception(of_python_2(results.pack_exception(KeyError("a"))))
    assert type(rebuilt) is KeyError


def test_the_attribute_that_cannot_be_pickled_is_named_for_a_class_that_is_registered() -> None:
    space = in_main(
        "class Point: pass\nPoint.lock = __import__('threading').Lock()\n"
        "def make(): return Point()\n"
    )
    with pytest.raises(PicklingError, match=r"[Aa]ttribute 'lock' of class Point"):
        pack(space["make"])


SINKS = """
import contextvars
var = contextvars.ContextVar("var")
class Sink:
    def __init__(self, path): self._file = open(path, "a")
class Handler:
    def __init__(self, path): self._sink = Sink(path)
class Logger:
    def __init__(self, path): self.handlers = {1: Handler(path)}
def use_variable(): return var.get()
def use_lock(): return lock
def use_logger(): return logger
"""


def test_advice_can_be_followed(tmp_path):
    space = in_main(SINKS)
    space["logger"] = space["Logger"](tmp_path / "log")
    with pytest.raises(PicklingError, match=r"it is a ContextVar\. Move it into a module"):
        pack(space["use_variable"])
    space["lock"] = threading.Lock()  # As after `from shared import lock`.
    with pytest.raises(PicklingError, match=r"is a lock\..*without `from module import name`"):
        pack(space["use_lock"])
    with pytest.raises(PicklingError, match=r"_sink\._file is a TextIOWrapper. Remove the sink"):
        pack(space["use_logger"])
    space["logger"].handlers[1]._sink._file.close()
