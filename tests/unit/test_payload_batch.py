"""Calls of one function in a batch: the function is stored once, and each call apart. Both records
together give the same call as a single pickle."""

from __future__ import annotations

import io
import pickle
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._pickling import call as payload
from kinetic._pickling import envelope
from kinetic.errors import CorruptRecord, PicklingError

BIG = list(range(50_000))


class Kind:
    pass


def batch_pickler(func, env_vars=None):
    return payload.BatchPickler(func, env_vars=env_vars or {})


def call(func, *args, **kwargs):
    pickler = batch_pickler(func)
    return payload.unpack(pickler.pack(args, kwargs).data, pickler.function.data)


def test_the_function_is_in_one_record_and_the_arguments_in_another():
    def total(extra):
        return len(BIG) + extra

    total.__module__ = "__main__"  # BIG then travels with the function.
    pickler = batch_pickler(total, {"A": "1"})
    records = [pickler.pack((n,), {}) for n in range(3)]
    assert pickler.function.size_bytes > 50_000
    assert all(r.size_bytes < 1_000 for r in records)
    assert envelope.read_header(records[0].data).env_vars == {"A": "1"}
    for n, record in enumerate(records):
        func, args, kwargs = payload.unpack(record.data, pickler.function.data)
        assert (func(*args), kwargs) == (50_000 + n, {})


def test_function_and_arguments_share_what_they_share_in_one_pickle():
    shared = [1]

    def probe(value, kind):
        return value is shared, kind is Kind

    probe.__module__ = "__main__"
    func, args, kwargs = call(probe, shared, kind=Kind)
    assert func(*args, **kwargs) == (True, True)


def test_a_function_that_was_loaded_before_shares_the_same_with_its_arguments():
    """A kept process rebuilds the function once. Later calls refer to objects of its record, and
    their own objects do not stay."""
    shared = [1]

    def probe(value, kind, *others, word):
        return value is shared, kind is Kind, others[0] is others[1], word

    probe.__module__ = "__main__"
    pickler, loaded, functions = batch_pickler(probe), {}, []
    for number in range(3):
        other = [number]
        record = pickler.pack((shared, Kind, other, other), {"word": "shared"})
        func, args, kwargs = payload.unpack(record.data, pickler.function.data, loaded=loaded)
        assert func(*args, **kwargs) == (True, True, True, "shared")
        assert args[2] == [number]
        functions.append(func)
    assert functions[0] is functions[1] is functions[2]
    assert len(loaded) == 1
    (function,) = loaded.values()
    assert not any(value == [2] for value in function.memo)


def test_calls_do_not_see_each_others_arguments():
    pickler = batch_pickler(print)
    first, second = [1], [2]
    pickler.pack((first, second), {})
    _, args, _ = payload.unpack(pickler.pack((second, second), {}).data, pickler.function.data)
    assert args == ([2], [2])
    assert args[0] is args[1]


@given(
    st.lists(
        st.recursive(
            st.integers() | st.text() | st.binary(max_size=20),
            lambda x: st.lists(x) | st.dictionaries(st.text(), x),
        )
    )
)
@settings(max_examples=50, deadline=None)
def test_a_call_that_cannot_be_pickled_does_not_spoil_the_next(values):
    pickler = batch_pickler(print)
    for value in values:
        with pytest.raises(PicklingError, match="rgument 1"):
            pickler.pack((threading.Lock(), value), {})
        assert payload.unpack(pickler.pack((value,), {"v": value}).data, pickler.function.data) == (
            print,
            (value,),
            {"v": value},
        )


def test_what_a_function_uses_is_named_when_it_cannot_travel():
    lock = threading.Lock()

    def held():
        return lock

    held.__module__ = "__main__"
    with pytest.raises(PicklingError, match="lock"):
        batch_pickler(held)


@pytest.mark.parametrize("other", [b"", b"x", b"{}\n"])
def test_the_wrong_function_is_refused(other):
    pickler = batch_pickler(print)
    with pytest.raises(CorruptRecord, match="function is damaged"):
        payload.unpack(pickler.pack((), {}).data, other)


def test_a_damaged_call_is_refused():
    pickler = batch_pickler(print)
    data = bytearray(pickler.pack((1,), {}).data)
    data[-3] ^= 1
    with pytest.raises(CorruptRecord):
        payload.unpack(bytes(data), pickler.function.data)


def test_a_call_of_its_own_needs_no_other_record():
    packed = payload.pack(print, (1,), {}, env_vars={})
    assert payload.unpack(packed.data) == (print, (1,), {})
    body = io.BytesIO(packed.data[envelope.read_header(packed.data).body_offset :])
    reader = pickle.Unpickler(body)
    registered, called = reader.load(), reader.load()
    assert (registered[0], called) == ((None, None), (print, (1,), {}))
