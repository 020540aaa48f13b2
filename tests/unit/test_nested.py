"""Replacing things inside containers: types, identity, aliasing and circles survive; what cannot be
replaced is refused."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kinetic._datasets import nested
from kinetic.errors import UsageError


class Thing:
    """What is looked for."""

    def __init__(self, name: str = "t") -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Thing({self.name})"


class Pair(NamedTuple):
    left: Any
    right: Any


class MyList(list):
    """A list with an attribute, and methods that must not be called."""

    note = ""

    def __setitem__(self, index, value):
        raise AssertionError("the subclass's own methods may do anything")


class MyDict(dict):
    pass


class MyTuple(tuple):
    pass


def swap(value: Any) -> Any:
    found = nested.find(value, Thing)
    return nested.replaced(value, found, lambda thing: f"/{thing.name}", Thing)


def plain(value: Any) -> Any:
    """The same structure, built with what Python has: deepcopy with a replacement, which keeps
    aliasing and circles."""
    memo = {id(thing): f"/{thing.name}" for thing in nested.find(value, Thing).things}
    return copy.deepcopy(value, memo)


leaves = st.one_of(
    st.integers(), st.text(max_size=3), st.builds(Thing, st.sampled_from(["a", "b"]))
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    dicts = st.dictionaries(st.text(max_size=2), inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(deque),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda d: defaultdict(int, d)),
        st.builds(Pair, inner, inner),
        lists.map(lambda items: [*items, *items]),  # the same objects twice
        inner.map(lambda part: {"one": part, "other": part}),
    )


@given(st.recursive(leaves, grown, max_leaves=12))
def test_any_structure_comes_out_with_its_types_and_its_sharing(value):
    got, expected = swap(value), plain(value)
    assert got == expected
    assert shape(got) == shape(expected)


def shape(value: Any) -> list[tuple[str, int]]:
    """Type of each container in the order of a walk, and which of those met before it is the same
    object."""
    seen: dict[int, int] = {}
    out: list[tuple[str, int]] = []
    todo = [value]
    while todo:
        at = todo.pop()
        if not isinstance(at, list | tuple | dict | deque) or at == ():
            continue
        out.append((type(at).__name__, seen.setdefault(id(at), len(seen))))
        if len(out) > 500:
            break
        todo.extend(at.values() if isinstance(at, dict) else at)
    return out


@settings(max_examples=50)
@given(st.recursive(st.integers(), grown, max_leaves=12))
def test_what_holds_none_is_the_very_object(value):
    assert swap(value) is value


def test_parts_that_hold_none_are_the_very_objects_and_the_original_is_untouched():
    thing, rest = Thing(), [1, 2]
    value = {"x": [thing], "rest": rest}
    got = swap(value)
    assert got == {"x": ["/t"], "rest": [1, 2]}
    assert got["rest"] is rest
    assert value == {"x": [thing], "rest": rest}


def test_circles_stay_circles():
    ring: list[Any] = [Thing()]
    ring.append((ring, {"again": ring}))
    got = swap(ring)
    assert got[0] == "/t"
    assert got[1][0] is got
    assert got[1][1]["again"] is got
    assert ring[1][0] is ring


def test_subclasses_keep_their_class_and_attributes():
    mine = MyList([Thing(), 1])
    mine.note = "kept"
    counted = Counter({"a": 2})
    counted["thing"] = Thing()  # type: ignore[assignment]
    got = swap(
        [
            mine,
            MyDict(k=Thing()),
            MyTuple([Thing()]),
            counted,
            defaultdict(list, k=Thing()),
            deque([Thing()], maxlen=3),
        ]
    )
    assert [type(part) for part in got] == [MyList, MyDict, MyTuple, Counter, defaultdict, deque]
    assert (list(got[0]), got[0].note) == (["/t", 1], "kept")
    assert (got[4].default_factory, got[5].maxlen) == (list, 3)
    assert (got[1]["k"], got[2][0], got[3]["thing"], got[4]["k"], got[5][0]) == ("/t",) * 5


def test_one_thing_is_replaced_by_one_object():
    thing = Thing()
    found = nested.find([thing, (thing,)], Thing)
    assert found.things == [thing]
    made = nested.replaced([thing, (thing,)], found, lambda thing: object(), Thing)
    assert made[0] is made[1][0]


def test_deep_lists_do_not_exhaust_the_stack():
    value: Any = Thing()
    for _ in range(50_000):
        value = [value]
    got = swap(value)
    for _ in range(50_000):
        got = got[0]
    assert got == "/t"
    while isinstance(value, list):  # not all at once: freeing it would recurse as well
        value = value[0]


def test_attributes_are_not_looked_into():
    holder = Pair(type("Holder", (), {})(), 1)
    holder.left.thing = Thing()
    assert swap(holder) is holder


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({Thing()}, "a member of a set"),
        ([frozenset({Thing()})], "a member of a set"),
        ({(1, Thing())}, "a member of a set"),
        ({Thing(): 1}, "a key of a dict"),
        ({"k": {(Thing(),): 1}}, "a key of a dict"),
        ([{frozenset({Thing()}): 1}], "a key of a dict"),
    ],
)
def test_where_no_replacement_could_go_it_is_refused(value, told):
    with pytest.raises(UsageError, match=told):
        nested.find(value, Thing)
