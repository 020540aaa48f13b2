"""kinetic's frozen value classes behave like frozen dataclasses of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, field, replace

import pytest

from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Point:
    """A value."""

    x: int
    y: int = 2
    tags: dict[str, int] = field(default_factory=dict)
    secret: str = field(default="", repr=False, compare=False)

    @property
    def total(self) -> int:
        return self.x + self.y


@dataclass(frozen=True)
class Named:
    """A value that defines `__repr__` itself."""

    name: str

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, repr=False)
class Silent:
    """A value whose `__repr__` shows no fields."""

    name: str


def test_a_value_is_made_shown_and_compared_like_a_dataclass() -> None:
    one = Point(1, secret="s3")
    assert (one.x, one.y, one.tags, one.total) == (1, 2, {}, 3)
    assert repr(one) == "Point(x=1, y=2, tags={})"
    assert one == Point(1, 2) != Point(2, 2)
    assert one != (1, 2, {})
    assert repr(Named("a")) == "<a>"
    assert "name" not in repr(Silent("a"))
    assert hash(Named("a")) == hash(Named("a"))
    assert len({Named("a"), Named("a"), Named("b")}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(TypeError, match=re.escape("missing 1 required positional argument: 'x'")):
        Point()  # type: ignore[call-arg]


def test_a_value_is_made_only_from_its_own_fields() -> None:
    tags = {"a": 1}
    assert Point(1, 2, tags, "s3") == Point(x=1, tags=tags, y=2)
    assert Point(1, secret="s3").secret == "s3"
    assert Point(1).tags is not Point(1).tags
    wrong = {
        "got an unexpected keyword argument 'z'": lambda: Point(1, z=2),  # type: ignore[call-arg]
        "got multiple values for argument 'x'": lambda: Point(1, x=2),  # type: ignore[misc]
        "takes 4 values, but 5 were given": lambda: Point(1, 2, {}, "", 5),  # type: ignore[call-arg]
    }
    for reason, make in wrong.items():
        with pytest.raises(TypeError, match=re.escape(f"Point.__init__() {reason}")):
            make()


def test_a_value_cannot_be_changed() -> None:
    one = Point(1)
    for name in ("x", "tags", "unknown"):
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, 5)
    with pytest.raises(FrozenInstanceError):
        del one.x  # type: ignore[misc]
    assert one == Point(1)


def test_the_standard_library_takes_it_for_a_dataclass() -> None:
    one = Point(1, tags={"a": 1})
    assert dataclasses.is_dataclass(Point)
    assert [field.name for field in dataclasses.fields(one)] == ["x", "y", "tags", "secret"]
    assert asdict(one) == {"x": 1, "y": 2, "tags": {"a": 1}, "secret": ""}
    assert replace(one, y=7) == Point(1, 7, {"a": 1})
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == copy.copy(one) == one
    match one:
        case Point(x, y):
            assert (x, y) == (1, 2)


@pytest.mark.starts_processes
def test_processes_of_a_small_job_compile_nothing_for_their_values() -> None:
    code = (
        "import dataclasses, kinetic\n"
        "from kinetic._host import leader\n"
        "from kinetic._host.agent import loop\n"
        "from kinetic._host.local import zygote\n"
        "from kinetic._client import handle, planning, remote, submission\n"
        "import sys\n"
        "ours = [m for n, m in list(sys.modules.items()) if n.startswith('kinetic.')]\n"
        "found = {v for m in ours for v in vars(m).values() if isinstance(v, type)}\n"
        "kinds = {v for v in found if dataclasses.is_dataclass(v) and v.__module__[:3] == 'kin'}\n"
        "values = {k for k in kinds if k.__setattr__ is not object.__setattr__}\n"
        "print(*sorted(k.__qualname__ for k in values if k.__dataclass_params__.init))\n"
        "print(len(kinds) > 40)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "True"]
