"""Restores from descriptions of the state, and old arrays that are freed to make room."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kinetic
from kinetic._in_job.checkpoint import tree
from kinetic._in_job.checkpoint.assembly import LocalRestore
from kinetic._in_job.checkpoint.persistent import OrbaxTree
from kinetic.errors import CheckpointError, CheckpointMismatch

TIERS = pytest.mark.parametrize("tier", ["local", "persistent"])
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
SPREAD = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("all"))


def begun(number=0):
    return {
        "w": jax.device_put(jnp.arange(8.0) * number, SPREAD),
        "rate": jnp.asarray(0.5) * number,
        "key": jax.random.key(number),
        "empty": jnp.zeros((0, 3)),
        "host": np.full(3, number, np.int16),
        "n": number,
    }


def described(state):
    """Return the shapes and shardings of a state, as `jax.eval_shape` does."""
    shapes = jax.eval_shape(lambda: {k: v for k, v in state.items() if isinstance(v, jax.Array)})
    w = jax.ShapeDtypeStruct(shapes["w"].shape, shapes["w"].dtype, sharding=SPREAD)
    return state | shapes | {"w": w}


def checkpointer(folder, tier, start_from=False):
    if tier == "local":
        options = {"local_every": 1, "local_directory": folder / "memory", "at_least_every": None}
    else:
        options = {"every": 1, "local_every": None}
    return kinetic.Checkpointer(folder / ("other" if start_from else "run"), **options)


@pytest.fixture
def saved(tmp_path):
    """A function that saves a state to a tier and returns the folder of checkpoints."""

    def save(tier, state):
        with checkpointer(tmp_path, tier) as ckpt:
            ckpt.restore(state)
            ckpt.save(4, state)
        return tmp_path

    return save


def same(one, other):
    assert jax.tree_util.tree_structure(one) == jax.tree_util.tree_structure(other)
    one, other = ({**state, "key": jax.random.key_data(state["key"])} for state in (one, other))
    jax.tree_util.tree_map(np.testing.assert_array_equal, one, other)


@TIERS
@pytest.mark.parametrize("starts", [False, True])
def test_a_described_state_is_restored(saved, tier, starts):
    if starts and tier == "local":
        return
    folder = saved(tier, begun(7))
    with checkpointer(folder, tier, start_from=starts) as ckpt:
        start_from = folder / "run" if starts else None
        restored, start = ckpt.restore(described(begun()), start_from=start_from, init=pytest.fail)
    assert start == 5
    assert (restored["w"].sharding, restored["rate"].weak_type) == (SPREAD, True)
    same(restored, begun(7))


def test_where_nothing_was_saved_the_answer_is_what_init_makes(tmp_path):
    with checkpointer(tmp_path, "local") as ckpt:
        assert ckpt.restore(described(begun())) == (None, 0)
        restored, start = ckpt.restore(described(begun()), init=lambda: begun(3))
        same(restored, begun(3))
        assert start == 0
        assert ckpt.save(0, restored) == ("local",)
        with pytest.raises(CheckpointError, match=r"\['empty'\] is a ShapeDtypeStruct"):
            ckpt.save(1, described(begun()))


def test_a_state_in_which_something_is_described_is_none_where_nothing_was_saved(tmp_path):
    with checkpointer(tmp_path, "persistent") as ckpt:
        state = {"x": jnp.ones(2), "y": jax.ShapeDtypeStruct((2,), np.float32)}
        assert ckpt.restore(state) == (None, 0)
        assert ckpt.restore({"x": state["x"]}) == ({"x": state["x"]}, 0)
    assert state["x"].tolist() == [1, 1]


def with_room(monkeypatch, states):
    """Make the device report free memory for this number of states."""
    size = sum(begun()[name].nbytes for name in ("w", "rate", "empty"))
    size += jax.random.key_data(begun()["key"]).nbytes
    monkeypatch.setattr(tree, "_read_free_bytes", lambda device: states * size)


@TIERS
@pytest.mark.parametrize(("states", "are_freed"), [(1.9, True), (2, False)])
def test_arrays_make_room_before_others_are_read(saved, tier, monkeypatch, states, are_freed):
    folder, like = saved(tier, begun(7)), begun()
    arrays, freed = [like[name] for name in ("w", "rate", "empty")], []

    def look(reads):
        def read(*args):
            freed.append([array.is_deleted() for array in arrays])
            return reads(*args)

        return read

    monkeypatch.setattr(OrbaxTree, "read", look(OrbaxTree.read))
    monkeypatch.setattr(LocalRestore, "fetch", look(LocalRestore.fetch))
    with_room(monkeypatch, states)
    with checkpointer(folder, tier) as ckpt:
        restored, _ = ckpt.restore(like)
    same(restored, begun(7))
    assert freed == [[are_freed] * 3]


def test_of_a_device_that_tells_what_it_has_the_rest_is_free():
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": 30}

    assert tree._read_free_bytes(Device()) == 70
    assert tree._read_free_bytes(jax.devices()[0]) == math.inf
    assert tree._read_free_bytes(None) == math.inf


@TIERS
def test_a_state_that_does_not_fit_keeps_its_arrays(saved, tier, monkeypatch):
    folder, like = saved(tier, begun(7)), begun() | {"new": jnp.ones(2)}
    with_room(monkeypatch, 0)
    with checkpointer(folder, tier) as ckpt, pytest.raises(CheckpointMismatch):
        ckpt.restore(like)
    assert not any(like[name].is_deleted() for name in ("w", "rate", "new"))
