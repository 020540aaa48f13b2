"""Classes that are registered with JAX and cannot be rebuilt by their statements: JAX still knows
them on the host, and at the caller when they come back."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import dataclasses, io, pickle, sys
import equinox as eqx, flax, jax, numpy as np
from jax import tree_util
from kinetic._pickling import code_pickler
from kinetic._pickling.pickler import CallPickler
from kinetic._pickling.unpickler import CallUnpickler

def make():
    class Linear(eqx.Module):
        w: np.ndarray
        made: list = dataclasses.field(default_factory=list)
        kind: str = eqx.field(static=True, default="k")
        def double(self): return self.w * 2
    @flax.struct.dataclass
    class State:
        w: np.ndarray
        kind: str = flax.struct.field(pytree_node=False, default="k")
    @tree_util.register_dataclass
    @dataclasses.dataclass
    class Data:
        w: np.ndarray
        kind: str = dataclasses.field(default="k", metadata={"static": True})
    @tree_util.register_pytree_node_class
    class Node:
        def __init__(self, w): self.w = w
        def tree_flatten(self): return (self.w,), "rest"
        @classmethod
        def tree_unflatten(cls, rest, children): return cls(*children)
    @tree_util.register_pytree_with_keys_class
    class Keyed:
        def __init__(self, w): self.w = w
        def tree_flatten_with_keys(self): return ((tree_util.GetAttrKey("w"), self.w),), None
        @classmethod
        def tree_unflatten(cls, rest, children): return cls(*children)
    class Plain:
        def __init__(self, w): self.w = w
    register(Plain)
    return [each(np.ones(2)) for each in (Linear, State, Data, Node, Keyed, Plain)]

def register(cls):
    tree_util.register_pytree_node(cls, lambda x: ((x.w,), None), lambda _, held: cls(*held))

made = make()
if sys.argv[1] == "result":
    file = io.BytesIO()
    code_pickler.dump((made, tree_util.tree_structure(made[2])), file)
    sys.stdout.buffer.write(file.getvalue())
else:
    CallPickler(sys.stdout.buffer, {"__name__": "__main__"}).dump(
        (made, tree_util.tree_structure(made[2]))
    )
"""
READING = """
import pickle, sys
data = sys.stdin.buffer.read()
if sys.argv[1] == "result":
    from kinetic._pickling.result_unpickler import ResultUnpickler
    found, structure = ResultUnpickler(data).load()
else:
    import io
    from kinetic._pickling.unpickler import CallUnpickler
    found, structure = CallUnpickler(io.BytesIO(data)).load()
import jax
for each in found if sys.argv[1] == "call" else found[:5]:
    grown = jax.tree.map(lambda x: x + 1, each)
    leaves = len(jax.tree.leaves(each))
    print(type(each).__name__, leaves, type(grown) is type(each), grown.w.tolist())
    if type(each).__name__ == "Keyed":
        ((path, _),) = jax.tree_util.tree_leaves_with_path(each)
        assert jax.tree_util.keystr(path) == ".w", path
assert found[0].double().tolist() == [2, 2] and found[0].made == []
assert structure == jax.tree.structure(found[2])
"""

MENTIONED = """
from jax import tree_util

class Held:
    def __init__(self, w): self.w = w

def register(cls):
    tree_util.register_pytree_node(cls, lambda x: ((x.w,), None), lambda _, held: cls(*held))

ALL = [Held]
for each in ALL:
    register(each)

class Point:
    pass

tree_util.register_pytree_node(Point, lambda x, kind=Held: ((), kind), lambda kind, _: Point())
"""
SENDING = """
import sys
from kinetic._pickling.pickler import CallPickler

text = sys.stdin.read()
space = {"__name__": "__main__"}
exec(compile(text, "train.py", "exec"), space)
import numpy as np
held = space["Held"](np.ones(2))
CallPickler(sys.stdout.buffer, space).dump(((held,), held))
"""


NAMES = {
    "result": ("Linear", "State", "Data", "Node", "Keyed"),
    "call": ("Linear", "State", "Data", "Node", "Keyed", "Plain"),
}
"""The classes sent in each direction; functions of the script are not sent back."""


def test_jax_knows_them_where_they_arrive() -> None:
    for way in ("result", "call"):
        sent = _run(PROGRAM, way)
        assert _run(READING, way, sent).splitlines() == [
            f"{name} 1 True [2.0, 2.0]".encode() for name in NAMES[way]
        ]


def test_a_class_that_a_statement_only_mentions_keeps_its_registration() -> None:
    reading = READING[: READING.index("import jax")] + (
        "import jax; print(jax.tree.map(lambda x: x + 1, found[0]).w.tolist())"
    )
    assert _run(reading, "call", _run(SENDING, "", MENTIONED.encode())) == b"[2.0, 2.0]\n"


def _run(program: str, argument: str, stdin: bytes = b"") -> bytes:
    """Run a program text with these inputs in a new process; return its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", program, argument],
        input=stdin,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
