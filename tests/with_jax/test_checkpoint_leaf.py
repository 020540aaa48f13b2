"""Leaves of a state whose names, types or bytes are easily taken for others', in both tiers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import kinetic
from kinetic._in_job.checkpoint import persistent, tree
from kinetic.errors import CheckpointError, CheckpointMismatch

TIERS = pytest.mark.parametrize("tier", ["local", "persistent"])


def options(folder, tier):
    if tier == "local":
        return {"local_every": 1, "local_directory": folder / "memory", "at_least_every": None}
    return {"every": 1, "local_every": None}


def saved(folder, tier, state, step=0):
    with kinetic.Checkpointer(folder / "run", **options(folder, tier)) as ckpt:
        ckpt.restore(state)
        assert ckpt.save(step, state) == (tier,)


def restored(folder, tier, like, **how):
    with kinetic.Checkpointer(folder / "run", **options(folder, tier)) as ckpt:
        loaded, _ = ckpt.restore(like, **how)
        assert ckpt.restored.tier == tier
    return loaded


@TIERS
def test_leaves_whose_names_look_alike_stay_apart(tmp_path, tier):
    state = {"a.b": np.arange(3.0), "a": {"b": np.arange(3.0) + 10}, "": {"c": 1}, ".c": 2}
    saved(tmp_path, tier, state)
    loaded = restored(tmp_path, tier, jax.tree_util.tree_map(np.zeros_like, state))
    assert loaded["a.b"].tolist() == [0, 1, 2]
    assert loaded["a"]["b"].tolist() == [10, 11, 12]
    assert (loaded[""]["c"], loaded[".c"]) == (1, 2)


def test_a_step_of_an_earlier_version_whose_names_have_dots_is_restored(tmp_path):
    import orbax.checkpoint as ocp

    state = {"a.b": np.arange(3.0), "a": {"c": np.arange(3.0) + 10}}
    leaves = [leaf.to_json() for leaf in tree.take_apart(state).leaves]
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = {
            persistent.STATE: ocp.args.StandardSave(state),
            persistent.RECORD: ocp.args.JsonSave({"format": 1, "leaves": leaves}),
        }
        manager.save(0, args=ocp.args.Composite(**items))
    loaded = restored(tmp_path, "persistent", jax.tree_util.tree_map(np.zeros_like, state))
    assert (loaded["a.b"][1], loaded["a"]["c"][1]) == (1, 11)


class Twins:
    """A pytree node whose two leaves have equal names."""

    def __init__(self, one, other):
        self.both = (one, other)


key = jax.tree_util.GetAttrKey("both")
jax.tree_util.register_pytree_with_keys(
    Twins, lambda twins: ([(key, each) for each in twins.both], None), lambda _, both: Twins(*both)
)


@TIERS
def test_leaves_of_one_name_are_refused(tmp_path, tier):
    with pytest.raises(CheckpointError, match=r"two leaves with the name \['x'\]\.both"):
        saved(tmp_path, tier, {"x": Twins(1, 2)})


@TIERS
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c16", "<f4"])
def test_bytes_in_another_order_are_the_same_numbers(tmp_path, tier, dtype):
    state = {"x": np.arange(1, 5).astype(dtype)}
    saved(tmp_path, tier, state)
    loaded = restored(tmp_path, tier, {"x": np.zeros(4, dtype)})["x"]
    assert loaded.tolist() == [1, 2, 3, 4]
    assert loaded.dtype == np.dtype(dtype)
    native = np.zeros(4, np.dtype(dtype).newbyteorder("="))
    assert restored(tmp_path, tier, {"x": native})["x"].tolist() == [1, 2, 3, 4]


@TIERS
def test_a_cast_that_can_lose_must_be_asked_for(tmp_path, tier):
    saved(tmp_path, tier, {"x": np.full(2, 0.1, np.float32), "n": np.ones(2)})
    like = {"x": np.zeros(2, np.float16), "n": np.ones(2)}
    with pytest.raises(CheckpointMismatch, match=r"\['x'\] is float32 .*but float16 .*cast=True"):
        restored(tmp_path, tier, like)
    loaded = restored(tmp_path, tier, like, cast=True)
    assert loaded["x"].dtype == np.float16


@TIERS
def test_a_number_of_another_kind_comes_back_as_it_was_saved(tmp_path, tier):
    saved(tmp_path, tier, {"n": 2.5, "m": 1})
    assert restored(tmp_path, tier, {"n": 0, "m": 0.0}) == {"n": 2.5, "m": 1}


def test_that_a_restart_would_lose_is_told_at_the_first_save(tmp_path):
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.restore({"x": np.zeros(2, np.float32)})
        with pytest.raises(CheckpointMismatch, match=r"is float64 .*but float32"):
            ckpt.save(0, {"x": np.zeros(2, np.float64)})
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.restore({"x": np.zeros(2, np.float32)}, cast=True)
        assert ckpt.save(0, {"x": np.zeros(2, np.float64)})


@pytest.mark.parametrize(
    ("saved", "now", "loses"),
    [
        ("float32", "float64", False),
        ("float32", ">f4", False),
        ("bfloat16", "float32", False),
        ("float8_e4m3fn", "bfloat16", False),
        ("int8", "bfloat16", False),
        ("uint16", "bfloat16", True),
        ("int64", "float64", True),
        ("int32", "float64", False),
        ("int32", "float32", True),
        ("int32", "uint32", True),
        ("uint8", "int16", False),
        ("bool", "int8", False),
        ("int8", "bool", True),
        ("float16", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("float64", "complex64", True),
        ("float32", "complex64", False),
        ("complex64", "float32", True),
        ("int32", "complex64", True),
    ],
)
def test_which_casts_can_lose(saved, now, loses):
    assert ml_dtypes  # Importing ml_dtypes adds its types to NumPy.
    assert tree.can_lose(saved, np.dtype(now).name) is loses


@TIERS
def test_a_state_without_leaves_is_a_state(tmp_path, tier):
    saved(tmp_path, tier, {}, step=3)
    assert restored(tmp_path, tier, {}) == {}


def test_arrays_of_records_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"\['x'\] is an array of records"):
        saved(tmp_path, "local", {"x": np.zeros(2, [("a", "f4"), ("b", "i4")])})


# -- weak types ------------------------------------------------------------------------------------


@jax.jit
def learn(state):
    """Update the weights. Their new type is that of the rate, unless the rate's type is weak."""
    return {"w": state["w"] - state["rate"] * state["w"], "rate": state["rate"] * 0.5}


