"""Hold a slice, and train on it call by call, with weights that stay on the devices.

    python examples/session.py

Two hosts are held. The first call initializes the weights and compiles a step; the later ones go on
with both. A call that raises leaves them as they are.
"""

import jax
import jax.numpy as jnp

import kinetic


@jax.jit
def step(weights, rate):
    print("compiling")
    return weights - rate * 2 * (weights - 3.0)


@kinetic.run(accelerator="cpu:1", slices=2, keep=True)
def train(steps, rate):
    kept = kinetic.kept
    if not hasattr(kept, "weights"):
        kept.weights = jnp.zeros(2)
    if rate > 1:
        raise ValueError(f"a rate of {rate} would diverge")
    for _ in range(steps):
        kept.weights = step(kept.weights, rate)
    return float(jnp.abs(kept.weights - 3.0).max())


if __name__ == "__main__":
    with kinetic.session("cpu:1", slices=2, name="example", idle_timeout="5m") as session:
        print(f"distance: {train(5, 0.1):.3f}")
        try:
            train(5, 2.0)
        except ValueError as error:
            print(f"refused: {error}")
        print(f"distance: {train(5, 0.1):.3f}")
    session.stop(force=True)
