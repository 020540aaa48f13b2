"""Continue on one slice when the other is lost, and grow back when it returns.

    python examples/elastic.py

Two slices train together and save with `kinetic.Checkpointer`. After step 12, a host of slice 1 is
killed, like by the loss of its machine. The job shrinks to slice 0 and restores step 10. When slice
1 is back, `save` saves the present step and ends the attempt; the next attempt uses both slices.

A simulated slice returns after KINETIC_SLICE_AWAY_S seconds, by default at once.
"""

import os
import shutil
import tempfile

import kinetic

os.environ.setdefault("KINETIC_SLICE_AWAY_S", "4")
FOLDER = tempfile.mkdtemp(prefix="kinetic-elastic-")


@kinetic.run(
    accelerator="cpu:4", slices=(1, 2), on_slice_loss="shrink", max_failures=3, output_dir=FOLDER
)
def train(steps, lost_after):
    import signal
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = kinetic.make_mesh(dcn={"data": -1}, ici={"fsdp": -1})
    split = NamedSharding(mesh, P("fsdp"))  # weights: split within a slice, equal on all
    batch = NamedSharding(mesh, P(("data", "fsdp")))  # examples: spread over all devices
    print(f"attempt {kinetic.attempt()}: mesh {dict(mesh.shape)}", flush=True)

    @jax.jit
    def make_weights():
        return jax.lax.with_sharding_constraint(jnp.zeros((32, 8)), split)

    def make_batch(step):
        return np.random.default_rng(step).standard_normal((256, 32), np.float32)

    @jax.jit
    def train_step(weights, x):
        x = jax.lax.with_sharding_constraint(x, batch)
        loss = lambda w: jnp.mean((x @ w - jnp.sin(x[:, :8])) ** 2)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.lax.with_sharding_constraint(weights - 0.5 * gradient, split), value

    with kinetic.Checkpointer(every=5, local_every=None) as checkpoints:
        state, first = checkpoints.restore({"weights": make_weights()})
        step, value = first - 1, float("nan")  # No step is left if slice 1 returns after the last.
        print(f"begins at step {first} on {kinetic.num_slices()} of 2 slices", flush=True)
        for step in range(first, steps):
            state["weights"], value = train_step(state["weights"], make_batch(step))
            value = float(value)
            if kinetic.attempt() == 1 and step == lost_after:
                checkpoints.wait()
                multihost_utils.sync_global_devices("the last checkpoint is committed")
                if kinetic.slice_index() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            checkpoints.save(step, state)  # Also ends the attempt once slice 1 is back.
            if kinetic.num_slices() == 1:
                time.sleep(0.2)  # Slower on one slice.
    return kinetic.attempt(), kinetic.num_slices(), step, value


if __name__ == "__main__":
    try:
        attempt, slices, last, value = train(steps=40, lost_after=12)
        print(f"attempt {attempt} did step {last} on {slices} slices: loss {value:.4f}")
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)
