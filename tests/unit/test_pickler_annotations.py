"""Annotations that name later definitions, or names that only type checkers import. They need no
quotes since Python 3.14; `from __future__ import annotations` makes all of them strings."""

from __future__ import annotations

import sys

import pytest
import script_host
from script_host import sent

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
    )
    box, wrap, row = host.value
    assert box().first(3) == 3
    parameters = *wrap.__type_params__, *row.__type_params__
    assert [each.__name__ for each in parameters] == ["P", "R", "Ts"]
