"""Exceptions that a function raises on a host and the caller gets."""

from __future__ import annotations

import dataclasses
import email.message
import subprocess
import sys
import threading
import traceback
import types
import urllib.error

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._host.worker import report
from kinetic._pickling import envelope, results
from kinetic.errors import CorruptRecord, PicklingError, UserCodeFailed


def there_and_back(error: BaseException, **kwargs) -> BaseException:
    return results.unpack_exception(results.pack_exception(error, **kwargs))


def caught(function, *args) -> BaseException:
    try:
        function(*args)
    except BaseException as error:
        return error
    raise AssertionError("did not raise")


def formatted(error):
    """Format an exception with its traceback, as users see it."""
    return "".join(traceback.format_exception(error)).splitlines()


def test_an_exception_with_a_thousand_causes():
    def chain():
        error = None
        for number in range(1000):
            try:
                raise ValueError(number) from error
            except ValueError as caught:
                error = caught
        raise error

    error = caught(chain)
    assert report.traceback_of(error).endswith("ValueError: 999\n")
    back = there_and_back(error)
    assert (type(back), back.args) == (ValueError, (999,))
    assert back.__cause__.args == (998,)


class NeedsTwo(Exception):
    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


class EditsMessage(Exception):
    def __init__(self, text):
        super().__init__(f"Error: {text}")


class KeywordOnly(ValueError):
    def __init__(self, *, reason):
        super().__init__()
        self.reason = reason

    def __str__(self):
        return f"because {self.reason}"


class OddOS(OSError):
    def __init__(self, number, text, extra):
        super().__init__(number, text)
        self.extra = extra


class OddNew(Exception):
    def __new__(cls, a, b, c):
        return super().__new__(cls, a)

    def __init__(self, a, b, c):
        super().__init__(a)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Slots(Exception):
    __slots__ = ("__private", "number", "unset")

    def __init__(self, number):
        super().__init__("msg")
        self.number = self.__private = number


