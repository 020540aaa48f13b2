"""Pickling calls and values, and rebuilding them."""

from __future__ import annotations

import enum
import importlib
import json
import sys
import threading
import types

import cloudpickle
import payload_cases
import pytest
from hypothesis import given
from hypothesis import strategies as st
from payload_cases import double, elsewhere, in_main

from kinetic._pickling import call, envelope, results
from kinetic._pickling.modules import Shipped, classify
from kinetic.errors import (
    CorruptRecord,
    PicklingError,
    UnsupportedVersion,
)

project = payload_cases.project


def test_a_call_comes_back():
    packed = call.pack(double, (4,), {}, env_vars={"A": "1"})
    func, args, kwargs = call.unpack(packed.data)
    assert func(*args, **kwargs) == 8
    assert packed.size_bytes == len(packed.data)
    assert packed.versions == envelope.read_versions()


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

    func, (copy,), kwargs = call.unpack(call.pack(add, (shared,), {"k": shared}, env_vars={}).data)
    func()
    assert copy == [1]
    assert kwargs["k"] is copy


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
    message = str(caught.value)
    assert message.startswith(
        "The returned value (dict) cannot be pickled: its part ['locks'][0] is a lock. Return the "
        "data that it was made from"
    )
    with pytest.raises(
        PicklingError,
        match=r"^The returned value \(generator\) cannot be pickled. Make a list of it",
    ):
        results.pack_value(x for x in [1])


def test_a_value_that_memory_has_no_room_for_is_called_so():
    class Large:
        def __reduce__(self):
            raise MemoryError

    with pytest.raises(
        PicklingError, match=r"its part \['w'\] is a Large. Memory ran out"
    ) as caught:
        results.pack_value({"w": Large()})
    assert isinstance(caught.value.__cause__, MemoryError)


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
    | st.binary(max_size=20).map(lambda b: b'{"schema": 3}\n' + b)
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
    with pytest.raises(CorruptRecord, match="has a record of the kind 'value' in its place"):
        call.unpack(data)


def test_a_newer_schema_is_refused():
    data = results.pack_value(1).replace(b'"schema": 3', b'"schema": 9', 1)
    with pytest.raises(UnsupportedVersion, match="by another version of kinetic"):
        results.unpack_value(data)


@pytest.mark.starts_processes
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
    names = {module.__name__ for module in classify(Shipped()).by_value}
    assert names & {*files, "kinetic", "pytest", "proj_mod"} == {"proj_mod", "mine.deep", "beside"}


def test_looking_for_modules_loads_no_lazy_module(project, monkeypatch):
    spec = importlib.util.spec_from_file_location("lazy_mod", project.root / "lazy_mod.py")
    (project.root / "lazy_mod.py").write_text("raise AssertionError('loaded')")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "lazy_mod", module)
    spec.loader.exec_module(module)
    classify(Shipped())


def test_known_classes_are_left_alone():
    space = in_main("count = [0]\nclass Box:\n    def hit(self): count[0] += 1\nbox = Box()\n")
    before = space["Box"].hit
    (back,) = results.unpack_value(results.pack_value([space["box"]]))
    assert type(back) is space["Box"]
    assert space["Box"].hit is before
    back.hit()
    assert space["count"] == [1]


def test_known_functions_come_back_as_themselves(monkeypatch):
    """A returned function of the script is the caller's own function object. It is a copy only if
    it has state that the host may have changed."""
    main = sys.modules["__main__"]
    space = in_main(
        "import math\ncount = 0\ndef relu(x, least=0): return max(x, math.floor(least))\n"
        "def twice(x): return relu(relu(x))\n"
        "def hit():\n    global count; count += 1; return count\n"
        "def hit_twice(): return hit() + hit()\n"
        "def grow(to=[]): to.append(1); return to\n"
        "class Box:\n    def get(self): return 1\nheld = [Box.get, lambda: 2]\n"
        "def make():\n    def relu(): return 3\n    return relu\nheld.append(make())\n"
    )
    for name in ("relu", "twice", "hit", "hit_twice", "grow"):
        monkeypatch.setattr(main, name, space[name], raising=False)
    relu, twice, hit_twice, grow, get, *others = results.unpack_value(
        results.pack_value(
            [space[n] for n in ("relu", "twice", "hit_twice", "grow")] + space["held"]
        )
    )
    assert (relu, twice) == (space["relu"], space["twice"])
    assert (hit_twice(), space["count"], grow(), space["grow"]()) == (3, 0, [1], [1])
    assert [get(None), *(each() for each in others)] == [1, 2, 3]
    monkeypatch.setattr(main, "relu", in_main("def relu(x): return 4")["relu"])
    back = results.unpack_value(results.pack_value(space["relu"]))
    assert back not in (space["relu"], main.relu)


def test_a_class_that_cannot_be_sent_is_named(monkeypatch):
    """A ctypes structure can be sent by name only: `__main__` must have it on both sides."""
    text = "import ctypes\nclass Pair(ctypes.Structure):\n    _fields_ = [('x', ctypes.c_int)]\n"
    space = in_main(f"{text}pair = Pair(7)")
    with pytest.raises(PicklingError, match="CField"):
        results.pack_value(space["pair"])
    monkeypatch.setattr(sys.modules["__main__"], "Pair", space["Pair"], raising=False)
    back = results.unpack_value(results.pack_value([space["pair"]]))
    assert (type(back[0]), back[0].x) == (space["Pair"], 7)


@pytest.mark.starts_processes
def test_in_another_process_classes_are_found_by_name(project):
    payload_of = "from kinetic._pickling import call as payload, results\n"
    packed = call.pack(
        lambda m: [m.Box(2), m.Color.RED], (project.module,), {}, env_vars={}, shipped=Shipped()
    )
    code = payload_of + "f, a, k = payload.unpack(data); print(results.pack_value(f(*a)).hex())"
    back = bytes.fromhex(elsewhere(code, packed.data))
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


SAME_NAMES = """
from kinetic._pickling import results

class Config: pass
class Model:
    class Config: pass
def make():
    class Config: pass
    return Config()
"""


@pytest.mark.starts_processes
def test_classes_of_one_name_are_told_apart():
    packed = elsewhere(
        f"{SAME_NAMES}print(results.pack_value([Config(), Model.Config(), make()]).hex())", b""
    )
    looks = "[type(each) in (Config, Model.Config) for each in found], type(found[2]).__qualname__"
    output = elsewhere(
        f"{SAME_NAMES}found = results.unpack_value(data)\n"
        f"print(type(found[0]) is Config, type(found[1]) is Model.Config, {looks})",
        bytes.fromhex(packed),
    )
    assert output == "True True [True, True, False] make.<locals>.Config"


def test_dynamic_enums_keep_their_identity():
    space = in_main("import enum\nclass E(enum.Enum):\n    A = 1\n")
    assert results.unpack_value(results.pack_value(space["E"].A)) is space["E"].A
    assert isinstance(space["E"].A, enum.Enum)
