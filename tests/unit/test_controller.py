"""A single controller (one process for all slices) repeats a function after losses, which come from
pathwaysutils' fault simulator. Programs run on four devices in two slices."""

from __future__ import annotations

import pytest
from forks import Forks

IMPORTS = """
import os, sys, time
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax
from pathwaysutils.test.mock_fault_injection import DeviceLossSimulator

import kinetic
from kinetic._core.options import Elastic
from kinetic._host.worker.controller import Controller
from kinetic._host.worker.joining import World
"""
BEFORE = """
_jax.Device.slice_index = property(lambda device: device.id // 2)
slices = {0: jax.devices()[:2], 1: jax.devices()[2:]}
room = Path(sys.argv[1], "room")
os.environ |= {"KINETIC_MOST_SLICES": "2", "KINETIC_REFORM_FILE": str(room)}
world = World("127.0.0.1:1", 1, 0, 4, "proxy", simulated=True, slices=2)
faults = DeviceLossSimulator()

def call(func, **rules):
    rules = {"least": 1, "most": 2, "max_failures": 3, "slice_timeout_s": 60.0} | rules
    with faults:
        return Controller(Elastic(**rules), world, str(room), os.environ.update).call(func)

held = []  # the simulation knows arrays by id(): the id of a lost one must not be used again

def steps(count, lose_at=-1):
    '''Sum over a mesh of the slices that take part.'''
    mesh = kinetic.make_mesh()
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    x = jax.device_put(np.ones(8, "float32"), split)
    held.append(x)
    step = jax.jit(lambda x: x + 1)
    for number in range(count):
        if number == lose_at:
            faults.mark_slice_lost(1, slices)
        x = step(x)
        held.append(x)
    jax.block_until_ready(x)
    return len(x.devices()), float(np.asarray(x)[0])

"""


@pytest.fixture(scope="module")
def forks():
    with Forks(IMPORTS, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4", NPROC="16") as running:
        yield running


@pytest.fixture
def run(forks, tmp_path):
    """Return a function that runs a program, and returns its output lines and kinetic's notices."""

    def run(program):
        forks.start(BEFORE + program, tmp_path, str(tmp_path))
        code, err = forks.wait(), (tmp_path / "err").read_text()
        assert code == 0, err
        story = [line for line in err.splitlines() if line.startswith("kinetic: ")]
        return (tmp_path / "out").read_text().splitlines(), story

    return run


@pytest.mark.starts_processes
def test_it_shrinks_after_a_loss_and_grows_back_at_a_step(run):
    lines, story = run(
        """
def train():
    attempt = kinetic.attempt()
    result = steps(5, lose_at=2 if attempt == 1 else -1)
    print(attempt, kinetic.num_slices(), *result, flush=True)
    if attempt == 2:
        faults.mark_slice_connected(1, slices)
        while not kinetic.should_reform():
            time.sleep(0.01)
        kinetic.reform()
    return "done"

print(call(train, shrinks=True), room.exists())
""",
    )
    assert lines == ["2 1 2 6.0", "3 2 4 6.0", "done False"]
    lost, shrinking, second, _, back, third, _ = story
    assert lost.startswith("kinetic: slice 1 lost (failure 1 of at most 3): DATA_LOSS: ")
    assert shrinking == "kinetic: continuing on 1 slice until lost slices return."
    assert second == "kinetic: attempt 2 of 4 begins on slice 0 of 2."
    assert back == "kinetic: slice 1 is back: the next attempt begins with more slices."
    assert third == "kinetic: attempt 3 of 4 begins on all 2 slices."


def test_it_waits_for_the_slice_and_keeps_its_mesh(run):
    lines, story = run(
        """
import threading

def come_back():
    while "waiting for slice 1" not in Path(sys.argv[1], "err").read_text():
        time.sleep(0.01)
    faults.mark_slice_connected(1, slices)

def train():
    if kinetic.attempt() == 1:
        threading.Thread(target=come_back).start()
    return kinetic.attempt(), *steps(5, lose_at=2 if kinetic.attempt() == 1 else -1)

print(*call(train))
""",
    )
    assert lines == ["2 4 6.0"]
    waits = "kinetic: waiting for slice 1 to return, for at most 60 s (slice_timeout)."
    assert story[1:3] == [waits, "kinetic: attempt 2 of 4 begins on all 2 slices."]


LOSING = """
def train():
    return steps(5, lose_at=0)

from kinetic.errors import HostLost
try:
    call(train, {rules})
except HostLost as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("max_failures=0", "Given up: it failed once, and max_failures is 0. attempt 1: slice 1"),
        (
            "least=2, slice_timeout_s=0.5",
            "Given up: slice 1 did not return within 0.5 s (slice_timeout). The job has 1 slice "
            "and needs 2. attempt 1: slice 1 lost: DATA_LOSS",
        ),
    ],
)
def test_it_gives_up_with_the_whole_history(run, rules, words):
    (line,), _ = run(LOSING.replace("{rules}", rules))
    assert line.startswith(words)


def test_exceptions_of_the_function_are_its_end(run):
    lines, story = run(
        """
import traceback
calls = []

def fails():
    calls.append(1)
    raise ValueError("own")

def own_code():
    calls.append(1)
    def callback(x):
        raise ZeroDivisionError
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    jax.block_until_ready(jax.pure_callback(callback, shape, 1.0))

def late():
    calls.append(1)
    raise TimeoutError("own")

def leaves():
    calls.append(1)
    sys.exit(3)

for func in (fails, own_code, late, leaves):
    try:
        call(func)
    except BaseException as error:
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        print(type(error).__name__, len(calls), func.__name__ in names, error.__context__)
    calls.clear()
""",
    )
    assert lines == [
        "ValueError 1 True None",
        "JaxRuntimeError 1 True None",
        "TimeoutError 1 True None",
        "SystemExit 1 True None",
    ]
    assert story == []


def test_a_loss_that_a_library_has_wrapped_is_a_loss(run):
    lines, _ = run(
        """
def train():
    if kinetic.attempt() == 2:
        return "again"
    try:
        steps(5, lose_at=2)
    except jax.errors.JaxRuntimeError as error:
        faults.mark_slice_connected(1, slices)
        raise OSError("cannot save") from error

print(call(train))
""",
    )
    assert lines == ["again"]


def test_what_may_be_no_loss_is_tried_once(run):
    lines, _ = run(
        """
calls = []

def broken():
    calls.append(1)
    raise jax.errors.JaxRuntimeError("INTERNAL: the compiler has a bug")

try:
    call(broken)
except jax.errors.JaxRuntimeError as error:
    print(len(calls), error)
""",
    )
    assert lines == ["2 INTERNAL: the compiler has a bug"]


def test_nothing_of_a_failed_call_is_kept(run):
    lines, _ = run(
        """
import weakref
seen = []

class Big:
    pass

def train():
    if kinetic.attempt() == 2:
        return seen[0]() is None
    big = Big()
    big.itself = big  # only the collector of cycles frees it
    seen.append(weakref.ref(big))
    steps(5, lose_at=2)

print(call(train, shrinks=True))
""",
    )
    assert lines == ["True"]
