"""Classes that a script defines, and hosts rebuild from their pickled parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from one_copy_cases import lines, run

pytestmark = [pytest.mark.timeout(300)]


def test_a_class_has_the_defaults_and_the_attributes_that_it_had(tmp_path: Path) -> None:
    main = """
from __future__ import annotations
import dataclasses
from dataclasses import KW_ONLY, InitVar
from typing import ClassVar
import kinetic

WIDTH = 64

@dataclasses.dataclass
class Layer:
    tag: ClassVar[int] = 7
    width: int = WIDTH
    shape: tuple = (WIDTH, 1)
    seed: InitVar[int] = WIDTH
    _: KW_ONLY
    bias: Layer | None = None
    def grow(self, by=WIDTH, *, more=WIDTH): return self.width + by + more
    @classmethod
    def make(cls, width=WIDTH): return cls(width)

@dataclasses.dataclass
class Plain:
    a: int
    b: int = 1

WIDTH = 128
Layer.size = property(lambda self: self.width * 2)

@kinetic.run(accelerator="cpu")
def look():
    fields = [(each.name, each.default) for each in dataclasses.fields(Layer)]
    needed = [each.default is dataclasses.MISSING for each in dataclasses.fields(Plain)]
    return fields, Layer().grow(), Layer.make(), Layer(1).shape, Layer().size, needed

print(look() == look.local(), look())
"""
    (line,) = lines(run(tmp_path, {"main.py": main}))
    fields = [("width", 64), ("shape", (64, 1)), ("bias", None)]
    assert line.startswith(f"True ({fields}, 192, Layer(")
    assert line.endswith("(64, 1), 128, [True, False])")


def test_an_attribute_that_repeats_that_of_a_base_is_the_classs_own(tmp_path: Path) -> None:
    main = """
import dataclasses, enum
import kinetic

class Block:
    width = 64
    def loss(self): return "base"

class Head(Block):
    width = 64
    loss = Block.loss

@dataclasses.dataclass
class A:
    x: int = 1

@dataclasses.dataclass
class B(A):
    x: int = 1

class Meta(type):
    pass

class One(metaclass=Meta):
    tag = "a"

class Two(One):
    tag = "a"

@kinetic.run(accelerator="cpu")
def look():
    Block.width, Block.loss, A.x, One.tag = 128, lambda self: "patched", 5, "b"
    own = [name for name in vars(Head) if not name.startswith("_")]
    return Head.width, Head().loss(), B().x, Two.tag, own

print(look())
"""
    assert lines(run(tmp_path, {"main.py": main})) == ["(64, 'base', 1, 'a', ['width', 'loss'])"]


def test_objects_of_a_class_that_was_defined_anew_keep_theirs(tmp_path: Path) -> None:
    define = """
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: int
    def double(self): return Point(2 * self.x)
"""
    main = f"""
import dataclasses, jax, kinetic
{define}
old = Point(1)
{define}
new = Point(2)

@kinetic.run(accelerator="cpu")
def look(old, new):
    kinds = type(old), type(new)
    return jax.tree.leaves((old, new)), kinds[1] is Point, kinds[0] is Point, old.double()

print(look(old, new))
"""
    assert lines(run(tmp_path, {"main.py": main})) == ["([1, 2], True, False, Point(x=2))"]


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
    expected = (
        "['Child'] ({'lr': 2.0}, Pair(x=3, y=2), 4, <Color.R|G: 3>, Point(x=1, y=[]), {'lr': 1.0})"
    )
    assert lines(run(tmp_path, {"main.py": main})) == [f"{'True ' * 10}{expected}"]


def test_annotations_that_are_text_can_be_evaluated(tmp_path: Path) -> None:
    main = """
from __future__ import annotations
import dataclasses, inspect, typing
from typing import TYPE_CHECKING, get_type_hints
import kinetic
if TYPE_CHECKING:
    from nowhere import Thing

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
    pass

def count(node: Node, *, kind: typing.Type[Inner] = Inner): pass

@kinetic.run(accelerator="cpu")
def look(thing: Thing = None):
    hints = [get_type_hints(each) for each in (Node, Node.grow)]
    return hints, str(inspect.signature(count, eval_str=True))

here, there = look.local(), look()
print(here == there, here[0] == there[0])
"""
    assert lines(run(tmp_path, {"main.py": main})) == ["True True"]


def test_what_a_script_reaches_arrives(tmp_path: Path) -> None:
    main = """
import sys
sys.path.append("../shared")
import concurrent.futures, xml.etree.ElementTree
import wrapt
import early, kinetic

class classproperty(property):
    def __get__(self, obj, owner): return self.fget(owner)

class Net:
    lib = concurrent
    @classproperty
    def params(cls): return 64

@wrapt.decorator
def traced(wrapped, instance, args, kwargs): return "traced", wrapped(*args, **kwargs)

@kinetic.run(accelerator="cpu", joins_jax=False)
@traced
def look(net):
    import late
    names = getattr(xml, "etree").__name__, vars(net.lib)["futures"].__name__
    return early.X, late.Y, names, net.params, Net.params, sys.argv, late.ARGS

print(look(Net()))
"""
    files = {
        "../shared/early.py": "X = 1",
        "../shared/late.py": "import sys\nY, ARGS = 2, sys.argv",
    }
    (tmp_path / "project").mkdir()
    (line,) = lines(run(tmp_path / "project", {"main.py": main} | files))
    names = ("xml.etree", "concurrent.futures")
    assert line == str(("traced", (1, 2, names, 64, 64, ["main.py"], ["main.py"])))
