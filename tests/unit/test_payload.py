"""Packing and unpacking calls and values."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import subprocess
import sys
import threading
import types

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._pickling import call, envelope, results
from kinetic._pickling.modules import Shipped, classify
from kinetic.errors import (
    CorruptRecord,
    PicklingError,
    ResultUnavailable,
    SetupFailed,
    UserCodeFailed,
)


def pack(func, *args, **kwargs):
    return call.pack(func, args, kwargs, env_vars={})


def double(x):
    return 2 * x


def in_main(source: str) -> dict:
    """Run source as if it were a script: its functions and classes are pickled by value."""
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(source, space)
    return space


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one importable module; gives its root."""
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


def elsewhere(code: str, data: bytes) -> str:
    """Run code in a fresh process that cannot import this project's modules; `data` is at hand."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; data = sys.stdin.buffer.read()\n" + code],
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_a_call_comes_back():
    packed = call.pack(double, (4,), {}, env_vars={"A": "1"})
    func, args, kwargs = call.unpack(packed.data)
    assert func(*args, **kwargs) == 8
    assert packed.size_bytes == len(packed.data)
    assert packed.versions == envelope.versions_here()


def test_the_header_reads_without_unpickling():
    header_line, _, body = call.pack(double, (), {}, env_vars={"A": "ä\n"}).data.partition(b"\n")
    header = envelope.read_header(header_line + b"\n" + b"not a pickle")
    assert header.kind == "call"
    assert header.env_vars == {"A": "ä\n"}
    assert header.versions.python == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert json.loads(header_line)["fingerprint"]["cloudpickle"] == cloudpickle.__version__
    assert body


def test_shared_objects_stay_shared():
    shared: list[int] = []

    def add():
        shared.append(1)

    func, (again,), kwargs = call.unpack(call.pack(add, (shared,), {"k": shared}, env_vars={}).data)
    func()
    assert again == [1]
    assert kwargs["k"] is again


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text() | st.binary(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_any_value_comes_back(value):
    assert results.unpack_value(results.pack_value(value)) == value


def test_a_value_that_cannot_go_back_is_not_to_be_made_inside_the_function():
    with pytest.raises(PicklingError) as caught:
        results.pack_value({"locks": [threading.Lock()]})
    told = str(caught.value)
    assert told.startswith(
        "The returned value (dict) cannot be pickled: its part ['locks'][0] is a lock. Return what "
        "it is made"
    )
    with pytest.raises(
        PicklingError,
        match=r"^The returned value \(generator\) cannot be pickled. Make a list of it",
    ):
        results.pack_value(x for x in [1])


def test_flags_of_absl_are_to_be_passed_as_values():
    from absl import flags

    own = flags.FlagValues()
    steps = flags.DEFINE_integer("steps", 3, "how many", flag_values=own)
    for used in (own, steps):
        with pytest.raises(
            PicklingError,
            match=r"^Argument 1 \(Flag\w+\) cannot be pickled.* Pass the values of the flags "
            r"instead\. ",
        ):
            call.pack(print, (used,), {}, env_vars={})


@given(data=st.data())
def test_any_damaged_byte_is_seen(data):
    whole = bytearray(results.pack_value({"a": [1, 2, 3]}))
    start = envelope.read_header(bytes(whole)).body_offset
    at = data.draw(st.integers(start, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptRecord):
        results.unpack_value(bytes(whole))


@given(
    garbage=st.binary(max_size=60)
    | st.binary(max_size=20).map(lambda b: b'{"schema": 1}\n' + b)
    | st.just(b"[]\n")
    | st.just(b"1\n")
)
def test_garbage_is_a_corrupt_record(garbage):
    for read in (call.unpack, results.unpack_value, results.unpack_exception):
        with pytest.raises(CorruptRecord):
            read(garbage)


def test_a_truncated_record_and_the_wrong_kind_are_corrupt():
    data = results.pack_value(1)
    with pytest.raises(CorruptRecord, match="damaged"):
        results.unpack_value(data[:-1])
    with pytest.raises(CorruptRecord, match="holds a value"):
        call.unpack(data)


def test_a_newer_schema_is_refused():
    data = results.pack_value(1).replace(b'"schema": 1', b'"schema": 9', 1)
    with pytest.raises(CorruptRecord, match="schema 9"):
        results.unpack_value(data)


# By value


def test_modules_that_are_not_shipped_travel_by_value(project):
    packed = call.pack(project.module.times, (5,), {}, env_vars={}, shipped=Shipped())
    code = (
        "from kinetic._pickling import call as payload; f, a, k = payload.unpack(data); "
        "print(f(*a), 'proj_mod' in sys.modules)"
    )
    assert elsewhere(code, packed.data) == "15 False"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_nothing_stays_registered_after_a_failure(project):
    with pytest.raises(PicklingError):
        call.pack(
            lambda module: module.locked(1), (project.locked,), {}, env_vars={}, shipped=Shipped()
        )
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_what_the_user_registered_stays(project):
    cloudpickle.register_pickle_by_value(project.module)
    try:
        call.pack(project.module.times, (1,), {}, env_vars={}, shipped=Shipped())
        assert cloudpickle.list_registry_pickle_by_value() == {"proj_mod"}
    finally:
        cloudpickle.unregister_pickle_by_value(project.module)


def test_threads_share_the_registration(project):
    inside, may_end = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self):
            inside.set()
            assert may_end.wait(200)
            return (int, ())

    slow = threading.Thread(
        target=call.pack,
        args=(double, (Slow(),), {}),
        kwargs={"env_vars": {}, "shipped": Shipped()},
    )
    slow.start()
    assert inside.wait(200)
    call.pack(project.module.times, (1,), {}, env_vars={}, shipped=Shipped())
    assert cloudpickle.list_registry_pickle_by_value() >= {"proj_mod", "proj_locked"}
    may_end.set()
    slow.join(200)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_installed_modules_and_kinetic_never_travel_by_value(project, monkeypatch):
    files = {
        "installed": project.root / ".venv/lib/python3.11/site-packages/installed.py",
        "beside": project.root.parent / f"{project.root.name}-other/beside.py",
        "kinetic.fake": project.root / "kinetic/fake.py",
        "mine.deep": project.root / "src/mine/deep.py",
    }
    for name, file in files.items():
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "strange", object())
    monkeypatch.setitem(sys.modules, "no_file", types.ModuleType("no_file"))
    found = {module.__name__ for module in classify(Shipped()).by_value}
    assert found & {*files, "kinetic", "pytest", "proj_mod"} == {"proj_mod", "mine.deep", "beside"}


def test_looking_for_modules_loads_no_lazy_module(project, monkeypatch):
    spec = importlib.util.spec_from_file_location("lazy_mod", project.root / "lazy_mod.py")
    (project.root / "lazy_mod.py").write_text("raise AssertionError('loaded')")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_mod", module)
    spec.loader.exec_module(module)
    classify(Shipped())


# What comes back has the classes of this side


def test_known_classes_are_left_alone():
    space = in_main("count = [0]\nclass Box:\n    def hit(self): count[0] += 1\nbox = Box()\n")
    before = space["Box"].hit
    (back,) = results.unpack_value(results.pack_value([space["box"]]))
    assert type(back) is space["Box"]
    assert space["Box"].hit is before
    back.hit()
    assert space["count"] == [1]


def test_in_another_process_classes_are_found_by_name(project):
    payload_of = "from kinetic._pickling import call as payload, results\n"
    made = call.pack(
        lambda m: [m.Box(2), m.Color.RED], (project.module,), {}, env_vars={}, shipped=Shipped()
    )
    code = payload_of + "f, a, k = payload.unpack(data); print(results.pack_value(f(*a)).hex())"
    back = bytes.fromhex(elsewhere(code, made.data))
    code = (
        f"sys.path.insert(0, {str(project.root)!r}); import proj_mod\n"
        f"{payload_of}box, red = results.unpack_value(data)\n"
        "print(type(box) is proj_mod.Box, red is proj_mod.Color.RED, box.get())"
    )
    assert elsewhere(code, back) == "True True 6"
    assert (
        elsewhere(
            payload_of
            + "box, red = results.unpack_value(data); print(type(box).__name__, red.name)",
            back,
        )
        == "Box RED"
    )
    box, red = results.unpack_value(back)
    assert (type(box), red) == (project.module.Box, project.module.Color.RED)


def test_dynamic_enums_keep_their_identity():
    space = in_main("import enum\nclass E(enum.Enum):\n    A = 1\n")
    assert results.unpack_value(results.pack_value(space["E"].A)) is space["E"].A
    assert isinstance(space["E"].A, enum.Enum)


# Naming the part that cannot be pickled


class Holder:
    def __init__(self):
        self.inner = {"lock": threading.Lock()}


LOCK = threading.Lock()


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
import threading
client = threading.Lock()
def train(): return client
def outer(): return train()
def defaults(x, y=client): return y
def keyword_only(*, z=client): return z
class Model:
    def fit(self): return client
def build(): return Model()
"""


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("train", "global 'client' used by train"),
        ("outer", "global 'client' used by train"),
        ("defaults", "default of parameter 'y'"),
        ("keyword_only", "default of parameter 'z'"),
        ("build", "global 'client' used by fit"),
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
    while deep:  # Taken apart by hand: the interpreter would recurse.
        deep = deep.pop()


