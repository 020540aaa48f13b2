"""Decoder-only transformers of 1, 8 and 70 billion parameters as shapes, with a training step: Flax
NNX, Optax, fsdp x tensor parallelism, rematerialized layers.

In: the name of a size, a mesh. Out: a jitted step and the shapes of its arguments. No arrays of the
model's size are created.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Size:
    """The dimensions of a model."""

    layers: int
    width: int
    hidden: int
    heads: int
    groups: int
    vocabulary: int
    head: int = 128


SIZES = {
    "1B": Size(16, 2048, 8192, 16, 8, 32_768),
    "8B": Size(32, 4096, 14_336, 32, 8, 128_256),
    "70B": Size(80, 8192, 28_672, 64, 8, 128_256),
}
LENGTH = 2048
BATCH = P(("data", "fsdp"))


class Block(nnx.Module):
    """Causal attention, then a gated layer."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        def weights(*shape: int) -> nnx.Param:
            return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, jnp.bfloat16))

        narrow, wide = size.groups * size.head, size.heads * size.head
        self.size = size
        self.query, self.out = weights(size.width, wide), weights(wide, size.width)
        self.key, self.value = weights(size.width, narrow), weights(size.width, narrow)
        self.gate, self.up = weights(size.width, size.hidden), weights(size.width, size.hidden)
        self.down = weights(size.hidden, size.width)
        self.norms = nnx.Param(jnp.ones((2, size.width), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self._attend(normalize(x, self.norms[0]))
        y = normalize(x, self.norms[1])
        return x + (jax.nn.silu(y @ self.gate[...]) * (y @ self.up[...])) @ self.down[...]

    def _attend(self, x: jax.Array) -> jax.Array:
        def split(projected: jax.Array, heads: int) -> jax.Array:
            return projected.reshape(*x.shape[:2], heads, self.size.head)

        attended = jax.nn.dot_product_attention(
            split(x @ self.query[...], self.size.heads),
            split(x @ self.key[...], self.size.groups),
            split(x @ self.value[...], self.size.groups),
            is_causal=True,
        )
        return attended.reshape(*x.shape[:2], -1) @ self.out[...]


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


class Transformer(nnx.Module):
    """Blocks as one stack, over which a scan runs."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: Block(size, rngs=rngs), in_axes=0)
        self.blocks = make(rngs.split(size.layers))
        table = jax.random.normal(rngs.params(), (size.vocabulary, size.width), jnp.bfloat16)
        self.embedding = nnx.Param(0.02 * table)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def go_through(x: jax.Array, block: Block) -> jax.Array:
            return jax.lax.with_sharding_constraint(block(x), BATCH)

        x = go_through(self.embedding[...][tokens], self.blocks)
        return x @ self.embedding[...].T


OPTIMIZER = optax.adamw(1e-4)


def make_step(graph: Any) -> Any:
    """Return a jitted training step, which donates its state."""

    def step(params: Any, optimizer: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(tokens[:, :-1]).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.mean(losses)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, optimizer = OPTIMIZER.update(grads, optimizer, params)
        return optax.apply_updates(params, updates), optimizer, loss

    return jax.jit(step, donate_argnums=(0, 1))


def build(name: str, mesh: Mesh) -> tuple[Any, ...]:
    """Return a model's training step and its arguments, split over "fsdp" and "tensor", with one
    sequence for each group of devices that share it."""
    size = SIZES[name]
    model = nnx.eval_shape(lambda: Transformer(size, rngs=nnx.Rngs(0)))
    graph, params = nnx.split(model)

    def spread(shape: Any) -> Any:
        split = NamedSharding(mesh, spec_of(shape.shape, size))
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=split)

    params = jax.tree.map(spread, params)
    optimizer = jax.tree.map(spread, jax.eval_shape(OPTIMIZER.init, params))
    sequences = mesh.size // mesh.shape["tensor"]
    tokens = jax.ShapeDtypeStruct(
        (sequences, LENGTH + 1), jnp.int32, sharding=NamedSharding(mesh, BATCH)
    )
    return make_step(graph), params, optimizer, tokens


def spec_of(shape: tuple[int, ...], size: Size) -> P:
    """Split a matrix: the model's width over "fsdp", the other dimension over "tensor"."""
    if len(shape) < 2 or shape[-2] == 2:
        return P()
    into_width = shape[-1] == size.width and shape[-2] != size.width
    last = ("tensor", "fsdp") if into_width else ("fsdp", "tensor")
    return P(*[None] * (len(shape) - 2), *last)


def count_parameters(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
