"""Values of a class of a script that its statement would compute anew on a host."""

from __future__ import annotations

import ast
import random
import types
from typing import Any

import pytest
import script_host
from script_host import sent

from kinetic._pickling import given

library = script_host.library

VALUES = """
np.random.default_rng().normal(size=2)
np.float32(random.random())
uuid.uuid4()
datetime.now()
Path.cwd() / uuid.uuid4().hex
Counter({random.random(): 2})
frozenset([random.random()])
range(random.getrandbits(30))
(decimal.Decimal(random.random()), [fractions.Fraction(random.random())])
{"a": np.random.default_rng().normal(size=2), "b": deque([uuid.uuid4()])}
array.array("d", [random.random()])
bytearray(random.randbytes(8))
"""
IMPORTS = """
import array, decimal, fractions, random, uuid
from collections import Counter, deque
from datetime import datetime
from pathlib import Path
import numpy as np
import picklertest_library as lib
"""


@pytest.mark.parametrize("value", VALUES.strip().splitlines())
def test_what_a_class_has_computed_is_not_computed_anew(
    value: str, library: types.ModuleType
) -> None:
    text = f"""{IMPORTS}
@lib.register
class Model:
    kept = {value}
    one, two = 1, {value}
    def look(self, given={value}, *, named={value}): return given, named
"""
    host = sent(text, "Model")
    seen, here = host.value[0], host.here["Model"]
    known = [(each.kept, each.two, *each().look()) for each in (here, seen)]
    assert repr(known[0]) == repr(known[1])


def test_generators_draw_what_they_would_have_drawn(library: types.ModuleType) -> None:
    text = f"""{IMPORTS}
@lib.register
class Model:
    kept = random.Random()
    rng = np.random.default_rng()
"""
    host = sent(text, "Model")
    model, here = host.value[0], host.here["Model"]
    assert model.kept.random() == here.kept.random()
    assert model.rng.normal() == here.rng.normal()


@pytest.mark.parametrize(
    ("value", "made_by", "differs"),
    [
        (1, "1", False),
        (2, "1", True),
        (2, "f()", True),
        ([], "[]", False),
        ({"a": object}, "{}", True),
        ({"a": object}, "f()", False),
        (len, "f()", False),
        (property(), "f()", False),
        (int, "f()", False),
        (random.SystemRandom(), "f()", False),
        ([[[[[1]]]]], "f()", False),
    ],
)
def test_only_plain_values_may_differ(value: Any, made_by: str, differs: bool) -> None:
    assert given.may_differ(value, ast.parse(made_by, mode="eval").body) is differs


def test_arrays_are_compared_with_nothing() -> None:
    np = pytest.importorskip("numpy")
    made_by = ast.parse("[1, 2]", mode="eval").body
    assert given.may_differ([np.ones(2), 1], made_by)
    assert given.may_differ(np.ones(2), made_by)
    assert not given.is_plain(np.array([object()]))


@pytest.mark.parametrize(
    ("is_here", "is_gone", "plain"), [(1, 0, True), (0, 0, False), (1, 1, False)]
)
def test_arrays_of_jax_are_plain_where_they_are_whole(
    is_here: int, is_gone: int, plain: bool
) -> None:
    members = {
        "__module__": "jaxlib._jax",
        "is_fully_addressable": bool(is_here),
        "is_deleted": lambda _: bool(is_gone),
    }
    assert given.is_plain(type("ArrayImpl", (), members)()) is plain


def test_defaults_that_pydantic_keeps_are_not_computed_anew() -> None:
    text = """
import random, uuid
from typing import Annotated
from pydantic import BaseModel, Field, PrivateAttr
def field(): return Field(default=random.random(), gt=-1)
def draw(): return (random.random(),
                    2)
class Run(BaseModel):
    run: str = uuid.uuid4().hex
    more: tuple = draw(
    )
    rate: float = Field(random.random(), gt=-1)
    named: float = Field(gt=-1, default=random.random())
    own: float = field()
    count: int = 3
    _mark: str = PrivateAttr(default=uuid.uuid4().hex)
    def look(self): return self.run
"""
    host = sent(text, "Run")
    run, here = host.value[0], host.here["Run"]
    seen, known = run(), here()
    for name in ("run", "more", "rate", "named", "count", "_mark"):
        assert getattr(seen, name) == getattr(known, name)
    for name in ("rate", "own"):
        with pytest.raises(ValueError, match="greater"):
            run(**{name: -2})
    assert run.look.__code__.co_firstlineno == here.look.__code__.co_firstlineno
    assert not [name for name in host.main if name.startswith("_kinetic")]


def test_defaults_that_msgspec_keeps_are_not_computed_anew() -> None:
    pytest.importorskip("msgspec")
    text = """
import msgspec, uuid
class Run(msgspec.Struct):
    count: int
    run: str = uuid.uuid4().hex
    other: str = msgspec.field(default=uuid.uuid4().hex, name="Other")
"""
    host = sent(text, "Run")
    assert repr(host.value[0](1)) == repr(host.here["Run"](1))
    assert host.value[0].__struct_encode_fields__ == ("count", "run", "Other")
