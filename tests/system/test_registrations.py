"""Classes and functions that scripts and modules register with libraries such as JAX: hosts know
them, also after a module has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import PATIENCE_S
from one_copy_cases import CONFIG, lines, run

pytestmark = [pytest.mark.timeout(300)]


FLAX = """
from typing import Any
import dataclasses, functools
import flax.struct, jax, jax.numpy as jnp, keras
from flax import serialization
from flax.training import train_state

@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, a): self.a = a
    def tree_flatten(self): return (self.a, self.a), None
    @classmethod
    def tree_unflatten(cls, aux, children): return cls(children[0])

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: float
    y: float

@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["n"])
@dataclasses.dataclass
class Sized:
    x: float
    n: int

class Late:
    def __init__(self, a): self.a = a

jax.tree_util.register_pytree_node(
    Late, lambda late: ((late.a, late.a), None), lambda aux, children: Late(children[0])
)

@flax.struct.dataclass
class Struct:
    x: float
    y: float
    name: str = flax.struct.field(pytree_node=False, default="s")

class State(train_state.TrainState):
    batch_stats: Any = None

@keras.saving.register_keras_serializable(package="PACKAGE")
class Scale(keras.layers.Layer):
    def __init__(self, k=2, **kwargs):
        super().__init__(**kwargs)
        self.k = k
    def call(self, x): return x * self.k
    def get_config(self): return {**super().get_config(), "k": self.k}

@keras.saving.register_keras_serializable()
def triple_PACKAGE(x): return x * 3

def count(tree):
    return len(jax.tree_util.tree_leaves(tree))

def model(k):
    scaled = keras.layers.Dense(1, activation=triple_PACKAGE)
    return keras.Sequential([keras.Input((2,)), Scale(k), scaled])

def check(node, point):
    import optax
    state = State.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.sgd(0.1),
        batch_stats={"m": jnp.ones(2)},
    )
    model(4).save("m.keras")
    print("given:", count(node), count(point))
    made = Node(1.0), Point(1.0, 2.0), Sized(1.0, 2), Late(1.0), Struct(1.0, 2.0)
    print("made:", *(count(each) for each in made))
    print("flax:", count(state), "batch_stats" in serialization.to_state_dict(state))
    print("state:", serialization.to_state_dict(Struct(1.0, 2.0)))
    print("keras:", keras.models.load_model("m.keras").layers[0].k)
    return jax.tree_util.tree_map(lambda leaf: leaf + 1, point)
"""


FLAX_CALLS = """
@kinetic.run(accelerator="cpu")
def look(mine, of_parts):
    return check(*mine), parts.check(*of_parts)

@kinetic.run(accelerator="cpu")
def load(*paths):
    return [keras.models.load_model(path).layers[0].k for path in paths]

back, parts_back = look((Node(1.0), Point(1.0, 2.0)), (parts.Node(1.0), parts.Point(1.0, 2.0)))
print("back:", type(back) is Point, back)
print("back:", type(parts_back) is parts.Point, parts_back)
model(5).save("mine.keras")
if __name__ == "__main__":
    parts.model(6).save("parts.keras")
    print("unused by name:", *load("mine.keras", "parts.keras"))
"""


FLAX_CHECKED = [
    "given: 2 2",
    "made: 2 2 1 2 2",
    "flax: 3 True",
    "state: {'x': 1.0, 'y': 2.0}",
    "keras: 4",
]


@pytest.mark.long
def test_what_scripts_and_modules_register_with_jax_flax_and_keras_is_registered(
    tmp_path: Path,
) -> None:
    """Register with JAX, Flax and Keras in a script and a module, both in one run: importing Keras
    takes seconds."""
    main = "import kinetic, parts\n" + FLAX.replace("PACKAGE", "mine") + FLAX_CALLS
    files = {"parts.py": FLAX.replace("PACKAGE", "parts"), "main.py": main}
    assert lines(run(tmp_path, files)) == [
        *FLAX_CHECKED * 2,
        "back: True Point(x=2.0, y=3.0)",
        "back: True Point(x=2.0, y=3.0)",
        "unused by name: 5 6",
    ]


KERAS = """
import keras, numpy
from kinetic._pickling import call

def build():
    dense = keras.layers.Dense(2)
    drawn = numpy.random.rand()
    dense.build((1, 3))
    return dense.dtype_policy.name, drawn, dense.kernel.numpy().tolist()

def set_all(policy, seed):
    keras.mixed_precision.set_global_policy(policy)
    keras.utils.set_random_seed(seed)

