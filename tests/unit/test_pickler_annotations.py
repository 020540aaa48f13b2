"""Annotations that name what comes later, or what is there for type checkers alone.

From Python 3.14 on they need no quotes for that; before, `from __future__ import annotations` makes
text of all.
"""

from __future__ import annotations

import sys
import typing

import pytest
import script_host
from script_host import sent

from kinetic._pickling.annotations import list_annotated

library = script_host.library

LATE = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
UNKNOWN = (
    f"{LATE}from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nowhere import Thing\n"
)


def test_a_name_for_type_checkers_alone_keeps_nothing_from_being_sent() -> None:
    host = sent(
        f"{UNKNOWN}"
        "def f(x: Thing, n: int = 1) -> list[Thing]:\n    return n + 1\n"
        "class A:\n    x: Thing\n    y: int = 2\n    def f(self, x: Thing) -> Thing: return f(x)\n",
        "f",
        "A",
    )
    f, a = host.value
    assert (f(None, 4), a().f(1), a.y) == (5, 2, 2)
    assert [str(each) for each in f.__annotations__.values()][::2] == ["Thing", "list[Thing]"]
    assert list(a.__annotations__) == ["x", "y"]


def test_classes_that_name_themselves_and_later_ones_have_their_annotations() -> None:
    host = sent(
        f"{LATE}class A:\n    me: A | None\n    b: B\n    def f(self, other: A) -> B: return B()\n"
        "class B:\n    a: A\n"
        "def make():\n    class Local:\n        n: int\n    return Local\n"
        "Local = make()\n",
        "A",
        "B",
        "Local",
    )
    a, b, local = host.value
    assert typing.get_type_hints(a, host.main) == {"me": a | None, "b": b}
    assert typing.get_type_hints(b, host.main) == {"a": a}
    assert typing.get_type_hints(a.f) == {"other": a, "return": b}
    assert typing.get_type_hints(local, host.main) == {"n": int}


def test_annotations_may_name_functions_and_values() -> None:
    host = sent(
        f"{LATE}import dataclasses\nfrom typing import Annotated\nLIMIT = 3\nclass Gt: pass\n"
        "AT_LEAST = Gt()\nweights = bytearray(10)\ndef model(w=bytes(200_000)): pass\n"
        "def describe(text): return text.upper()\n"
        "@dataclasses.dataclass\nclass A:\n    n: Annotated[int, LIMIT, AT_LEAST]\n"
        "class Sized:\n    w: weights\n    m: model\n"
        "def f(x: Annotated[float, describe('x')]): return x\n",
        "A",
        "f",
        "Sized",
    )
    a, f, _ = host.value
    assert typing.get_type_hints(f, include_extras=True) == {"x": typing.Annotated[float, "X"]}
    hint = typing.get_type_hints(a, host.main, include_extras=True)["n"]
    assert typing.get_args(hint)[:2] == (int, 3)
    if LATE:  # Else a function evaluates them, and uses what they name.
        assert not set(host.main) & {"weights", "model"}, "they may only be names of axes"


def test_what_is_registered_may_name_what_comes_later(library) -> None:
    host = sent(
        f"{UNKNOWN}import picklertest_library as lib\n"
        "@lib.register\nclass A:\n    b: B\n    x: Thing\n    me: A\n"
        "@lib.register\nclass B:\n    a: A\n",
        "A",
        library=library,
    )
    assert sorted(library.SEEN) == ["A", "B"]
    (a,) = host.value
    assert list_annotated(a) == {"b", "x", "me"}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the statement `type` is of Python 3.12")
def test_type_aliases_are_sent_with_what_they_stand_for() -> None:
    host = sent(
        "class A: pass\n"
        "type Plain = list[A]\n"
        "type Nested = dict[str, Nested] | A\n"
        "type Pair[T] = tuple[T, T]\n",
        "A",
        "Plain",
        "Nested",
        "Pair",
    )
    a, plain, nested, pair = host.value
    assert (plain.__name__, plain.__value__) == ("Plain", list[a])
    assert nested.__value__ == dict[str, nested] | a
    assert pair.__value__ == tuple[pair.__type_params__ * 2]
    assert pair[int].__args__ == (int,)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters are of Python 3.12")
def test_generic_classes_have_their_bases_and_parameters(library) -> None:
    host = sent(
        "from picklertest_library import Base\n"
        "class Box[T](Base, key=2):\n    def first(self, x: T) -> T: return x\n"
        "class Wrap[**P, R]: pass\n"
        "class Row[*Ts]: pass\n",
        "Box",
        "Wrap",
        "Row",
        library=library,
    )
    box, wrap, row = host.value
    assert library.SEEN == [("Box", ["first"], {"key": 2})]
    assert box().first(3) == 3
    parameters = *wrap.__type_params__, *row.__type_params__
    assert [each.__name__ for each in parameters] == ["P", "R", "Ts"]
