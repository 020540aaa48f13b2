"""Restoring what several hosts need alike: one replica of it is read, and sent to the others.

In: arrays as they are to be laid out. Out: who reads which of them; the arrays, on all devices.

In data-parallel training the slices are replicas of each other. Reading is what takes time with a
bucket, and the devices' network is quicker, so only the hosts that have the first replica read.
Every array says for itself, by its sharding, whether it has replicas on other hosts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_AT_ONCE_BYTES = 1 << 28
"""How much is sent at a time, on each device: it lies there twice for a moment."""
_LEAST_BYTES = 1 << 20
"""Smaller arrays are quicker read than sent."""
_SIZE = re.compile(r"\d+")


class ArraySource(NamedTuple):
    """Where an array comes from.

    Attributes:
        axis: of the mesh; along it, all devices have the same content.
        sharding: of the array over the devices of the first replica.
        readers: the processes that have these devices.
    """

    axis: str
    sharding: Any
    readers: frozenset[int]


def source_of(like: Any) -> ArraySource | None:
    """Return who reads an array for all hosts; None if each host reads what it needs.

    Args:
        like: an array, or a description of one, as it is to be laid out.
    """
    import jax

    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or _integer_type_of(like.dtype) is None:
        return None
    size_bytes = like.size * like.dtype.itemsize
    if size_bytes < _LEAST_BYTES or sharding.memory_kind not in (None, _usual_memory(sharding)):
        return None
    mesh = sharding.mesh
    used = {name for axes in sharding.spec for name in _names(axes)}
    everyone = _processes(mesh.devices)
    for number, axis in enumerate(mesh.axis_names):
        first = mesh.devices.take([0], axis=number)
        readers = _processes(first)
        if axis not in used and readers < everyone:
            few = jax.sharding.Mesh(first, mesh.axis_names)
            return ArraySource(axis, jax.sharding.NamedSharding(few, sharding.spec), readers)
    return None


def _usual_memory(sharding: Any) -> str:
    (device, *_) = sharding.mesh.devices.flat
    return str(device.default_memory().kind)


def _names(axes: Any) -> tuple[str, ...]:
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def _processes(devices: Any) -> frozenset[int]:
    return frozenset(device.process_index for device in devices.flat)


def spread_arrays(
    likes: Sequence[Any], sources: Sequence[ArraySource], read: Sequence[Any]
) -> list[Any]:
    """Return the arrays on all their devices; collective.

    Args:
        likes: as they are to be laid out.
        sources: where they come from.
        read: what this process has read of each, and is freed; None where it is no reader.
    """
    arrays: list[Any] = []
    for start, end in _at_once(likes, sources):
        arrays += _spread_group(likes[start:end], sources[start:end], read[start:end])
        for array in read[start:end]:
            if array is not None:
                array.delete()
    return arrays


def _at_once(likes: Sequence[Any], sources: Sequence[ArraySource]) -> Iterator[tuple[int, int]]:
    """Rows of arrays on the same devices that are sent together."""
    start = size = 0
    for number, (like, _) in enumerate(zip(likes, sources, strict=True)):
        more = like.dtype.itemsize * math.prod(like.sharding.shard_shape(like.shape))
        apart = like.sharding.mesh != likes[start].sharding.mesh
        if number > start and (apart or size + more > _AT_ONCE_BYTES):
            yield start, number
            start, size = number, 0
        size += more
    if likes:
        yield start, len(likes)


def _spread_group(
    likes: Sequence[Any], sources: Sequence[ArraySource], read: Sequence[Any]
) -> list[Any]:
    import jax

    whole = [_stack_replicas(*each) for each in zip(likes, sources, read, strict=True)]
    shardings = [_strip_axis_types(like.sharding) for like in likes]

    def merge(arrays: list[Any]) -> list[Any]:
        return [_sum_replicas(array) for array in arrays]

    merged = jax.jit(merge, out_shardings=shardings)(whole)
    return [jax.device_put(array, like.sharding) for array, like in zip(merged, likes, strict=True)]


def _strip_axis_types(sharding: Any) -> Any:
    """The same over a mesh whose axes are not part of the arrays' types."""
    import jax

    mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def _stack_replicas(like: Any, source: ArraySource, read: Any) -> Any:
    """An array with one replica after the other: the first is what was read, the others are
    zero."""
    import jax
    import numpy as np

    plain = _strip_axis_types(like.sharding)
    over = jax.sharding.NamedSharding(
        plain.mesh, jax.sharding.PartitionSpec(source.axis, *plain.spec)
    )
    shape = (plain.mesh.shape[source.axis], *like.shape)
    shards = {} if read is None else {each.device: each.data for each in read.addressable_shards}
    zeros = np.zeros(over.shard_shape(shape), like.dtype)
    parts = [
        shards[device][None] if device in shards else jax.device_put(zeros, device)
        for device in over.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(shape, over, parts)


def _sum_replicas(stacked: Any) -> Any:
    """The replicas' sum, bit by bit: -0.0 and every NaN stay what they are."""
    import jax

    bits = _integer_type_of(stacked.dtype)
    if stacked.dtype == bool:
        return stacked.astype(bits).sum(axis=0, dtype=bits).astype(bool)
    as_bits = jax.lax.bitcast_convert_type(stacked, bits)
    return jax.lax.bitcast_convert_type(as_bits.sum(axis=0, dtype=bits), stacked.dtype)


def _integer_type_of(dtype: Any) -> Any:
    """The type of integers with as many bits; None for types that are not sent."""
    import numpy as np

    types = {"bool": np.uint8, "8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
    name = np.dtype(dtype).name
    size = _SIZE.search(name)
    return None if name.startswith("complex") else types.get(size[0] if size else name)
