"""Classes of a script that are defined again on hosts, or rebuilt from their parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_copy_cases import lines, run

pytestmark = [pytest.mark.timeout(300)]

REGISTRY = """
KINDS = []
def register(cls):
    KINDS.append(cls)
    return cls
"""


def test_a_class_that_is_defined_again_has_the_defaults_and_the_fields_that_it_had(
    tmp_path: Path,
) -> None:
    main = """
from __future__ import annotations
import dataclasses, threading
from dataclasses import KW_ONLY, InitVar
from typing import ClassVar
import kinetic, lib

WIDTH = 64
lock = threading.Lock()

@lib.register
@dataclasses.dataclass
class Layer:
    tag: ClassVar[int] = 7
    width: int = WIDTH
    shape: tuple = (WIDTH, 1)
    seed: InitVar[int] = WIDTH
    _: KW_ONLY
    bias: Layer | None = None
    axes: "tuple[lock, 'lock']" = ()
    def grow(self, by=WIDTH, *, more=WIDTH): return self.width + by + more
    @classmethod
    def make(cls, width=WIDTH): return cls(width)

@dataclasses.dataclass
class Plain:
    a: int
    b: int = 1

WIDTH = 128

@kinetic.run(accelerator="cpu")
def look():
    fields = [(each.name, each.default) for each in dataclasses.fields(Layer)]
    needed = [each.default is dataclasses.MISSING for each in dataclasses.fields(Plain)]
    return fields, Layer().grow(), Layer.make(), Layer(1).shape, Layer in lib.KINDS, needed

print(look() == look.local(), look())
"""
    files = {"main.py": main, "lib.py": REGISTRY}
    (line,) = lines(run(tmp_path, files))
    fields = [("width", 64), ("shape", (64, 1)), ("bias", None), ("axes", ())]
    assert line.startswith(f"True ({fields}, 192, Layer(")
    assert line.endswith("(64, 1), True, [True, False])")


def test_objects_of_a_class_that_was_defined_anew_are_registered(tmp_path: Path) -> None:
    define = """
@lib.register
@dataclasses.dataclass
class Point:
    x: int
    def double(self): return Point(2 * self.x)
"""
    main = f"""
import dataclasses, kinetic, lib
{define}
old = Point(1)
{define}
new = Point(2)

@kinetic.run(accelerator="cpu")
def look(old, new):
    kinds = type(old), type(new)
    return [kind in lib.KINDS for kind in kinds], kinds[1] is Point, kinds[0] is Point, old.double()

print(look(old, new))
"""
    files = {"main.py": main, "lib.py": REGISTRY}
    assert lines(run(tmp_path, files)) == ["([True, True], True, False, Point(x=2))"]


def test_kinds_of_classes_come_and_go_as_they_are(tmp_path: Path) -> None:
    main = """
import abc, dataclasses, enum, functools
from typing import Generic, NamedTuple, TypedDict, TypeVar
import kinetic

T = TypeVar("T")

class Pair(NamedTuple, Generic[T]):
    x: T
    y: int = 2

class Options(TypedDict, total=False):
    lr: float

class Base(abc.ABC):
    made = []
    def __init_subclass__(cls, **more):
        super().__init_subclass__(**more)
        Base.made.append(cls.__name__)

class Child(Base, Generic[T]):
    @functools.cached_property
    def size(self): return 4

class Color(enum.Flag):
    R = 1
    G = 2

@dataclasses.dataclass(slots=True, frozen=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)

@kinetic.run(accelerator="cpu")
def look(*things):
    return *things, Pair[int](3), Child().size, Color(3), Point(1), Options(lr=1.0)

things = Pair("x"), Child(), Color.R, Point(5), Options(lr=2.0)
here, there = look.local(*things), look(*things)
print(*[type(a) is type(b) for a, b in zip(here, there)], Base.made, there[4:])
"""
    known = (
        "['Child'] ({'lr': 2.0}, Pair(x=3, y=2), 4, <Color.R|G: 3>, Point(x=1, y=[]), {'lr': 1.0})"
    )
    assert lines(run(tmp_path, {"main.py": main})) == [f"{'True ' * 10}{known}"]


def test_annotations_that_are_text_can_be_evaluated(tmp_path: Path) -> None:
    main = """
from __future__ import annotations
import dataclasses, inspect, typing
from typing import get_type_hints
import kinetic

@dataclasses.dataclass
class Inner:
    n: typing.Tuple[int, ...] = (1,)

@dataclasses.dataclass
class Node:
    inner: Inner
    parent: typing.Optional[Node] = None
    other: "Twin" = None
    def grow(self, by: typing.Literal[2]) -> Inner: return self.inner

class Twin:
    node: Node

def count(node: Node, *, kind: typing.Type[Inner] = Inner): pass

@kinetic.run(accelerator="cpu")
def look():
    hints = [get_type_hints(each) for each in (Node, Node.grow)]
    return hints, str(inspect.signature(count, eval_str=True))

here, there = look.local(), look()
print(here == there, here[0] == there[0])
"""
    assert lines(run(tmp_path, {"main.py": main})) == ["True True"]
