"""Functions of jobs in which one process controls the devices of all slices. Hosts import this
module instead of the tests: importing pytest would take longer than the job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import kinetic

STEPS = 24


def train(folder, pause_s, kills=(), grows=False):
    """Train a layer on all slices, and append each step to the file "steps". At (attempt, step) in
    `kills`, wait until a slice is lost. With `grows`, wait near the end until the slice is back."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    notes = Path(folder, "steps")
    mesh = kinetic.make_mesh()
    split, rows = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "fsdp"), ("data",))
    )
    whole = 0.1 * np.random.default_rng(0).standard_normal((48, 16), np.float32)
    weights = jax.device_put(whole, split)

    @jax.jit
    def step(weights, x, y):
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - y) ** 2))(weights)
        return weights - 0.3 * slope, loss

    with kinetic.Checkpointer(every=5, local_every=2) as ckpt:
        weights, first = ckpt.restore(weights)
        for number in range(first, STEPS):
            draw = np.random.default_rng(number)
            batch = [draw.normal(size=(24, n)).astype("float32") for n in (48, 16)]
            weights, loss = step(weights, *(jax.device_put(each, rows) for each in batch))
            note = {"step": number, "loss": float(loss), "slices": kinetic.num_slices()}
            note |= {"attempt": kinetic.attempt(), "pid": os.getpid()}
            with notes.open("a") as file:
                file.write(json.dumps(note) + "\n")
            if [kinetic.attempt(), number] in kills:
                while jax.block_until_ready(weights) is not None:  # Raises once a slice is killed.
                    time.sleep(0.01)
            while grows and number == STEPS - 3 and kinetic.attempt() == 2:
                if kinetic.should_reform():
                    break
                time.sleep(0.02)
            ckpt.save(number, weights)
            time.sleep(pause_s)
    return kinetic.attempt(), kinetic.num_slices(), np.asarray(weights).tolist()


def hold(folder, held=()):
    """Note that the function has begun. In the attempts in `held`, wait with an array on all slices
    until one slice is lost."""
    import jax
    import numpy as np

    split = jax.sharding.NamedSharding(kinetic.make_mesh(), jax.sharding.PartitionSpec("data"))
    array = jax.device_put(np.ones(24), split)
    attempt = kinetic.attempt()
    with Path(folder, "steps").open("a") as file:
        file.write(json.dumps({"attempt": attempt, "step": 0}) + "\n")
    while attempt in held and jax.block_until_ready(array) is not None:
        time.sleep(0.01)
    return attempt


def save_and_lose(folder, pause_s):
    """Train; in each of the first three attempts, wait for the loss of a slice just after the save
    of a persistent checkpoint has begun."""
    original = kinetic.Checkpointer.save

    def save(self, step, state, **more):
        tiers = original(self, step, state, **more)
        if step == 5 * kinetic.attempt() and step <= 15:
            import jax

            while jax.block_until_ready(state) is not None:
                time.sleep(0.001)
        return tiers

    kinetic.Checkpointer.save = save
    try:
        return train(folder, pause_s)
    finally:
        kinetic.Checkpointer.save = original


def raising(folder):
    Path(folder, f"call-{kinetic.attempt()}").touch()
    raise LookupError("own")


async def asynchronous():
    import asyncio

    await asyncio.sleep(0)
    return kinetic.num_slices()


def world():
    import jax

    return jax.process_count(), jax.device_count(), jax.local_device_count()


def train_a_line(steps):
    """Fit a line on all devices, with a share of the data from each process."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split, same = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    x = jnp.linspace(-1, 1, 64)
    part = [half.reshape(jax.process_count(), -1)[jax.process_index()] for half in (x, 3 * x + 1)]
    xs, ys = (jax.make_array_from_process_local_data(split, each) for each in part)

    @jax.jit
    def step(params, xs, ys):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((p[0] * xs + p[1] - ys) ** 2))(params)
        return [p - 0.5 * g for p, g in zip(params, grads, strict=True)], value

    params, losses = [jax.device_put(jnp.zeros(()), same) for _ in range(2)], []
    for _ in range(steps):
        params, value = step(params, xs, ys)
        losses.append(float(value))
    return losses


def fail_once(marker):
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), 9)
    return world()


def slices():
    import jax
    from jax.experimental import mesh_utils

    per_slice = jax.device_count() // 2
    mesh = mesh_utils.create_hybrid_device_mesh((1, per_slice), (2, 1))
    return [[device.slice_index for device in row] for row in mesh]


def has_slices():
    import jax

    return hasattr(jax.devices()[0], "slice_index")
