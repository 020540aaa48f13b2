"""`psum_scatter` between simulated hosts waits for a host that is 30 s late, unlike plain Gloo."""

from __future__ import annotations

import os
import subprocess
import sys

import kinetic

PROGRAM = """
import sys
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from kinetic._host.worker import joining

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
both = ("a", "b")


def program(axis, **options):
    def scatter(x):
        own = x + jax.lax.axis_index(both).astype(x.dtype)
        return jax.lax.psum_scatter(own, axis, **options)

    checked = "axis_index_groups" not in options
    return jax.jit(jax.shard_map(
        scatter, mesh=mesh, in_specs=P(both), out_specs=P(both), check_vma=checked
    ))


def unreduced():
    everywhere = jax.make_mesh((4,), ("c",), axis_types=(jax.sharding.AxisType.Explicit,))

    def scatter(x):
        own = jax.lax.pcast(x * (1 + jax.lax.axis_index("c")), "c", to="unreduced")
        return jax.lax.psum_scatter(own, "c", tiled=True)

    return jax.shard_map(scatter, mesh=everywhere, in_specs=P(), out_specs=P("c"))


def cases():
    yield unreduced(), jnp.arange(8.0)
    yield program(both, tiled=True), jnp.arange(96.0).reshape(32, 3)
    yield program(both), jnp.arange(48.0).reshape(16, 3)
    small = jnp.arange(16, dtype=jnp.int8).reshape(4, 4)
    yield program("b", scatter_dimension=1, tiled=True), small
    yield program("a", tiled=True), jnp.arange(16, dtype=jnp.bfloat16)
    yield jax.grad(lambda x: (program("b", tiled=True)(x) ** 2).sum()), jnp.arange(8.0)


plain = [call(x) for call, x in cases()]
joining.exchange_in_scatter()
for before, (call, x) in zip(plain, cases()):
    after = call(x)
    assert (before.dtype, before.shape) == (after.dtype, after.shape)
    np.testing.assert_array_equal(before.astype(jnp.float32), after.astype(jnp.float32))
    text = jax.jit(call).lower(x).as_text()
    print("reduce_scatter" in text, "all_to_all" in text)
"""


def test_it_gives_the_same_numbers_by_an_exchange():
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    line = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["False True"] * 6, done.stderr


def test_a_host_that_is_late_is_waited_for():
    @kinetic.run(accelerator="cpu:1", slices=2)
    def train():
        import time

        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

        def step(weights):
            part = jax.lax.psum_scatter(2 * weights, "d", tiled=True) / 2
            return weights - 0.1 * jax.lax.all_gather(part, "d", tiled=True)

        everywhere = PartitionSpec()
        stepped = jax.jit(
            jax.shard_map(
                step, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
            )
        )
        weights = jax.device_put(jnp.ones(8), NamedSharding(mesh, everywhere))
        for number in range(3):
            weights = stepped(weights)
            weights.block_until_ready()
            if number == 1 and jax.process_index() == 0:
                time.sleep(32)  # longer than Gloo waits
        return float(weights[0])

    assert round(train(), 6) == 0.512