def rates(count):
    return jnp.full(count, 0.1)


def begun(rate):
    return {"w": jnp.full(4, 3.0, jnp.bfloat16), "rate": rate}


@TIERS
@pytest.mark.parametrize(
    "rate_of", [lambda: 0.1, lambda: jnp.asarray(0.1), lambda: jnp.full(4, 0.1)]
)
def test_a_training_goes_on_with_the_types_that_it_had(tmp_path, tier, rate_of):
    expected = learn(learn(begun(rate_of())))
    saved(tmp_path, tier, learn(begun(rate_of())))
    for _ in range(2):  # The restored state is saved again.
        loaded = restored(tmp_path, tier, begun(rate_of()))
        assert loaded["rate"].weak_type
        loaded = learn(loaded)
        assert loaded["w"].dtype == expected["w"].dtype == jnp.bfloat16
        assert loaded["w"].tolist() == expected["w"].tolist()


@TIERS
def test_a_type_that_did_not_yield_any_more_does_not_yield_again(tmp_path, tier):
    saved(tmp_path, tier, {"rate": jnp.float32(0.5)})
    assert not restored(tmp_path, tier, {"rate": jnp.asarray(0.1)})["rate"].weak_type


@TIERS
def test_a_cast_array_has_the_type_of_the_state(tmp_path, tier):
    saved(tmp_path, tier, {"x": jnp.asarray(0.5)})
    loaded = restored(tmp_path, tier, {"x": jnp.bfloat16(0)}, cast=True)["x"]
    assert (loaded.dtype, loaded.weak_type) == (jnp.bfloat16, False)


@TIERS
def test_numbers_of_numpy_come_back_as_such(tmp_path, tier):
    state = {"n": np.int64(3), "x": np.float32(0.5), "array": np.array(7.0)}
    saved(tmp_path, tier, state)
    loaded = restored(
        tmp_path, tier, {"n": np.int64(0), "x": np.float32(0), "array": np.array(0.0)}
    )
    assert {name: type(each) for name, each in loaded.items()} == {
        "n": np.int64,
        "x": np.float32,
        "array": np.ndarray,
    }
    assert loaded == state


@TIERS
def test_of_a_step_of_an_earlier_version_the_state_says_what_yields(tmp_path, tier, monkeypatch):
    to_json = tree.Leaf.to_json
    with monkeypatch.context() as patched:
        patched.setattr(
            tree.Leaf, "to_json", lambda leaf: {**to_json(leaf), "kind": None} | {"kind": None}
        )
        saved(tmp_path, tier, {"rate": jnp.float32(0.5), "n": np.int64(3)})
    loaded = restored(tmp_path, tier, {"rate": jnp.asarray(0.1), "n": np.int64(0)})
    assert loaded["rate"].weak_type
    assert type(loaded["n"]) is np.int64


# -- nodes without leaves --------------------------------------------------------------------------


def optimizers():
    """Return two optimizers: their states have equal leaves, but in different nodes."""
    params = {"w": jnp.arange(12.0).reshape(3, 4)}
    return [
        {"p": params, "o": make(1e-3).init(params), "unused": unused}
        for make, unused in ((optax.adam, ()), (optax.adamw, {"x": None}))
    ]


@TIERS
@pytest.mark.parametrize("way", [1, -1])
def test_nodes_without_leaves_do_not_matter(tmp_path, tier, way, caplog):
    before, after = optimizers()[::way]
    structure = jax.tree_util.tree_structure(after)
    saved(tmp_path, tier, before, step=2)
    loaded = restored(tmp_path, tier, after)
    assert loaded["p"]["w"].tolist() == np.arange(12.0).reshape(3, 4).tolist()
    assert jax.tree_util.tree_structure(loaded) == structure
    assert caplog.text == ""


def test_a_mismatch_is_no_damage(tmp_path, caplog):
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        for step, names in enumerate(["ab", "abc"]):
            ckpt.save(step, {name: np.ones(2) for name in names})
    caplog.clear()
    with (
        kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt,
        pytest.raises(CheckpointMismatch, match=r"no \['c'\]"),
    ):
        ckpt.restore({"a": np.zeros(2), "b": np.zeros(2)})
    assert {path.name for path in tmp_path.glob("[0-9]")} == {"0", "1"}
    assert caplog.text == ""


def test_a_later_save_of_another_state_is_told(tmp_path, caplog):
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        ckpt.restore({"a": np.zeros(2)})
        ckpt.save(0, {"a": np.ones(2)})
        assert caplog.text == ""
        for step in (1, 2):
            ckpt.save(step, {"a": np.ones(2), "new": 1})
    assert (
        caplog.text.count(
            "of step 1, whose state differs from that of the step before, does not fit"
        )
        == 1
    )
    assert "the state of restore() has no ['new']" in caplog.text
    assert "of step 2" not in caplog.text
