"""Two slices: data parallel between them, fully sharded (FSDP) within each.

    python examples/multislice.py

Slices communicate over the data center's network (DCN), the chips of a slice over their own, much
faster interconnect (ICI). So the slices only average gradients, once a step, while the weights are
split within each slice. `kinetic.make_mesh` creates such a mesh on simulated and real slices.
"""

import kinetic


@kinetic.run(accelerator="tpu-v6e-8", slices=2)
def train(steps=20):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = kinetic.make_mesh(dcn={"data": 2}, ici={"fsdp": 8})
    print(f"{kinetic.num_slices()} slices, {jax.process_count()} hosts, mesh {dict(mesh.shape)}")

    split = NamedSharding(mesh, P("fsdp"))  # weights: split within a slice, equal on both
    batch = NamedSharding(mesh, P(("data", "fsdp")))  # examples: spread over all devices

    def make_weights():
        generator = np.random.default_rng(0)
        first = generator.standard_normal((64, 256), np.float32) / 8
        second = generator.standard_normal((256, 8), np.float32) / 16
        return spread(first, split), spread(second, split)

    def make_batch(step):
        x = np.random.default_rng(step).standard_normal((512, 64), np.float32)
        return spread(x, batch), spread(np.sin(x[:, :8]), batch)

    def spread(whole, sharding):
        """Give each device its own part of an array."""
        return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part])

    def loss(weights, x, y):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - y) ** 2)

    @jax.jit
    def train_step(weights, x, y):
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients), value

    weights = make_weights()
    for step in range(steps):
        weights, value = train_step(weights, *make_batch(step))
        if step % 5 == 4:
            print(f"step {step + 1:2d}  loss {float(value):.4f}", flush=True)
    shard = weights[0].addressable_shards[0]
    return float(value), shard.data.shape, weights[0].shape


if __name__ == "__main__":
    value, part, whole = train()
    print(f"loss {value:.3f}; each device holds {part} of {whole}")
