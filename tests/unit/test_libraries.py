"""Which large libraries a function uses, read from its code.

In: functions. Out: modules that its hosts may import ahead.
"""

from __future__ import annotations

import functools
import sys
import types

import pytest

from kinetic._client.libraries import list_libraries


def trains():
    import keras

    return keras.Sequential()


def saves():
    import kinetic

    return kinetic.Checkpointer()


def restores():
    from orbax.checkpoint import StandardCheckpointer

    return StandardCheckpointer()


def calls_itself(n):
    return calls_itself(n - 1) and nested()


def nested():
    def inner():
        import flax.linen as nn

        return nn

    return inner


def adds(a, b):
    return a + b


@pytest.mark.parametrize(
    ("func", "found"),
    [
        (trains, ("keras",)),
        (saves, ("orbax.checkpoint",)),
        (restores, ("orbax.checkpoint",)),
        (calls_itself, ("flax",)),
        (lambda: (saves(), trains(), restores()), ("keras", "orbax.checkpoint")),
        (functools.partial(trains), ("keras",)),
        (adds, ()),
        (len, ()),
    ],
)
def test_what_a_function_and_those_that_it_calls_name_is_found(func, found):
    assert list_libraries(func) == found


@pytest.mark.parametrize("what", [None, types.ModuleType("keras")])
def test_a_module_of_the_users_with_that_name_is_not_meant(monkeypatch, what):
    monkeypatch.setitem(sys.modules, "keras", what)
    assert list_libraries(trains) == ()


def test_a_file_of_the_users_with_that_name_is_not_meant(monkeypatch, tmp_path):
    (tmp_path / "keras.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    assert list_libraries(trains) == ()
