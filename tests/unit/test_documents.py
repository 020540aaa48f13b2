"""Values as documents: writing and reading returns an equal value, and errors name the damaged
field."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from enum import StrEnum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic._core import documents
from kinetic._core.values import dataclass
from kinetic.errors import CorruptRecord


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    name: str
    size: float = 1.0


@dataclass(frozen=True)
class Outer(documents.Record, called="The outer record"):
    number: int
    colour: Colour
    inner: Inner
    more: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    named: dict[int, Inner | None] | None = None
    mode: bool | Literal["lazy"] = False
    tags: Any = None


texts = st.text(st.characters())  # With surrogates, because programs may print invalid Unicode.
inners = st.builds(Inner, texts, st.floats(allow_nan=False))
outers = st.builds(
    Outer,
    number=st.integers(),
    colour=st.sampled_from(Colour),
    inner=inners,
    more=st.lists(inners).map(tuple),
    pair=st.tuples(st.integers(), texts),
    named=st.none() | st.dictionaries(st.integers(), st.none() | inners),
    mode=st.sampled_from([True, False, "lazy"]),
    tags=st.none() | st.lists(texts) | st.dictionaries(texts, st.integers()),
)


@given(outers)
def test_what_is_written_is_read_again(value):
    written = json.dumps(documents.to_document(value)).encode()
    assert documents.read(Outer, written, "It") == value
    assert Outer.read(written) == value
    assert Outer.from_json(json.loads(written) | {"of a newer version": 1}) == value
    assert Outer.from_json(json.loads(json.dumps(documents.drop_defaults(value)))) == value


RIGHT = {"number": 1, "colour": "red", "inner": {"name": "a"}}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"number": "1"}, "number is '1', not of type int"),
        ({"number": True}, "number is True, not of type int"),
        ({"number": 1.5}, "number is 1.5, not of type int"),
        ({"colour": "green"}, "colour is 'green'"),
        ({"colour": []}, "colour is []"),
        ({"inner": {}}, "inner has no field 'name'"),
        ({"inner": None}, "inner is None, not an object"),
        ({"more": [{"name": "a"}, {"name": 2}]}, "more[1].name is 2, not of type str"),
        ({"more": {}}, "more is {}, not a list"),
        ({"pair": [1]}, "pair has 1 items, not 2"),
        ({"named": {"x": None}}, "named has a key that is not of type int"),
        ({"named": {"1": {"name": 7}}}, "named.1.name is 7, not of type str"),
        ({"mode": "eager"}, "mode is 'eager'"),
        ({"tags": 1, "number": None}, "number is None"),
    ],
)
def test_the_field_that_is_wrong_is_named(wrong, words):
    with pytest.raises(CorruptRecord) as caught:
        Outer.read(json.dumps(RIGHT | wrong).encode())
    assert str(caught.value).startswith("The outer record is damaged: ")
    assert words in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"7", b"[" * 100_000])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(CorruptRecord, match="It is damaged"):
        documents.read(Outer, text, "It")
    with pytest.raises(CorruptRecord, match="The outer record is damaged"):
        Outer.read(text)


def test_a_whole_number_is_a_float_too():
    assert Outer.from_json(RIGHT | {"inner": {"name": "a", "size": 3}}).inner.size == 3.0


@given(
    st.recursive(
        st.none() | st.integers() | texts, lambda x: st.lists(x) | st.dictionaries(texts, x)
    )
)
def test_no_document_is_read_in_another_way(document):
    """Any document is either read or refused with `CorruptRecord`; no other error is raised."""
    for candidate in (document, RIGHT | {"inner": document}, RIGHT | {"named": document}):
        try:
            value = Outer.from_json(candidate)
        except CorruptRecord:
            continue
        assert isinstance(value, Outer)


@pytest.mark.starts_processes
def test_reading_after_a_ctrl_c_does_not_hide_it_from_the_shell() -> None:
    """A process ends by SIGINT although a thread still reads: `eval` of text would hide that."""
    program = """
import threading
from kinetic._core.documents import from_document
from kinetic._core.outcome import HostReport

over = threading.Event()

def read():
    over.wait()
    from_document(HostReport, {"host": 0, "exit": "returned"}, "The report")
    print("was read", flush=True)

threading.Thread(target=read).start()
threading._register_atexit(over.set)
raise KeyboardInterrupt
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("was read\n", -signal.SIGINT), ended.stderr
