"""Struct classes of msgspec that a script defines: rebuilt on hosts."""

from __future__ import annotations

import pytest
from cloudpickle import cloudpickle
from script_host import sent

from kinetic._pickling import results

msgspec = pytest.importorskip("msgspec")


def test_structs_without_a_statement_at_the_top_level_are_as_they_were() -> None:
    text = """
import msgspec
from typing import ClassVar
class Outer:
    class Inner(msgspec.Struct, frozen=True, order=True):
        x: int
        tags: list = []
        kept: ClassVar[int] = 3
        run: str = msgspec.field(default="r", name="Run")
        def look(self): return self.run
def make(n):
    class Base(msgspec.Struct, kw_only=True, tag="b", rename="upper"):
        a: int
        b: int | None = None
    class Sub(Base):
        c: int = n
        d: dict = msgspec.field(default_factory=lambda: {"n": n})
        def __post_init__(self): self.a = abs(self.a)
    return Sub
Sub = make(4)
one, sub = Outer.Inner(3), Sub(a=-1)
"""
    host = sent(text, "Outer", "Sub", "one", "sub")
    outer, sub_class, one, sub = host.value
    originals = host.here
    assert sub_class is not originals["Sub"]
    assert (one.look(), outer.Inner.kept, repr(one)) == ("r", 3, repr(originals["one"]))
    assert (one == outer.Inner(3), one < outer.Inner(4)) == (True, True)
    with pytest.raises(AttributeError, match="immutable"):
        one.x = 3
    assert msgspec.json.encode(one) == b'{"x":3,"tags":[],"Run":"r"}'
    assert msgspec.json.encode(sub) == msgspec.json.encode(originals["sub"])
    decoded = msgspec.json.decode(b'{"type":"b","A":-3,"C":9}', type=sub_class)
    assert repr(decoded) == "Sub(c=9, d={'n': 4}, a=3, b=None)"
    data = results.pack_value(sub)
    cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.clear()  # Forget class ids, as in another process.
    assert repr(results.unpack_value(data)) == repr(sub)
