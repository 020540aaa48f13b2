"""Checkpoints that other libraries have written: Orbax's managers and checkpointers, MaxText's
layout, Flax's own files.

`Checkpointer` restores the same state, or raises an error that names the program. It never writes
next to such files.
"""

from __future__ import annotations

import flax
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints, train_state

import kinetic
from kinetic._store.checkpoints import Checkpoints
from kinetic.errors import CheckpointError, CheckpointMismatch


def state(number=7):
    return {
        "params": {"w": jnp.arange(6.0).reshape(2, 3) * number, "b": np.arange(3, dtype=np.int16)},
        "step": number,
        "opt": [jnp.ones(2) * number, {"mu": jnp.float32(number)}],
    }


def trained(number=7):
    model = flax.linen.Dense(3)
    params = model.init(jax.random.key(number), jnp.ones((1, 2)))["params"]
    initial = train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adamw(1e-3 * number)
    )
    return initial.replace(step=number)


def manager(folder, **options):
    options = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(folder, options=options) as saver:
        saver.save(3, args=ocp.args.StandardSave(state()))


def composite(folder):
    with ocp.CheckpointManager(folder) as manager:
        items = {"model": ocp.args.StandardSave(state()), "about": ocp.args.JsonSave({"a": 1})}
        manager.save(3, args=ocp.args.Composite(**items), metrics={"loss": 1.0})


def maxtext(folder):
    handlers = {"items": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)}
    with ocp.CheckpointManager(folder, item_names=("items",), item_handlers=handlers) as manager:
        manager.save(3, args=ocp.args.Composite(items=ocp.args.PyTreeSave(item=state())))


def standard(folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state())


def pytree(folder):
    ocp.PyTreeCheckpointer().save(folder, state())


def files(folder):
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(folder, state())


def fixed_length(folder):
    manager(folder, step_prefix="model", step_format_fixed_length=8)


def below(make, *names):
    """Return a function that lets `make` write a folder, and links to a subfolder of it."""

    def write(folder):
        make(folder.with_name("all"))
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(folder.with_name("all").joinpath(*names), target_is_directory=True)

    return write


WRITTEN = {
    "manager": (manager, 3),
    "fixed length": (fixed_length, 3),
    "composite": (composite, 3),
    "maxtext": (maxtext, 3),
    "maxtext's items": (below(maxtext, "3", "items"), -1),
    "standard": (standard, -1),
    "pytree": (pytree, -1),
    "files": (files, -1),
}


def everything(folder):
    return sorted((str(each), each.stat().st_mtime_ns) for each in folder.rglob("*"))


def same(one, other):
    jax.tree_util.tree_map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("written", WRITTEN)
def test_what_others_have_saved_is_restored_and_left_alone(tmp_path, written):
    (tmp_path / "of others").mkdir()
    folder, (write, step) = tmp_path / "of others" / "run", WRITTEN[written]
    write(folder)
    before = everything(tmp_path / "of others")
    with kinetic.Checkpointer(
        folder, every=1, local_every=1, local_directory=tmp_path / "m"
    ) as ckpt:
        restored, start = ckpt.restore(state(0))
        assert ckpt.restored.step == step
        with pytest.raises(CheckpointError, match=r"of Orbax.*start_from="):
            ckpt.save(start, restored)
    same(restored, state())
    assert start == step + 1
    assert everything(tmp_path / "of others") == before


@pytest.mark.parametrize("written", WRITTEN)
def test_a_training_starts_from_what_others_have_saved(tmp_path, written):
    (tmp_path / "of others").mkdir()
    folder, (write, step) = tmp_path / "of others" / "run", WRITTEN[written]
    write(folder)
    before = everything(tmp_path / "of others")
    for attempt in range(2):
        with kinetic.Checkpointer(tmp_path / "own", every=1, local_every=None) as ckpt:
            restored, start = ckpt.restore(state(0), start_from=folder)
            assert start == step + 1 + attempt  # In attempt 1, the training's own step is newer.
            same(restored, state() if not attempt else state(9))
            ckpt.save(start, state(9))
    assert everything(tmp_path / "of others") == before


FLAX = pytest.mark.filterwarnings("ignore:Flax Checkpointing will soon be deprecated")


@FLAX
def test_checkpoints_of_flax_training_are_restored(tmp_path):
    flax.config.update("flax_use_orbax_checkpointing", True)
    for step in (2, 12):
        checkpoints.save_checkpoint(str(tmp_path / "run"), trained(step), step=step, keep=2)
    before = everything(tmp_path)
    with kinetic.Checkpointer(tmp_path / "run", local_every=None) as ckpt:
        restored, start = ckpt.restore(trained(1))
    same(restored.params, trained(12).params)
    same(restored.opt_state, trained(12).opt_state)
    assert (restored.step, start) == (12, 13)
    assert everything(tmp_path) == before


