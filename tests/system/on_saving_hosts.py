"""Functions that save and restore checkpoints. Hosts import this module instead of the tests:
importing pytest would take longer than the job."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import kinetic


def train(
    steps,
    *,
    every=4,
    local_every=1,
    die=None,
    lose=(),
    folder=None,
    pause=None,
    local_directory=None,
):
    """Train; return [(attempt, first step, restored step and tier)], the state's sum, its n, and
    the tiers of the last save.

    Args:
        die: (attempt, step, host) that is killed.
        pause: folder in which hosts mark their steps; the first attempt is slow.
        lose: (attempt, host) whose local copies are deleted before it restores; host -1 is all.
    """
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    attempt, host = int(os.environ["KINETIC_ATTEMPT"]), jax.process_index()
    if (attempt, host) in lose or (attempt, -1) in lose:
        shutil.rmtree(Path(os.environ["KINETIC_LOCAL_DIR"], "checkpoints"))
    slices = kinetic.num_slices()
    devices = np.array(jax.devices()).reshape(slices, -1)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp"))
    inside = NamedSharding(mesh, PartitionSpec("fsdp"))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def make_array(shape, sharding):
        return jax.make_array_from_callback(
            shape, sharding, lambda part: np.zeros(shape, np.float32)[part]
        )

    own = jax.numpy.zeros(2)  # one array per process
    state = {"w": make_array((8, 3), inside), "b": make_array((3,), everywhere), "n": 0, "own": own}

    batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    ones = jax.make_array_from_callback((8,), batch, lambda part: np.ones(8, np.float32)[part])

    @functools.partial(jax.jit, out_shardings=(inside, everywhere))
    def step_of(w, b, n, x):  # waits for all hosts
        return w + n, b * 2 + w.sum(axis=0) + x.mean()

    starts = []
    with kinetic.Checkpointer(
        folder, every=every, local_every=local_every, local_directory=local_directory
    ) as ckpt:
        state, start = ckpt.restore(state)
        starts.append((attempt, start, ckpt.restored and tuple(ckpt.restored)))
        for step in range(start, steps):
            w, b = step_of(state["w"], state["b"], step, ones)
            state = {"w": w, "b": b, "n": state["n"] + step, "own": state["own"] + step}
            assert float(state["own"][1]) == state["n"]
            tiers = ckpt.save(step, state, metrics={"n": state["n"]})
            if pause is not None and attempt == 1:
                Path(pause, f"{host}-{step}").touch()
                time.sleep(0.05)
            if die == (attempt, step, host):
                ckpt.wait()  # Step `step` is committed.
                os.kill(os.getpid(), signal.SIGKILL)
        ckpt.wait()
    print(f"attempt {attempt} went on at {start}", flush=True)
    total = jax.jit(lambda w, b: w.sum() + b.sum(), out_shardings=everywhere)
    return starts, float(total(state["w"], state["b"])), state["n"], tiers


def hold(folder):
    with kinetic.Checkpointer(local_every=None) as ckpt:
        ckpt.restore({"n": 1})
        ckpt.save(0, {"n": 1}, force=True)
        ckpt.wait()
        Path(folder, "held").touch()
        time.sleep(1000)


def save_another_kind(folder):
    import numpy as np

    with kinetic.Checkpointer(folder, every=1) as ckpt:
        _, step = ckpt.restore({"x": 1.0})
        ckpt.save(step, {"x": np.ones(3)})


def twice(function, *args):
    """Run a training with saves in memory, then without. The first attempt then fails, and the
    second one continues from the saves."""
    results = [function(each, *args) for each in (1, None)]
    if kinetic.attempt() == 1:
        raise OSError("once more")
    return results


def compile_steps(local_every, folder):
    """Compile a training step whose first state is like that of Flax and Optax: numbers, and arrays
    without a fixed device, whose types change after a step."""
    import jax
    import numpy as np

    count = jax.numpy.zeros((), int)
    everywhere = jax.sharding.NamedSharding(kinetic.make_mesh(), jax.sharding.PartitionSpec())
    ones = np.ones(3, jax.numpy.bfloat16)  # bfloat16 must stay despite the weakly typed x
    weights = jax.make_array_from_callback((3,), everywhere, lambda index: ones[index])

    @jax.jit
    def update(s):
        new_state = {"step": s["step"] + 1, "x": s["x"] * 1.5, "w": s["w"] * s["x"]}
        return new_state | {"count": s["count"] + 1}

    with kinetic.Checkpointer(
        Path(folder, str(local_every)), every=4, local_every=local_every
    ) as ckpt:
        state, start = ckpt.restore({"step": 0, "x": 1.0, "w": weights, "count": count})
        for step in range(start, 7 if kinetic.attempt() == 1 else 9):
            state = update(state)
            ckpt.save(step, state)
        ckpt.wait()
    types = [str(state[name].dtype) for name in ("x", "w")]
    return start, int(state["step"]), int(state["count"]), float(state["x"]), types


class Numbers:
    """An iterator whose position can be saved and restored, like Grain's."""

    def __init__(self, begin):
        self.next = begin

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return self.next

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


