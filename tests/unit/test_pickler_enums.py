"""Enumerations that a script defines: rebuilt on hosts, with members that come back in results."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest
from cloudpickle import cloudpickle
from script_host import sent

from kinetic._pickling import results

SCRIPT = """
import dataclasses, enum, random
from datetime import date
@dataclasses.dataclass
class Spec:
    size: str
    legs: int = 4
class Creature(Spec, enum.Enum):
    BEETLE = "small", 6
    DOG = "big"
class Plain:
    def __init__(self, of): self.of = of
class Held(Plain, enum.Enum): A = 3
class Perm(enum.Flag): R = 4; W = 2; RW = 6
class Kept(enum.Flag, boundary=enum.KEEP): X = 3
class Bits(enum.IntFlag): A = 1; B = 2; AB = 3; NONE = 0
class Color(enum.Enum): RED = 1; ROUGE = 1
class Level(enum.IntEnum): LOW = random.getrandbits(40); HIGH = enum.auto(); SAME = LOW
class Word(enum.StrEnum): A = enum.auto()
class Day(date, enum.Enum): FIRST = 2026, 1, 2
class Pair(tuple, enum.Enum): A = (1, 2)
class Lists(enum.Enum): A = [1]; B = [1]
class Doubled(float, enum.Enum):
    def __new__(cls, v): o = float.__new__(cls, 2 * v); o._value_ = v; return o
    A = 1.5
class Labelled(str, enum.Enum):
    def __new__(cls, v, label):
        o = str.__new__(cls, v.upper()); o._value_ = v; o.label = label; return o
class Named(Labelled): X = "x", "ex"
class Planet(enum.Enum):
    EARTH = (5.9e24, 6.3e6)
    def __init__(self, mass, radius): self.mass = mass; self.drawn = random.random()
    @property
    def twin(self): return Planet.EARTH
    @property
    def value(self): return "other"
Planet.EARTH.near = [Planet.EARTH]
class Meta(enum.EnumMeta):
    def __contains__(cls, value): return value == "x"
class Odd(enum.Enum, metaclass=Meta):
    __slots__ = ()
    A = 1
@enum.verify(enum.UNIQUE)
class Drawn(enum.Enum): A = random.random()
Made = enum.Enum("Made", "A B")
def nested():
    class Inner(float, enum.Enum):
        def __new__(cls, v): o = float.__new__(cls, -v); o._value_ = v; return o
        A = 1.0
    return Inner
Inner = nested()
"""
NAMES = [*re.findall(r"^class (\w+)\((?!enum.EnumMeta)", SCRIPT, re.MULTILINE), "Made"]


def describe(enumeration: Any) -> Any:
    """Return all that can be observed of an enumeration, for comparing a copy with its original."""
    attributes = ("legs", "of", "label", "mass", "drawn", "year")
    return [
        (
            name,
            each.name,
            repr(each._value_),
            [getattr(each, attribute, None) for attribute in attributes],
            getattr(enumeration._member_type_, "__repr__", repr)(each)
            if enumeration._member_type_ in (int, str, float, tuple)
            else "",
        )
        for name, each in enumeration.__members__.items()
    ]


@pytest.mark.parametrize("name", [*NAMES, "Inner"])
def test_an_enumeration_is_as_it_was(name: str) -> None:
    host = sent(SCRIPT, name)
    original, received = host.here[name], host.value[0]
    assert original is not received
    strip = " at 0x"
    received_text, original_text = (
        repr(describe(each)).split(strip)[0] for each in (received, original)
    )
    assert received_text == original_text
    assert [each.name for each in received] == [each.name for each in original]
    assert type(received).__name__ == type(original).__name__


def test_members_work_as_they_did() -> None:
    host = sent(SCRIPT, "Perm", "Bits", "Named", "Planet", "Odd", "Doubled")
    perm, bits, named, planet, odd, doubled = host.value
    assert (perm.R | perm.W, ~perm.R, perm(6).name) == (perm.RW, perm.W, "RW")
    assert (bits.A | 8, bits(3)) == (9, bits.AB)
    assert (named("x"), named.X) == (named.X, "X")
    assert planet.EARTH.near == [planet.EARTH.twin]
    assert "x" in odd
    assert doubled(1.5) is doubled.A
    with pytest.raises(ValueError, match="not a valid"):
        doubled(3.0)


def test_members_that_come_back_are_those_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    host = sent(SCRIPT, *NAMES)
    back = [results._dumps(list(enumeration.__members__.values())) for enumeration in host.value]
    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()  # Forget class ids, as in another process.
    main = types.ModuleType("__main__")
    vars(main).update(host.here)
    monkeypatch.setitem(sys.modules, "__main__", main)
    earth = dict(vars(host.here["Planet"].EARTH))
    for data, name in zip(back, NAMES, strict=True):
        members = results._loads(data)
        assert all(
            one is other
            for one, other in zip(members, host.here[name].__members__.values(), strict=True)
        )
    assert vars(host.here["Planet"].EARTH) == earth
