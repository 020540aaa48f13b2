"""Slices of virtual devices: after a simulated loss, XLA itself fails computations on them."""

from __future__ import annotations

import os

import pytest
from forks import Forks

from kinetic._host.worker import jaxworld, virtual_slices
from kinetic._host.worker.joining import World
from kinetic._system import pipes

IMPORTS = """
import os, sys, threading, time
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import pathwaysutils
from pathwaysutils.elastic import elastic

from kinetic._core.options import Elastic
from kinetic._host.worker.start import ElasticSlices
from kinetic._host.worker import jaxworld, virtual_slices
from kinetic._host.worker.joining import World
from kinetic._system import pipes
"""
BEFORE = """
folder, away_s = sys.argv[1], float(sys.argv[2])
world = World("127.0.0.1:1", 1, 0, 8, "proxy", True, slices=2, file=folder + "/world")
slices = ElasticSlices(Elastic(1, 2, 3, 60.0), machines=4, away_s=away_s)
jaxworld.enter(world, "lazy", slices)
devices = np.array(jax.devices())
def spread(value, over=devices):
    return jax.device_put(value, NamedSharding(Mesh(over, ("d",)), PartitionSpec("d")))

def lose(index):
    assert pipes.tell(Path(sys.argv[1], "slices"), f"{index}\\n")
    while index in elastic.get_active_slice_indices():
        time.sleep(0.01)

def error_of(act):
    try:
        act()
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    print("no error")

"""
WORLD = World("127.0.0.1:1", 1, 0, 8, "proxy", simulated=True, slices=2)


@pytest.fixture(scope="module")
def forks():
    with Forks(IMPORTS, **jaxworld.environ(WORLD, {}, {}, automatic=False)) as running:
        yield running


@pytest.fixture
def run(forks, tmp_path):
    """A function that runs a program in a new process and returns the lines that it prints."""

    def run(program, away_s=600.0):
        forks.start(BEFORE + program, tmp_path, str(tmp_path), str(away_s))
        assert forks.wait() == 0, (tmp_path / "err").read_text()
        return (tmp_path / "out").read_text().splitlines()

    return run


def test_this_jax_has_all_that_is_needed():
    assert virtual_slices.check() == []


def test_a_jax_whose_error_arrays_cannot_be_made_is_refused(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "__version_info__", (0, 10, 0))
    assert virtual_slices.check() == ["make_error_array that works"]


@pytest.mark.starts_processes
def test_devices_look_like_those_of_pathways(run):
    assert run(
        """
print(pathwaysutils.is_pathways_backend_used(), jax.process_count(), len(devices))
print([d.slice_index for d in devices], [d.task_id for d in devices])
print(sorted(elastic.get_active_slice_indices()))
""",
    ) == ["True 1 8", "[0, 0, 0, 0, 1, 1, 1, 1] [0, 0, 1, 1, 2, 2, 3, 3]", "[0, 1]"]


def test_what_lies_on_a_lost_slice_fails_and_what_does_not_stays(run):
    lines = run(
        """
all_, first = spread(np.arange(8.0)), spread(np.arange(4.0), devices[:4])
copied = np.asarray(all_)
double = jax.jit(lambda x: jnp.sum(x) * x)
before = double(all_)
lose(1)
print(error_of(lambda: np.asarray(all_)))
print(error_of(lambda: jax.block_until_ready(double(all_))))
print("DATA_LOSS" in error_of(lambda: jax.block_until_ready(before)))
print(np.asarray(double(first)).tolist(), copied.sum(), sorted(elastic.get_active_slice_indices()))
""",
    )
    assert lines[0] == "INTERNAL: DATA_LOSS: slice 1 is down (simulated)"
    assert "DATA_LOSS: slice 1 is down (simulated)" in lines[1]
    assert lines[2:] == ["True", "[0.0, 6.0, 12.0, 18.0] 28.0 [0]"]


@pytest.mark.starts_processes
def test_what_is_lost_while_jax_or_numpy_reads_it_is_not_freed_under_their_hands(run):
    assert run(
        """
def read():
    made = double(spread(content))
    made.copy_to_host_async()
    for shard in made.addressable_shards:
        np.asarray(shard.data)
    np.asarray(made)

sys.setswitchinterval(1e-4)
virtual_slices.SWEEP_S = 0.001
double = jax.jit(lambda x: x * 2)
content = np.ones((8192, 8), "float32")
lose(1)
failed = 0
while failed < 25:
    try:
        read()
    except jax.errors.JaxRuntimeError as error:
        assert "DATA_LOSS" in str(error), error
        failed += 1
print(failed)
""",
    ) == ["25"]


def test_a_slice_that_is_back_is_empty_and_works(run):
    assert run(
        """
old = spread(np.arange(8.0))
assert pipes.tell(Path(sys.argv[1], "slices"), "1\\n")
while error_of(lambda: jax.block_until_ready(old)) is None:  # it may be back before anybody looks
    time.sleep(0.01)
while len(elastic.get_active_slice_indices()) < 2:
    time.sleep(0.01)
print("DATA_LOSS" in error_of(lambda: np.asarray(old)))
print(float(jax.jit(jnp.sum)(spread(np.arange(8.0)))))
""",
        away_s=0.0,
    )[-2:] == ["True", "28.0"]


def test_what_comes_to_lie_on_a_slice_that_is_away_is_lost_too(run):
    assert run(
        """
lose(0)
new = spread(np.arange(8.0))
while error_of(lambda: jax.block_until_ready(new)) is None:
    time.sleep(0.01)
print("lost")
""",
    )[-1:] == ["lost"]


def test_errors_have_the_kind_that_pathwaysutils_takes_for_a_loss(run):
    assert run(
        """
array = spread(np.arange(8.0))
lose(1)
try:
    np.asarray(array)
except jax.errors.JaxRuntimeError as error:
    print(elastic.is_error_due_to_slice_down(error))
""",
    ) == ["True"]


def test_a_pipe_tells_whether_somebody_listens(tmp_path):
    path = tmp_path / "pipe"
    assert not pipes.tell(path, "1\n")
    fd = pipes.listen(path)
    assert pipes.tell(path, "1\n")
    assert os.read(fd, 100) == b"1\n"
    with pytest.raises(BlockingIOError):
        os.read(fd, 100)
    os.close(fd)
    assert not pipes.tell(path, "1\n")


def test_who_waits_for_an_array_while_its_slice_is_lost_gets_the_error(run):
    """A program waits for an array while its slice is lost, at random moments. The wait must always
    raise an error, and never return a lost array."""
    lines = run(
        """
def wait_for_ever(arrays):
    while True:
        jax.block_until_ready(arrays)

for number in range(40):
    arrays = [spread(np.arange(8.0) + n) for n in range(1 + number % 2)]
    threading.Thread(target=pipes.tell, args=(Path(sys.argv[1], "slices"), "1\\n")).start()
    if "DATA_LOSS" not in error_of(lambda: wait_for_ever(arrays)):
        print("another error")
print("done")
""",
    )
    assert lines == ["done"]