class MoreSlots(Slots):
    __slots__ = ("parts",)

    def __init__(self, number=0, *, parts=()):
        super().__init__(number)
        self.parts = list(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots(Exception):
    code: int


class EditsArgument(Exception):
    def __init__(self, name, hint="none"):
        super().__init__(hint)
        self.name = name

    def __str__(self):
        return self.name


class NoFields(OSError):
    def __init__(self, url, code, text):
        self.filename = url


def slots_of(error):
    names = [name for cls in type(error).__mro__ for name in vars(cls).get("__slots__", ())]
    mangled = [f"_Slots{name}" if name.startswith("__") else name for name in names]
    return {name: getattr(error, name, "unset") for name in mangled}


@pytest.mark.parametrize(
    "error", [Slots(3), Slots(3.5), Slots([1]), MoreSlots(4, parts="ab"), FrozenSlots(5)], ids=repr
)
def test_slots_survive(error):
    back = there_and_back(error)
    assert type(back) is type(error)
    assert slots_of(back) == slots_of(error)
    assert (back.args, str(back), vars(back)) == (error.args, str(error), vars(error))


def test_a_slot_that_cannot_be_pickled_is_named():
    back = there_and_back(MoreSlots(threading.Lock(), parts="a"))
    assert back.parts == ["a"]
    assert not hasattr(back, "number")
    assert back.__notes__ == ["Attributes that could not be pickled: _Slots__private, number."]


def test_fields_that_a_constructor_sets_otherwise_survive():
    exits = SystemExit(1)
    exits.code = 4
    assert there_and_back(exits).code == 4
    http = urllib.error.HTTPError("http://x", 404, "gone", email.message.Message(), None)
    for error in (http, NoFields("u", 2, "t")):
        back = there_and_back(error)
        fields = [(e.filename, e.errno, e.args, str(e)) for e in (back, error)]
        assert fields[0] == fields[1]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain", 2),
        KeyError("k"),
        OSError(2, "No such file", "/a/b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(5),
        AttributeError("x", name="a", obj=None),
        ImportError("x", name="n", path="p"),
        SyntaxError("bad", ("f.py", 1, 2, "text", 1, 3)),
        NeedsTwo(4, "four"),
        EditsMessage("x"),
        EditsArgument("n", hint="h"),
        KeywordOnly(reason="so"),
        OddOS(5, "io", "more"),
        OddNew(1, 2, 3),
        Frozen(3),
        subprocess.CalledProcessError(1, ["x"], output=b"o"),
        ModuleNotFoundError("No module named 'x'", name="x"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_type_text_and_attributes_survive(error):
    back = there_and_back(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args
    assert vars(back) == vars(error)


def test_an_exception_of_another_language_comes_back_by_its_own_constructor():
    """pydantic's exception, implemented in Rust, has no `args`, and `__new__` cannot create it."""
    pydantic = pytest.importorskip("pydantic")
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(int).validate_python("y")
    assert caught.value.args == ()
    back = there_and_back(caught.value)
    assert type(back) is pydantic.ValidationError
    assert str(back) == str(caught.value)
    assert back.errors() == caught.value.errors()


def test_fields_of_builtins_survive():
    back = there_and_back(OddOS(5, "io", "more"))
    assert (back.errno, back.strerror, back.extra) == (5, "io", "more")
    assert there_and_back(OSError(2, "No", "/a")).filename == "/a"
    assert there_and_back(SystemExit(3)).code == 3


def raiser(depth):
    if depth:
        raiser(depth - 1)
    raise ValueError("deep")


def test_frames_are_real():
    back = there_and_back(caught(raiser, 2))
    frames = traceback.extract_tb(back.__traceback__)
    assert [frame.name for frame in frames] == ["caught", "raiser", "raiser", "raiser"]
    assert {frame.filename for frame in frames} == {__file__}
    assert 'raise ValueError("deep")' in "".join(traceback.format_exception(back))


def test_file_names_are_mapped():
    folder = __file__.rsplit("/", 1)[0]
    back = there_and_back(caught(raiser, 0), source_map=(folder, "/client/tests"))
    assert {f.filename for f in traceback.extract_tb(back.__traceback__)} == {
        "/client/tests/" + __file__.rsplit("/", 1)[1]
    }


def endless():
    endless()


def test_an_endless_recursion_comes_back_short():
    back = there_and_back(caught(endless))
    assert type(back) is RecursionError
    assert 100 < len(traceback.extract_tb(back.__traceback__)) <= 200


def chain():
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise NeedsTwo(1, "second") from error
    except NeedsTwo:
        raise RuntimeError("third")  # noqa: B904


def test_causes_contexts_and_notes_survive():
    error = caught(chain)
    error.add_note("a note")
    error.__context__.add_note("inner note")
    back = there_and_back(error)
    assert formatted(back) == formatted(error)
    assert type(back.__context__) is NeedsTwo
    assert type(back.__context__.__cause__) is KeyError
    assert back.__notes__ == ["a note"]


def test_from_none_stays_suppressed():
    def hide():
        try:
            raise KeyError("k")
        except KeyError:
            raise ValueError("v") from None

    back = there_and_back(caught(hide))
    assert back.__suppress_context__ is True
    assert type(back.__context__) is KeyError


def test_cycles_survive():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    back = there_and_back(one)
    assert back.__cause__.__cause__ is back


def test_a_long_chain_is_cut():
    error = ValueError(0)
    for number in range(1, 3000):
        second = ValueError(number)
        second.__context__, error = error, second
    back = there_and_back(error)
    length = 0
    while back is not None:
        back, length = back.__context__, length + 1
    assert length == 200


class OwnGroup(ExceptionGroup):
    def derive(self, excs):
        return OwnGroup(self.message, excs)


@pytest.mark.parametrize("cls", [ExceptionGroup, OwnGroup])
def test_groups_survive(cls):
    inner = cls("inner", [NeedsTwo(1, "x"), caught(raiser, 1)])
    error = cls("outer", [inner, KeyError("k")])
    error.add_note("n")
    back = there_and_back(error)
    assert type(back) is cls
    assert formatted(back) == formatted(error)
    assert back.exceptions[0].exceptions[0].code == 1


def test_base_groups_survive():
    back = there_and_back(BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError("v")]))
    assert type(back) is BaseExceptionGroup
    assert type(back.exceptions[0]) is KeyboardInterrupt


def test_what_cannot_travel_is_left_behind_by_name():
    error = ValueError("text", threading.Lock())
    error.lock, error.fine = threading.Lock(), 1
    back = there_and_back(error)
    assert type(back) is ValueError
    assert back.args[0] == "text"
    assert "lock" in back.args[1]
    assert back.fine == 1
    assert not hasattr(back, "lock")
    assert any("lock" in note for note in back.__notes__)


def unpicklable_class(base=Exception):
    class Bad(base):
        lock = threading.Lock()

    return Bad


def test_a_class_that_cannot_travel_is_an_error_at_the_root_and_text_below():
    with pytest.raises(PicklingError, match="Bad"):
        results.pack_exception(unpicklable_class()("x"))
    error = ValueError("outer")
    error.__cause__ = unpicklable_class()("inner text")
    back = there_and_back(error)
    assert type(back.__cause__) is UserCodeFailed
    assert "inner text" in str(back.__cause__)


def test_a_str_that_raises_does_no_harm():
    class Mute(Exception):
        def __str__(self):
            raise OSError("mute")

    assert type(there_and_back(Mute("x"))).__name__ == "Mute"


def test_what_a_decorated_function_lacks_in_a_job_is_explained():
    def decorated():
        pass

    decorated.run_async = None  # A decorated function that was unpickled.
    for name in ("options", "map", "plan"):
        with pytest.raises(AttributeError) as caught:
            getattr(decorated, name)
        report.explain(caught.value)
        assert "in a job it is the plain function" in caught.value.__notes__[0]
    with pytest.raises(AttributeError) as caught:
        getattr(report.explain, "options")  # noqa: B009
    report.explain(caught.value)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("error", "imported", "is_told"),
    [
        (
            AssertionError(
                "<class 'A'> passed to device_put is not the same on each process. Make"
            ),
            True,
            True,
        ),
        (ValueError("then set `distribution.auto_shard_dataset = False`."), True, True),
        (ValueError("another one"), True, False),
        (ValueError("auto_shard_dataset"), False, False),
    ],
)
def test_what_keras_needs_on_several_hosts_is_told(monkeypatch, error, imported, is_told):
    if imported:
        monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    else:
        monkeypatch.delitem(sys.modules, "keras", raising=False)
    report.explain(error)
    notes = "\n".join(getattr(error, "__notes__", ()))
    lines = ("keras.utils.set_random_seed(0)", "auto_shard_dataset=False", 'controller="single"')
    assert all((line in notes) == is_told for line in lines)


class NoModel(Exception):
    """An exception that, like a Keras model, runs code when it is pickled."""

    def __reduce__(self):
        assert sys.modules["keras"].distribution.distribution() is None
        return NoModel, self.args


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_packed_without_the_distribution_of_keras(monkeypatch, fails):
    """Otherwise Keras creates variables, a collective, and other hosts create none."""
    current = ["DataParallel"]
    fake = types.SimpleNamespace(distribution=lambda: current[-1], set_distribution=current.append)
    monkeypatch.setitem(sys.modules, "keras", types.SimpleNamespace(distribution=fake))
    model = NoModel("m")
    if fails:
        with pytest.raises(PicklingError, match=r"its part \[1\] is a lock"):
            results.pack_value([model, threading.Lock()])
    else:
        assert results.unpack_value(results.pack_value([model]))[0].args == ("m",)
    assert current == ["DataParallel", None, "DataParallel"]
    error = ValueError("has a model")
    error.model = model
    assert there_and_back(error).model.args == ("m",)
    assert current[3:] == [None, "DataParallel"]


@pytest.mark.starts_processes
def test_a_class_unknown_here_is_told_as_text(tmp_path):
    (tmp_path / "only_there.py").write_text("class Gone(Exception): pass")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import only_there\n"
        "from kinetic._pickling import results\n"
        "e = only_there.Gone('what happened'); c = ValueError('v'); c.__cause__ = e\n"
        "print(results.pack_exception(e).hex(), results.pack_exception(c).hex())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    root, below = (bytes.fromhex(each) for each in done.stdout.split())
    with pytest.raises(UserCodeFailed, match=r"only_there\.Gone: what happened") as error:
        results.unpack_exception(root)
    assert isinstance(error.value.__cause__, ModuleNotFoundError)
    back = results.unpack_exception(below)
    assert type(back) is ValueError
    assert "what happened" in str(back.__cause__)


@given(data=st.data())
def test_any_damaged_byte_is_seen(data):
    whole = bytearray(results.pack_exception(ValueError("x")))
    at = data.draw(st.integers(envelope.read_header(bytes(whole)).body_offset, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptRecord):
        results.unpack_exception(bytes(whole))


def test_what_a_server_has_refused_comes_back_without_the_connection():
    import io
    import urllib.error

    def refuse():
        class Connection(io.BytesIO):
            def __reduce__(self):
                raise TypeError("a connection stays here")

        answer = Connection(b"no such model")
        raise urllib.error.HTTPError("http://x/y", 404, "Not Found", {"A": "b"}, answer)

    error = caught(refuse)
    error.add_note("a note")
    back = there_and_back(error)
    assert (back.code, back.reason, back.headers, back.url) == (
        404,
        "Not Found",
        {"A": "b"},
        "http://x/y",
    )
    assert (back.read(), str(back)) == (b"", "HTTP Error 404: Not Found")
    assert (back.__notes__, hasattr(back, "absent")) == (["a note"], False)


def test_an_exception_that_interrupts_its_own_pickling_is_told_as_text():
    class Stubborn(Exception):
        def __reduce__(self):
            raise KeyboardInterrupt

    back = there_and_back(caught(lambda: (_ for _ in ()).throw(Stubborn("no"))))
    assert str(back) == "no"


def test_a_bare_assertion_says_what_it_compared(tmp_path):
    text = "def fail(total, rows, other=min):\n    assert other and total == len(rows)\n"
    (tmp_path / "plain.py").write_text(text)  # Not in this file: pytest rewrites its asserts.
    space = {}
    exec(compile(text, str(tmp_path / "plain.py"), "exec"), space)
    error = caught(space["fail"], 3, [1, "a" * 1000])
    report.explain(error)
    (note,) = error.__notes__
    assert note.startswith(
        "assert other and total == len(rows), with other = <built-in function min>"
    )
    assert "total = 3, rows = [1, 'aaa" in note
    assert len(note) < 200
    for quiet in (caught(int, "x"), AssertionError("said")):
        report.explain(quiet)
        assert not hasattr(quiet, "__notes__")