def test_a_reduce_that_raises_is_reported():
    class Bad:
        def __reduce__(self):
            raise OSError("no way")

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


# Failing to rebuild


def test_a_missing_module_is_named(project):
    packed = pack(project.module.times)
    code = (
        "from kinetic._pickling import call as payload\nfrom kinetic.errors import SetupFailed\n"
        "try: payload.unpack(data)\nexcept SetupFailed as e: print(e, type(e.__cause__).__name__)"
    )
    said = elsewhere(code, packed.data)
    assert "'proj_mod' is missing" in said
    assert "cloudpickle" in said
    assert said.endswith("ModuleNotFoundError")


def test_another_python_is_refused_before_unpickling():
    here = envelope.versions_here().python
    data = pack(double, 1).data.replace(f'"python": "{here}"'.encode(), b'"python": "3.7"', 1)
    with pytest.raises(SetupFailed, match=rf"3\.7.*{here}"):
        call.unpack(data)


class Unreadable:
    def __reduce__(self):
        return (sys.exit, (3,))


def test_a_value_that_cannot_be_rebuilt_is_unavailable():
    with pytest.raises(ResultUnavailable, match="SystemExit"):
        results.unpack_value(results.pack_value(Unreadable()))
    with pytest.raises(SetupFailed, match="SystemExit"):
        call.unpack(pack(double, Unreadable()).data)


def test_importing_loads_no_vendor():
    code = (
        "import kinetic._pickling.call\nprint(sorted({'cloudpickle', 'tblib', 'pathspec'} & "
        "set(sys.modules)))"
    )
    assert elsewhere(code, b"") == "[]"


# -- another Python --------------------------------------------------------------------------------


def of_python_2(data: bytes) -> bytes:
    """The same record, as if Python 2.7 had made it."""
    here = f'"python": "{envelope.versions_here().python}"'.encode()
    assert here in data
    return data.replace(here, b'"python": "2.7"', 1)


def test_code_of_another_python_is_refused() -> None:  # it would end the process by a signal
    space = in_main("class Point:\n    def double(self): return 2\nvalue = [Point(), 1]")
    for value in (lambda: 1, space["value"]):
        with pytest.raises(ResultUnavailable, match=r"code of Python 2\.7.*Made with Python 2\.7"):
            results.unpack_value(of_python_2(results.pack_value(value)))
        results.unpack_value(results.pack_value(value))


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
