"""The parts of a call that make it large when it is pickled, largest first."""

from __future__ import annotations

import functools
import threading

import pytest

from kinetic._pickling import call, diagnosis, results

data = b"g" * 40_000


def helper():
    return len(data)


def uses_helper(first, second=b"d" * 30_000):
    return helper()


def closing_over(captured):
    return lambda: captured


def named(func, *args, **kwargs):
    parts = call.pack(func, args, kwargs, env_vars={}).parts()
    return [(name, size // 1000) for name, size in parts if size > 1000]


def test_each_part_by_name_largest_first(monkeypatch):
    monkeypatch.setattr(helper, "__module__", "__main__")
    monkeypatch.setattr(uses_helper, "__module__", "__main__")
    sizes = named(uses_helper, b"x" * 20_000, second=[b"y" * 50_000])
    assert sizes == [
        ("keyword 'second' (list)", 50),
        ("global 'data' used by helper", 40),
        ("default of parameter 'second'", 30),
        ("argument 1 (bytes)", 20),
    ]


def test_closure_variables_and_partials():
    assert named(closing_over(b"c" * 10_000)) == [("closure variable 'captured' of <lambda>", 10)]
    assert named(functools.partial(len, b"p" * 10_000)) == [("argument 1 of the partial", 10)]


def test_a_part_that_cannot_be_measured_alone_counts_for_nothing():
    class Odd:
        def __reduce__(self):
            return bytes, ()

    assert named(len, Odd()) == []


def test_an_array_that_is_spread_over_hosts():
    class ArrayImpl:
        def __reduce__(self):
            raise RuntimeError(
                "Fetching value for `jax.Array` that spans non-addressable (non process local) "
                "devices is not possible."
            )

    with pytest.raises(
        diagnosis.PicklingError,
        match=r"return multihost_utils.process_allgather\(value, tiled=True\)",
    ) as caught:
        results.pack_value({"w": ArrayImpl()})
    assert "its part ['w'] is an ArrayImpl" in str(caught.value)


def test_a_keras_model_whose_weights_are_sharded_over_hosts():
    class Sequential:
        _unpickle_model = None

        def __init__(self):
            self.lock = threading.Lock()  # Keras does not pickle attributes.

        def __reduce__(self):
            raise RuntimeError("Fetching value for `jax.Array` that spans non-addressable devices")

    with pytest.raises(diagnosis.PicklingError) as caught:
        results.pack_value({"model": Sequential()})
    assert "its part ['model'] is a Sequential. It has arrays that are" in str(caught.value)
    assert "[w.value for w in model.weights]" in str(caught.value)