def read_numbers(local_every, folder, steps):
    import jax

    numbers = Numbers(jax.process_index() * 1000)
    with kinetic.Checkpointer(
        Path(folder, str(local_every)), every=4, local_every=local_every
    ) as ckpt:
        _, start = ckpt.restore({"n": 0}, data=numbers)
        for step in range(start, steps):
            next(numbers)
            ckpt.save(step, {"n": step}, data=numbers)
        ckpt.wait()
    return start, numbers.next


def read_one(differ):
    import jax

    numbers = Numbers(1000 * jax.process_index() if differ else 0)
    with kinetic.Checkpointer(every=1, local_every=None) as ckpt:
        _, step = ckpt.restore({"n": 0}, data=numbers)
        ckpt.save(step, {"n": 1}, data=numbers)


def fit(epochs, folder, die_in=None, **options):
    """Fit a model, in which the last host dies in batch `die_in`; return epochs and losses."""
    sys.modules.update(sklearn=None, matplotlib=None)  # Keras would import both, a second each.
    import jax
    import keras
    import numpy as np

    class Death(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (self.model.optimizer.iterations.value, jax.process_index()) == (die_in, last):
                os.kill(os.getpid(), signal.SIGKILL)

    # Do not optimize: it takes longer than the training.
    jax.config.update("jax_disable_most_optimizations", True)
    keras.utils.clear_session()  # Resets names: the second model gets the same.
    attempt, last = int(os.environ["KINETIC_ATTEMPT"]), jax.process_count() - 1
    if jax.process_count() > 1:
        mesh = keras.distribution.DeviceMesh((jax.device_count(),), ["batch"], jax.devices())
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(device_mesh=mesh, auto_shard_dataset=False)
        )
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    layers = [keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer="adam", loss="mse")
    saving = kinetic.keras.Checkpointer(folder, **options)
    dying = [Death()] if die_in and attempt == 1 else []
    history = model.fit(
        x,
        x.sum(axis=1),
        epochs=epochs,
        batch_size=16,
        shuffle=False,
        verbose=0,
        callbacks=[saving, *dying],
    )
    return history.epoch, history.history.get("loss", [])


def fits(*trainings):
    """Run several trainings in one process, so that Keras is imported once."""
    return [fit(**training) for training in trainings]


