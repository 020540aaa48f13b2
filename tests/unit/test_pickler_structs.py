"""Struct classes of msgspec that a script defines: refused, because hosts cannot rebuild them."""

from __future__ import annotations

import pytest

from kinetic._pickling import call
from kinetic.errors import PicklingError

msgspec = pytest.importorskip("msgspec")


def test_a_struct_of_a_script_is_refused() -> None:
    text = """
import msgspec
class Point(msgspec.Struct):
    x: int
def use(point): return point.x
def make(): return Point(1)
"""
    space: dict = {"__name__": "__main__"}
    exec(text, space)
    advice = "the msgspec.Struct Point of a script: move it into a module of the project"
    for func, args in ((space["use"], (space["Point"](1),)), (space["make"], ())):
        with pytest.raises(PicklingError, match=advice):
            call.pack(func, args, {}, env_vars={})