@FLAX
def test_messages_of_flax_training_are_not_ours(tmp_path):
    flax.config.update("flax_use_orbax_checkpointing", False)
    checkpoints.save_checkpoint(str(tmp_path), {"x": np.arange(3)}, step=1)
    before = everything(tmp_path)
    with (
        kinetic.Checkpointer(tmp_path, local_every=None) as ckpt,
        pytest.raises(
            CheckpointError, match=r"cannot read the checkpoints in .*, which flax\.training wrote"
        ),
    ):
        ckpt.restore({"x": np.zeros(3)})
    assert everything(tmp_path) == before


def test_they_are_laid_out_as_the_state(tmp_path):
    manager(tmp_path / "run")
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("all",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = state(0)
    like["params"]["w"] = jax.device_put(like["params"]["w"], spread)
    with kinetic.Checkpointer(tmp_path / "run", local_every=None) as ckpt:
        restored, _ = ckpt.restore(like)
    assert restored["params"]["w"].sharding == spread


def test_what_does_not_fit_is_named(tmp_path):
    manager(tmp_path / "run")
    with kinetic.Checkpointer(tmp_path / "run", local_every=None) as ckpt:
        with pytest.raises(CheckpointMismatch, match=r"has no opt\.0, opt\.1\.mu"):
            ckpt.restore({key: each for key, each in state().items() if key != "opt"})
        half = state()
        half["params"]["w"] = half["params"]["w"].astype(jnp.bfloat16)
        with pytest.raises(CheckpointMismatch, match=r"is float32 .*but bfloat16 .*cast=True"):
            ckpt.restore(half)
        restored, _ = ckpt.restore(half, cast=True)
    assert restored["params"]["w"].dtype == jnp.bfloat16


def test_of_several_states_the_lines_are_told_that_read_them(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = {name: ocp.args.StandardSave({"x": np.arange(3)}) for name in ("model", "opt")}
        manager.save(5, args=ocp.args.Composite(**items))
    before = everything(tmp_path)
    with (
        kinetic.Checkpointer(tmp_path / "run", local_every=None) as ckpt,
        pytest.raises(CheckpointError, match=r"of Orbax with several pytrees") as caught,
    ):
        ckpt.restore({"x": np.zeros(3)})
    assert "model, opt" in str(caught.value)
    assert everything(tmp_path) == before


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # a warning of Keras with this JAX
def test_formats_of_others_are_named_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "last.keras")
    before = everything(tmp_path)
    with (
        kinetic.Checkpointer(tmp_path, local_every=None) as ckpt,
        pytest.raises(
            CheckpointError, match=r"cannot read the checkpoints in .*, which Keras wrote"
        ),
    ):
        ckpt.restore({"x": 1})
    assert everything(tmp_path) == before


def test_files_that_are_no_checkpoints_do_not_matter(tmp_path):
    (tmp_path / "events.out.tfevents.1").write_text("x")
    (tmp_path / "eval_2024").mkdir()
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore({"x": 1}) == ({"x": 1}, 0)
        ckpt.save(0, {"x": 2})
    with kinetic.Checkpointer(tmp_path, every=1, local_every=None) as ckpt:
        assert ckpt.restore({"x": 1}) == ({"x": 2}, 1)


def test_a_note_that_an_earlier_version_left_does_not_make_a_folder_ours(tmp_path):
    manager(tmp_path / "run")
    (tmp_path / "run/kinetic-owner.json").write_text("")
    with kinetic.Checkpointer(tmp_path / "run", local_every=None) as ckpt:
        assert ckpt.restore(state(0))[1] == 4
        with pytest.raises(CheckpointError, match="does not save to their folder"):
            ckpt.save(4, state())


def test_steps_of_others_in_our_folder_stay(tmp_path):
    def saved(*steps):
        with kinetic.Checkpointer(tmp_path, every=1, local_every=None, keep=1) as ckpt:
            restored, start = ckpt.restore({"x": 0})
            for step in steps:
                ckpt.save(step, {"x": step})
        return restored, start

    saved(0, 1)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(5, args=ocp.args.StandardSave({"x": 50}))
    assert saved(6, 7) == ({"x": 50}, 6)
    assert [each.step for each in Checkpoints(str(tmp_path)).steps()] == [5, 7]


def test_a_training_starts_from_another_one(tmp_path):
    ours = {"a.b": jnp.arange(3.0), "a": {"b": np.ones(2)}, "k": jax.random.key(1), "n": 5}
    with kinetic.Checkpointer(tmp_path / "one", every=1, local_every=None) as ckpt:
        ckpt.save(4, ours)
    like = {"a.b": jnp.zeros(3), "a": {"b": np.zeros(2)}, "k": jax.random.key(0), "n": 0}
    with kinetic.Checkpointer(tmp_path / "two", every=1, local_every=None) as ckpt:
        restored, start = ckpt.restore(like, start_from=tmp_path / "one")
        assert start == 5
        ckpt.save(0, restored)  # Steps may begin at 0 again.
    assert (restored["a.b"].tolist(), restored["a"]["b"].tolist()) == ([0, 1, 2], [1, 1])
    assert (jax.random.key_data(restored["k"]) == jax.random.key_data(ours["k"])).all()
    with (
        kinetic.Checkpointer(tmp_path / "one" / "4", local_every=None) as ckpt,
        pytest.raises(CheckpointError, match="does not save to their folder"),
    ):
        ckpt.save(0, ours)


@pytest.mark.parametrize("is_present", [True, False])
def test_nothing_to_start_from_is_told(tmp_path, is_present):
    (tmp_path / "empty").mkdir() if is_present else None
    with (
        kinetic.Checkpointer(tmp_path / "own", local_every=None) as ckpt,
        pytest.raises(CheckpointError, match=r"empty"),
    ):
        ckpt.restore({"x": 1}, start_from=tmp_path / "empty")


# -- steps that were cut off -----------------------------------------------------------------------


def in_place(folder, steps, cut_off):
    """Make Orbax write steps directly into their final folders, as it recommends for mounted
    buckets. If `cut_off`, the newest step stays incomplete."""
    mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    options = ocp.CheckpointManagerOptions(atomicity_options=mode, enable_async_checkpointing=False)
    for step in steps:
        with ocp.CheckpointManager(folder, options=options) as manager:
            manager.save(step, args=ocp.args.StandardSave(state(step)))
        if step == cut_off:
            (folder / f"{step}/commit_success.txt").unlink()


@pytest.mark.parametrize("way", ["restore", "start_from"])
def test_a_step_that_was_cut_off_is_passed_over(tmp_path, way):
    in_place(tmp_path / "run", [3, 4], cut_off=4)
    steps = Checkpoints(str(tmp_path / "run")).steps()
    assert [(each.step, each.is_committed) for each in steps] == [(3, True), (4, False)]
    own, options = ("run", {}) if way == "restore" else ("own", {"start_from": tmp_path / "run"})
    with kinetic.Checkpointer(tmp_path / own, local_every=None) as ckpt:
        restored, start = ckpt.restore(state(0), **options)
    same(restored, state(3))
    assert start == 4


def test_the_first_step_that_is_being_written_is_no_checkpoint(tmp_path, monkeypatch):
    from orbax.checkpoint._src.path import atomicity

    async def cut_off(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(atomicity.CommitFileTemporaryPath, "finalize", cut_off)
    with pytest.raises(KeyboardInterrupt):
        in_place(tmp_path / "run", [3], cut_off=None)
    (step,) = Checkpoints(str(tmp_path / "run")).steps()
    assert (step.step, step.is_committed) == (3, False)
    with kinetic.Checkpointer(tmp_path / "run", local_every=None) as ckpt:
        assert ckpt.restore({"x": 1}) == ({"x": 1}, 0)
        with pytest.raises(CheckpointError, match="does not save to their folder"):
            ckpt.save(0, {"x": 1}, force=True)


def test_steps_of_an_orbax_that_made_no_marks_stay_committed(tmp_path):
    """Old versions of Orbax do not mark committed steps: unmarked steps count as committed."""
    for step in (3, 4):
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(step, args=ocp.args.StandardSave(state(step)))
    (tmp_path / "3/commit_success.txt").unlink()
    assert [each.is_committed for each in Checkpoints(str(tmp_path)).steps()] == [True, True]


# -- typed keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_are_restored(tmp_path, impl):
    def keys(seed):
        one = jax.random.key(seed, impl=impl)
        return {"one": one, "many": jax.random.split(one, 3), "x": jnp.ones(2)}

    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(keys(7)))
    with kinetic.Checkpointer(tmp_path / "own", local_every=None) as ckpt:
        restored, start = ckpt.restore(keys(0), start_from=tmp_path / "run")
        for name in ("one", "many"):
            assert restored[name].dtype == keys(7)[name].dtype
            same(jax.random.key_data(restored[name]), jax.random.key_data(keys(7)[name]))
        assert start == 2
        other = "rbg" if impl == "threefry2x32" else "threefry2x32"
        like = keys(0) | {"one": jax.random.key(0, impl=other)}
        with pytest.raises(CheckpointMismatch, match=f"'one'.* but a key of {other}"):
            ckpt.restore(like, start_from=tmp_path / "run")


def test_a_model_of_flax_with_dropout_is_restored(tmp_path):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layer, self.drop = nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.drop(self.layer(x))

    model, other, x = Model(1), Model(2), jnp.ones((4, 2))
    model(x)  # Uses a random key.
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(nnx.state(model)))
    with kinetic.Checkpointer(tmp_path / "own", local_every=None) as ckpt:
        restored, _ = ckpt.restore(nnx.state(other), start_from=tmp_path / "run")
    nnx.update(other, restored)
    same(other(x), model(x))


def test_a_type_that_yields_is_that_of_the_state(tmp_path):
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave({"rate": jnp.asarray(0.25)}))
    with kinetic.Checkpointer(tmp_path / "own", local_every=None) as ckpt:
        restored, _ = ckpt.restore({"rate": jnp.asarray(0.5)}, start_from=tmp_path / "run")
    assert (restored["rate"].weak_type, float(restored["rate"])) == (True, 0.25)