def save_and_damage():
    """Flip a bit in the newest step. Restore with several meshes before and after; return for each
    the step, and whether this host's part equals what was saved."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, -1), ("hosts", "chips"))
    specs = {
        "as saved": P(("hosts", "chips")),
        "whole on each host": P("chips"),
        "columns": P(None, ("hosts", "chips")),
        "other rows": P("chips", "hosts"),
    }

    def content(step):
        return np.random.default_rng(step).normal(size=(64, 96)).astype(np.float32)

    def state(spec, step, dtype=np.float32):
        over, whole = NamedSharding(mesh, spec), content(step).astype(dtype)
        w = jax.make_array_from_callback(whole.shape, over, lambda part: whole[part])
        half = w.astype(jax.numpy.bfloat16)
        own = jax.numpy.arange(3.0) + step
        return {"w": w, "half": half, "n": step, "nan": float("nan"), "own": own}

    def restore_as(spec, dtype=np.float32, **options):
        with kinetic.Checkpointer(folder, local_every=None, **options) as ckpt:
            restored_state, _ = ckpt.restore(state(spec, 0, dtype))
        step = ckpt.restored.step
        right = all(
            np.array_equal(np.asarray(a.data), content(step).astype(a.data.dtype)[a.index])
            for name in ("w", "half")
            for a in restored_state[name].addressable_shards
        )
        return step, right and restored_state["n"] == step

    folder = Path(os.environ["KINETIC_OUTPUT_DIR"], "checkpoints")
    rows = specs["as saved"]
    for step in (1, 2):
        with kinetic.Checkpointer(folder, every=1, local_every=None) as ckpt:
            if step == 2:
                ckpt.restore(state(rows, 0))
            ckpt.save(step, state(rows, step))
    results = {name: restore_as(spec) for name, spec in specs.items()}
    results["cast"] = restore_as(rows, np.float64)
    if jax.process_index() == 0:  # one host damages the other's file
        files = Path(folder, "2/state/ocdbt.process_1/d").iterdir()
        file = max(files, key=lambda each: each.stat().st_size)
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 3] ^= 1
        file.write_bytes(damaged)
    multihost_utils.sync_global_devices("damaged")
    for name, spec in specs.items():
        results[f"{name}, damaged"] = restore_as(spec)
    results["not verified"] = restore_as(rows, verify=False)
    return results


def restore_alone():
    import jax
    import numpy as np

    like = {"w": np.zeros((64, 96), np.float32), "n": 0, "nan": float("nan")}
    like |= {"half": jax.numpy.zeros((64, 96), "bfloat16"), "own": np.zeros(3, np.float32)}
    with kinetic.Checkpointer(local_every=None) as ckpt:
        restored_state, _ = ckpt.restore(like)
    content = np.random.default_rng(ckpt.restored.step).normal(size=(64, 96)).astype(np.float32)
    return ckpt.restored.step, bool((restored_state["w"] == content).all())


ROWS_OF_TYPES = 1 << 12
"""Rows of each array: with so many, even the smallest array is large enough to be sent."""


def save_many_types():
    """Save arrays of many types and restore them; return the names of those that differ, and the
    bytes that were read."""
    import jax
    import ml_dtypes
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = kinetic.make_mesh()  # axis "data": slices; "fsdp": their chips
    types = [np.float32, ml_dtypes.bfloat16, np.int8, ml_dtypes.float8_e4m3fn, np.uint32, bool]

    kinds = (jax.sharding.AxisType.Explicit,) * 2
    explicit = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)

    def make_array(content, spec, over=mesh):
        return jax.make_array_from_callback(
            content.shape, NamedSharding(over, spec), lambda part: content[part]
        )

    def state(blank):
        luck = np.random.default_rng(1)

        def content(columns, dtype):
            if blank:
                return np.zeros((ROWS_OF_TYPES, columns), dtype)
            if dtype is bool:
                return luck.integers(0, 2, (ROWS_OF_TYPES, columns), bool)
            raw = luck.integers(
                0, 256, (ROWS_OF_TYPES, columns * np.dtype(dtype).itemsize), np.uint8
            )
            return raw.view(dtype)  # any bits, also -0.0 and NaN

        inside = {np.dtype(t).name: make_array(content(512, t), P("fsdp")) for t in types}
        return inside | {
            "everywhere": make_array(content(128, np.float32), P()),
            "nobody's copy": make_array(content(512, np.float32), P(("data", "fsdp"))),
            "explicit": make_array(content(512, np.uint16), P("fsdp"), explicit),
            "over slices": make_array(content(512, np.float32), P("data")),
            "complex": make_array(content(128, np.complex64), P("fsdp")),
            "small": make_array(content(1, np.int8), P("fsdp")),
            "own": jax.numpy.full(3, 0.0 if blank else 5.0),
            "number": 0 if blank else 7,
            "nothing": None,
            "key": jax.random.key(0 if blank else 9),
        }

    def bits(value):
        if jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        shards = getattr(value, "addressable_shards", None)
        return value if shards is None else [np.asarray(s.data).tobytes() for s in shards]

    def bytes_read():
        return int(Path("/proc/self/io").read_text().split()[1])

    wanted = state(blank=False)
    with kinetic.Checkpointer(local_every=None) as ckpt:
        ckpt.save(0, wanted, force=True)
    for _ in range(2):  # The first restore also reads modules.
        like = state(blank=True)
        with kinetic.Checkpointer(local_every=None) as ckpt:
            before = bytes_read()
            restored_state, start = ckpt.restore(like)
            read = bytes_read() - before
    assert start == 1
    wrong = [name for name in wanted if bits(restored_state[name]) != bits(wanted[name])]
    wrong += [
        name
        for name, value in restored_state.items()
        if isinstance(value, jax.Array) and value.sharding != like[name].sharding
    ]
    return wrong, read


ROWS = 1 << 14
"""The number of rows of a state of which each device holds 256 KiB."""


def save_and_be_killed(folder, kills, seed):
    """Save step after step. In each of the first `kills` attempts, a random host is killed at a
    random moment of a restore or a save."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    attempt, host = int(os.environ["KINETIC_ATTEMPT"]), jax.process_index()
    luck = random.Random(seed * 1000 + attempt)  # equal on all hosts
    victim = luck.randrange(jax.process_count())
    when = luck.choice(["restore", *range(1, 8)])  # die in the restore or in the n-th save
    moment_s, waits = luck.uniform(0.0, 0.3), luck.random() < 0.5

    def die():
        time.sleep(moment_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def may_die(now):
        if attempt <= kills and host == victim and when == now:
            threading.Thread(target=die, daemon=True).start()

    mesh = kinetic.make_mesh()  # axis "data": slices; "fsdp": their chips
    split, everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    blank = np.full((ROWS, 16), -1.0, np.float32)
    state = {
        name: jax.make_array_from_callback(blank.shape, sharding, lambda part: blank[part])
        for name, sharding in (("split", split), ("everywhere", everywhere))
    }
    steps_of = jax.jit(
        lambda state, step: jax.tree.map(lambda array: array * 0 + step, state),
        out_shardings={"split": split, "everywhere": everywhere},
    )
    largest = jax.jit(lambda x: x.max(), out_shardings=everywhere)  # waits for all hosts

    may_die("restore")
    with kinetic.Checkpointer(
        Path(folder, "run"), every=3, local_every=1, keep=2, at_least_every=None
    ) as ckpt:
        state, start = ckpt.restore(state)
        parts = [s.data for array in state.values() for s in array.addressable_shards]
        values = sorted({float(value) for part in parts for value in (part.min(), part.max())})
        tier = ckpt.restored and ckpt.restored.tier
        note = Path(folder, f"{attempt}-{host}")
        note.with_suffix(".new").write_text(json.dumps([start, values, tier]))
        note.with_suffix(".new").rename(note)
        step = start
        while attempt <= kills or step < start + 3:
            state = steps_of(state, float(step))
            assert float(largest(state["split"])) == step
            may_die(step - start + 1)
            ckpt.save(step, state)
            if waits:
                ckpt.wait()
            # The last step that all hosts have surely saved. Before each step, all hosts have begun
            # the save of the previous step (with `waits`: completed it), and a save waits for the
            # save before.
            Path(folder, f"done-{attempt}-{host}").write_text(str(step - 1 if waits else step - 2))
            step += 1
    return step


def save_to_a_full_disk(host, saves):
    """After the first save, limit file sizes on one host, as if its disk were full, and save on.
    Never close the Checkpointer."""
    import resource

    import jax

    mesh = jax.sharding.Mesh(jax.devices(), "x")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

    def make(step):
        key = jax.random.key(step)
        return {"w": jax.jit(lambda: jax.random.uniform(key, 600_000), out_shardings=spread)()}

    checkpointer = kinetic.Checkpointer(every=1, keep=None, local_every=None)
    state, _ = checkpointer.restore(make(0))
    checkpointer.save(0, state)
    checkpointer.wait()
    if jax.process_index() == host:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    for step in range(1, saves):
        checkpointer.save(step, make(step))


def save_without_closing(end):
    import numpy as np

    checkpointer = kinetic.Checkpointer(every=1, keep=None, local_every=None)
    state, _ = checkpointer.restore({"w": np.ones(300_000)})
    for step in range(2):
        checkpointer.save(step, state)
    end()


def go_on_with_what_is_described(folder):
    """Restore in the second attempt from shapes and shardings alone: arrays that all slices hold,
    arrays split over chips, and arrays that each host has for itself."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = kinetic.make_mesh()
    split, everywhere = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    whole = np.arange(2**20, dtype=np.float32).reshape(1024, 1024)

    def init():
        shared = {"w": jnp.asarray(whole), "rate": jnp.asarray(0.5), "key": jax.random.key(3)}
        return shared | {"own": jnp.ones(3)}

    where = {"w": split, "rate": everywhere, "key": everywhere}
    described = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=where.get(name))
        for name, each in jax.eval_shape(init).items()
    }
    make = jax.jit(lambda: {name: init()[name] for name in where}, out_shardings=where)
    results = []
    for local_every in (None, 1):
        tiers = {"every": 100 if local_every else 1, "local_every": local_every}
        with kinetic.Checkpointer(Path(folder, str(local_every)), **tiers) as ckpt:
            state, start = ckpt.restore(described, init=lambda: make() | {"own": jnp.ones(3)})
            if kinetic.attempt() == 1:
                state |= {name: state[name] + 1 for name in ("w", "rate", "own")}
                ckpt.save(1, state)
                ckpt.wait()
                continue
        right = all((s.data == whole[s.index] + 1).all() for s in state["w"].addressable_shards)
        laid_out = [state[name].sharding == where[name] for name in ("w", "rate")]
        alone = state["own"].tolist(), state["rate"].weak_type
        results.append((start, ckpt.restored.tier, bool(right), laid_out, alone))
    if kinetic.attempt() == 1:
        raise OSError("once more")
    return results
