"""Restoring arrays that are replicated on several hosts: one replica is read and sent to the rest.

In data-parallel training the slices are replicas of each other. Reading from a bucket is slow and
the devices' network is fast, so only the hosts with the first replica read. The sharding of each
array tells whether it has replicas on other hosts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

_AT_ONCE_BYTES = 1 << 28
"""Largest transfer in bytes per device. During the transfer, each device holds this data twice."""
_LEAST_BYTES = 1 << 20
"""Smallest array in bytes that is sent. Smaller arrays are read by every host, which is faster."""
_SIZE = re.compile(r"\d+")


class ArraySource(NamedTuple):
    """The replica that an array is read from.

    Attributes:
        axis: Axis of the mesh along which the devices have equal content.
        sharding: Sharding of the array over the devices of the first replica.
        readers: Processes that have these devices.
    """

    axis: str
    sharding: Any
    readers: frozenset[int]


def choose_source(like: Any) -> ArraySource | None:
    """Choose the processes that read an array for all; None if each host reads what it needs.

    Args:
        like: An array, or a description of one, with the layout of the result.
    """
    import jax

    sharding = getattr(like, "sharding", None)
    if (
        not isinstance(sharding, jax.sharding.NamedSharding)
        or _find_integer_type(like.dtype) is None
    ):
        return None
    size_bytes = like.size * like.dtype.itemsize
    if size_bytes < _LEAST_BYTES or sharding.memory_kind not in (None, _usual_memory(sharding)):
        return None
    mesh = sharding.mesh
    used = {name for axes in sharding.spec for name in _list_axes(axes)}
    all_processes = _list_processes(mesh.devices)
    for number, axis in enumerate(mesh.axis_names):
        first = mesh.devices.take([0], axis=number)
        readers = _list_processes(first)
        if axis not in used and readers < all_processes:
            replica = jax.sharding.Mesh(first, mesh.axis_names)
            return ArraySource(axis, jax.sharding.NamedSharding(replica, sharding.spec), readers)
    return None


def _usual_memory(sharding: Any) -> str:
    (device, *_) = sharding.mesh.devices.flat
    return str(device.default_memory().kind)


def _list_axes(axes: Any) -> tuple[str, ...]:
    if axes is None:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)


def _list_processes(devices: Any) -> frozenset[int]:
    return frozenset(device.process_index for device in devices.flat)


def spread_arrays(
    likes: Sequence[Any], sources: Sequence[ArraySource], read: Sequence[Any]
) -> list[Any]:
    """Send arrays to all their devices and return them. All hosts must call this.

    Args:
        likes: Arrays, or descriptions, with the layout of the result.
        sources: For each array, the replica that was read.
        read: For each array, the part that this process has read, or None. The parts are freed.
    """
    arrays: list[Any] = []
    for start, end in _group_arrays(likes, sources):
        arrays += _spread_group(likes[start:end], sources[start:end], read[start:end])
        for array in read[start:end]:
            if array is not None:
                array.delete()
    return arrays


def _group_arrays(
    likes: Sequence[Any], sources: Sequence[ArraySource]
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the arrays to send in one transfer: they are on one mesh, and their
    total size is limited."""
    start = size = 0
    for number, (like, _) in enumerate(zip(likes, sources, strict=True)):
        more = like.dtype.itemsize * math.prod(like.sharding.shard_shape(like.shape))
        is_new_mesh = like.sharding.mesh != likes[start].sharding.mesh
        if number > start and (is_new_mesh or size + more > _AT_ONCE_BYTES):
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
    """Return the same sharding on a mesh whose axes have no types, such as `Explicit`."""
    import jax

    mesh = jax.sharding.Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.sharding.NamedSharding(mesh, sharding.spec)


def _stack_replicas(like: Any, source: ArraySource, read: Any) -> Any:
    """Return the replica that was read and zeros for the others, stacked along a new first axis."""
    import jax
    import numpy as np

    plain = _strip_axis_types(like.sharding)
    stacked = jax.sharding.NamedSharding(
        plain.mesh, jax.sharding.PartitionSpec(source.axis, *plain.spec)
    )
    shape = (plain.mesh.shape[source.axis], *like.shape)
    shards = {} if read is None else {part.device: part.data for part in read.addressable_shards}
    zeros = np.zeros(stacked.shard_shape(shape), like.dtype)
    parts = [
        shards[device][None] if device in shards else jax.device_put(zeros, device)
        for device in stacked.addressable_devices
    ]
    return jax.make_array_from_single_device_arrays(shape, stacked, parts)


def _sum_replicas(stacked: Any) -> Any:
    """Sum the replicas as integers, so that -0.0 and every NaN keep their bits."""
    import jax

    bits = _find_integer_type(stacked.dtype)
    if stacked.dtype == bool:
        return stacked.astype(bits).sum(axis=0, dtype=bits).astype(bool)
    as_bits = jax.lax.bitcast_convert_type(stacked, bits)
    return jax.lax.bitcast_convert_type(as_bits.sum(axis=0, dtype=bits), stacked.dtype)


def _find_integer_type(dtype: Any) -> Any:
    """Return the integer type of equal size; None for types that are never sent, like complex."""
    import numpy as np

    types = {"bool": np.uint8, "8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
    name = np.dtype(dtype).name
    size = _SIZE.search(name)
    return None if name.startswith("complex") else types.get(size[0] if size else name)