plain = call.pack(build, (), {}, env_vars={}).data
set_all("mixed_bfloat16", 812)
sent, here = call.pack(build, (), {}, env_vars={}).data, build()
set_all("float32", 1)
assert call.unpack(sent)[0]() == here, (here, build())
assert here[0] == "mixed_bfloat16", here

set_all("float16", 2)
here = build()
keras.utils.set_random_seed(2)
assert call.unpack(plain)[0]() == here, "what was not set there is as it was"
"""


def test_a_model_is_built_with_what_the_script_has_set_in_keras() -> None:
    env = os.environ | {"KERAS_BACKEND": "jax"}
    subprocess.run([sys.executable, "-c", KERAS], check=True, env=env, timeout=PATIENCE_S)


EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp

class Linear(eqx.Module):
    w: jax.Array
    n: int = eqx.field(static=True)
    def __call__(self, x): return self.w * x * self.n

class Biased(Linear):
    b: jax.Array
    def __call__(self, x): return super().__call__(x) + self.b
"""


@pytest.mark.long
@pytest.mark.parametrize("place", ["module", "script"])
def test_equinox_modules(tmp_path: Path, place: str) -> None:
    checks = """
@kinetic.run(accelerator="cpu")
def fit(model):
    print(
        len(jax.tree_util.tree_leaves(model)),
        float(eqx.filter_jit(lambda m, x: m(x))(model, 2.0)),
    )
    return eqx.filter_grad(lambda m: m(1.0))(Biased(jnp.ones(()), 3, jnp.ones(())))

print(len(jax.tree_util.tree_leaves(fit(Biased(jnp.ones(()), 3, jnp.ones(()))))))
"""
    head = "import kinetic\n" + (EQUINOX if place == "script" else "from parts import *\n")
    assert lines(run(tmp_path, {"parts.py": EQUINOX, "main.py": head + checks})) == ["2 7.0", "2"]


