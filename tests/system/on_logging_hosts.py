"""Functions that log metrics. Hosts import this module instead of the tests: importing pytest would
take longer than the job."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import kinetic

FIRST_STEPS = 40


def log_until_killed(folder):
    """Log step after step until the host is killed; the second attempt starts at an earlier step,
    20, and returns."""
    host, attempt = int(os.environ["KINETIC_HOST_INDEX"]), kinetic.attempt()
    if attempt == 1:
        for step in range(10**9):
            kinetic.log(step=step, loss=100.0 * host + attempt)
            time.sleep(0.01)
    for step in range(20, FIRST_STEPS):
        kinetic.log(step=step, loss=100.0 * host + attempt)
    return attempt


def log_and_raise():
    """Log a loss of 1, then NaN, and raise: the error must name the last value."""
    kinetic.log(step=0, loss=1.0)
    kinetic.log(step=1, loss=float("nan"))
    raise ArithmeticError("the loss is no number")


def log_what_jax_computes():
    """Log arrays that JAX is still computing, on one device and on all."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    parts = jax.make_array_from_callback(
        (jax.device_count(),),
        NamedSharding(mesh, PartitionSpec("data")),
        lambda part: np.arange(jax.device_count(), dtype=np.float32)[part],
    )
    total = jax.jit(lambda x, n: (jnp.sum(x) * n, n + 1))
    step = jnp.int32(0)
    for _ in range(10):
        loss, following = total(parts, step)
        kinetic.log(step=step, loss=loss, own=jnp.bfloat16(1.5), shape=jnp.ones((1,)))
        step = following
    return jax.process_index()


def log_while_jax_waits(marker):
    """Log a value for which JAX needs host 1, which computes it only after `log` has returned on
    host 0. Return whether the value was ready then."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    parts = jax.make_array_from_callback(
        (jax.device_count(),),
        NamedSharding(mesh, PartitionSpec("data")),
        lambda part: np.ones(jax.device_count(), dtype=np.float32)[part],
    )
    total = jax.jit(jnp.sum)
    total(parts).block_until_ready()
    if jax.process_index():
        while not Path(marker).exists():
            time.sleep(0.01)
    value = total(parts)
    kinetic.log(step=3, loss=value)
    was_ready = value.is_ready()
    Path(marker).touch()
    return was_ready


def log_lost_arrays():
    """Log arrays that are donated or deleted before kinetic can read them."""
    import jax
    import jax.numpy as jnp

    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    for step in range(100):
        donated, deleted = jnp.float32(0.5), jnp.float32(0.5)
        kinetic.log(step=step, donated=donated, deleted=deleted, rate=0.5)
        donate(donated)
        deleted.delete()


def log_where_it_cannot_work():
    """Call `log` within a jitted function, which raises an error."""
    import jax

    jax.jit(lambda x: kinetic.log(step=0, loss=x))(1.0)


def log_from_everywhere():
    """Log in a child program, in a forked child, and in the processes of a pool."""
    program = "import kinetic; kinetic.log(step=1, program=1.0)"
    subprocess.run([sys.executable, "-c", program], check=True)
    pid = os.fork()
    if pid == 0:
        kinetic.log(step=2, fork=1.0)
        time.sleep(5)
        os._exit(0)
    os.waitpid(pid, 0)
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        list(pool.map(log_in_a_pool, range(3, 9)))


def log_in_a_pool(step):
    """Log in a process of a pool, which ends without exit handlers."""
    kinetic.log(step=step, pool=1.0)


def train_elastically(folder):
    """Log steps 0, 1, …; each attempt saves its sixth step, from which the next one continues.
    Attempt 2 returns."""
    import jax

    attempt, saved = kinetic.attempt(), Path(folder, "saved")
    start = int(saved.read_text()) if saved.exists() else 0
    for step in range(start, 10**9):
        kinetic.log(step=step, loss=float(attempt), slices=kinetic.num_slices())
        if step == start + 5 and jax.process_index() == 0:
            saved.write_text(str(step))
        if attempt == 2 and step == start + 30:
            return kinetic.num_slices()
        time.sleep(0.02)
    return None


def fit_a_model():
    """Fit a model for two epochs of four batches."""
    import keras
    import numpy as np

    import kinetic.keras

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    callbacks = [kinetic.keras.Metrics()]
    data = {"validation_data": (x, y), "batch_size": 10, "verbose": 0}
    one = model.fit(x, y, epochs=2, callbacks=callbacks, **data)
    two = model.fit(x, y, epochs=1, callbacks=[kinetic.keras.Metrics(each_batch=False)], **data)
    return {name: one.history[name] + two.history[name] for name in one.history}


def save_steps(folder):
    """Save steps with a Checkpointer, and call no `kinetic.log`."""
    import numpy as np

    with kinetic.Checkpointer(folder, local_every=None, at_least_every=None) as checkpointer:
        state, start = checkpointer.restore({"w": np.zeros(3)})
        for step in range(start, 30):
            checkpointer.save(step, state)
            time.sleep(0.05)


def log_now_and_then(steps):
    """Log a step per second with almost no processor time, like a host whose accelerator does the
    work."""
    for step in range(steps):
        kinetic.log(step=step, loss=1.0)
        time.sleep(1)
    return "trained"


def train_in_two_attempts(folder):
    """Train 40 steps with a Checkpointer that saves every tenth; the first attempt raises after
    step 25, and the second continues after step 20."""
    import jax
    import jax.numpy as jnp

    with kinetic.Checkpointer(folder, every=10, local_every=None) as checkpointer:
        state, start = checkpointer.restore({"w": jnp.zeros(1000)})
        update = jax.jit(lambda state: {"w": jnp.sin(state["w"]) + 1})
        for step in range(start, 40):
            state = jax.block_until_ready(update(state))
            time.sleep(0.05)
            kinetic.log(step=step, loss=1.0)
            checkpointer.save(step, state)
            if step == 25 and kinetic.attempt() == 1:
                raise ArithmeticError("the loss is no number")
    return start