def test_registries_in_python_of_modules_and_scripts(tmp_path: Path) -> None:
    parts = """
import abc, dataclasses, functools

class Shape(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

@Shape.register
class Square:
    pass

@functools.singledispatch
def show(x): return "object"

@show.register
def _(x: int): return "int"

@show.register(Square)
def _(x): return "square"

class Plugin:
    kinds = {}
    def __init_subclass__(cls, kind, **kwargs):
        super().__init_subclass__(**kwargs)
        Plugin.kinds[kind] = cls

class First(Plugin, kind="first"):
    pass

REGISTRY = {}

def registered(cls):
    REGISTRY[cls.__name__] = cls
    return cls

@registered
@dataclasses.dataclass(frozen=True)
class Entry:
    x: int = 1

class Meta(type):
    made = []
    def __new__(meta, name, bases, fields):
        meta.made.append(name)
        return super().__new__(meta, name, bases, fields)

class Counted(metaclass=Meta):
    pass
"""
    checks = """
@kinetic.run(accelerator="cpu")
def look(square):
    show(1.5), show("warm")
    print(
        isinstance(square, Shape),
        show(1),
        show(square),
        Plugin.kinds["first"] is First,
        REGISTRY["Entry"] is Entry,
        Meta.made,
    )

show(1.5), show(Square())
look(Square())
"""
    wanted = ["True int square True True ['Counted']"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert lines(run(tmp_path / "a", {"main.py": "import kinetic\n" + parts + checks})) == wanted
    assert (
        lines(
            run(
                tmp_path / "b",
                {"parts.py": parts, "main.py": "import kinetic\nfrom parts import *\n" + checks},
            )
        )
        == wanted
    )


def test_nothing_of_a_script_runs_again(tmp_path: Path) -> None:
    """On a host, no statement of the script runs again: not at top level, in class bodies, or in
    decorators that register a class."""
    main = """
import atexit, dataclasses, pathlib
import jax, kinetic

LOG = pathlib.Path(__file__).parent / "log"

def say(words):
    with LOG.open("a") as log:
        log.write(words + "\\n")

def register(cls):
    say(f"registers {cls.__name__}")
    return jax.tree_util.register_dataclass(cls)

say("top level")

@register
@dataclasses.dataclass
class Point:
    say("body")
    x: float

@atexit.register
def last_words():
    say("exit")

@kinetic.run(accelerator="cpu")
def train(point):
    return jax.tree.leaves(point), jax.tree.leaves(Point(3.0))

print(train(Point(2.0)))
"""
    assert lines(run(tmp_path, {"main.py": main})) == ["([2.0], [3.0])"]
    assert (tmp_path / "log").read_text().split("\n") == [
        *("top level", "body", "registers Point", "exit", ""),
    ]


def test_a_module_outside_the_project_travels_along(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "outside.py").write_text(CONFIG)
    main = f"""
import sys
sys.path.insert(0, {str(tmp_path / "lib")!r})
import kinetic, outside

@kinetic.run(accelerator="cpu")
def train(config):
    return isinstance(config, outside.Config), outside.square(3), "outside" in sys.modules

print(train(outside.Config()))
"""
    (tmp_path / "project").mkdir()
    assert lines(run(tmp_path / "project", {"main.py": main})) == ["(True, 9, False)"]


def test_a_module_with_the_name_of_a_library_is_one(tmp_path: Path) -> None:
    part = "class Part: pass\ndef make(): return Part()"
    main = """
import kinetic, click
from click import Part, make

def outer():
    return type(make()) is Part

@kinetic.run(accelerator="cpu")
def look(part, function):
    import click as again
    return type(part) is again.Part is type(again.make()), again.make is make, function()

print(look(Part(), outer))
"""
    assert lines(run(tmp_path, {"click.py": part, "main.py": main})) == ["(True, True, True)"]


def test_a_module_that_was_edited_is_imported_as_it_is_now_and_said_so(tmp_path: Path) -> None:
    main = """
import importlib, logging, pathlib
logging.basicConfig(format="%(message)s", stream=__import__("sys").stdout)
import kinetic, work

@kinetic.run(accelerator="cpu")
def train():
    return work.version()

print(train())
pathlib.Path("work.py").write_text("def version(): return 'second one'")
print(train())
importlib.reload(work)
print(train())
"""
    output = lines(run(tmp_path, {"work.py": "def version(): return 'first'", "main.py": main}))
    printed = [line for line in output if "kinetic:" not in line]
    assert printed == ["first", "second one", "second one"]
    (warning,) = [line for line in output if "changed" in line]
    assert "work has changed since the import, and hosts import the file" in warning


@pytest.mark.long
def test_a_library_that_hosts_import_early_does_not_format_their_output(tmp_path: Path) -> None:
    """Orbax gives a handler to a root logger that has none. The script's root logger has one, so
    Orbax adds none there, and must add none on hosts, which are forked after its import."""
    main = """
import logging
logging.root.addHandler(logging.NullHandler())
import kinetic, orbax.checkpoint

@kinetic.run(accelerator="tpu-v6e-8")
def warn():
    logging.getLogger("mine").warning("plain")

job = warn.run_async()
job.result()
print(repr(job.logs()))
"""
    assert lines(run(tmp_path, {"main.py": main})) == [repr("plain\n")]


@pytest.mark.long
def test_the_configuration_of_jax_is_that_of_the_script(tmp_path: Path) -> None:
    main = """
import jax, kinetic
jax.config.update("jax_enable_x64", True)

def dtype():
    import jax.numpy as jnp
    return str(jnp.ones(2).dtype)

one = kinetic.run(accelerator="cpu")(dtype)
several = kinetic.run(accelerator="tpu-v6e-8")(dtype)
other = kinetic.run(accelerator="cpu", env={"JAX_ENABLE_X64": "0"})(dtype)
print(
    one(),
    several(),
    other(),
    "jax_enable_x64=True" in repr(one.plan()),
    one.run_async_map([()]).results(),
)
"""
    assert lines(run(tmp_path, {"main.py": main})) == ["float64 float64 float32 True ['float64']"]


def test_a_value_and_an_error_of_the_project_can_be_had_in_any_process(tmp_path: Path) -> None:
    main = """
import kinetic
from cfgmod import Config, ConfigError

@kinetic.run(accelerator="cpu")
def good():
    return Config(3)

@kinetic.run(accelerator="cpu")
def bad():
    raise ConfigError("narrow")

for handle in (good.run_async(), bad.run_async()):
    handle.wait()
    print(handle.job_id)
"""
    good, bad = lines(run(tmp_path, {"cfgmod.py": CONFIG, "main.py": main}))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    attach = f"""
import kinetic, sys
before = list(sys.path)
print(kinetic.attach({good!r}).result(cleanup=False))
try:
    kinetic.attach({bad!r}).result(cleanup=False)
except Exception as error:
    print(type(error).__module__, type(error).__name__, error, sys.path == before)
"""
    assert lines(run(elsewhere, {"main.py": attach})) == [
        "Config(width=3)",
        "cfgmod ConfigError narrow True",
    ]
    command = [sys.executable, "-m", "kinetic", "jobs", "result", good]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "Config(width=3)"), done.stderr
