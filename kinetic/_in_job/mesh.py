"""`kinetic.make_mesh`: a JAX mesh over several slices.

Some axes run between slices, over the data center's network (DCN), the rest within each slice, over
its interconnect (ICI). JAX's `mesh_utils.create_device_mesh`, which knows how chips are connected,
lays out the devices of each slice. This is `mesh_utils.create_hybrid_device_mesh` with named axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kinetic._compile import topologies
from kinetic._core.tracebacks import hide_frames
from kinetic._in_job.slices import SLICES, num_slices, read_variable
from kinetic.errors import UsageError

if TYPE_CHECKING:
    from jax.sharding import Mesh

REST = -1
"""Size of an axis that takes all devices, or slices, that the other axes leave over."""


def make_mesh(
    dcn: Mapping[str, int] | None = None,
    ici: Mapping[str, int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Make a mesh with some axes between slices and some within each slice.

    Works the same on real slices, on simulated ones and under `kinetic.compile_for`. The axes of
    `dcn` come first, then those of `ici`. An axis in both has the product of its two sizes.

    Args:
        dcn: Sizes of the axes between slices. Their product is the number of slices; one of them
            may be -1, for the rest. By default one axis, "data", over all slices.
        ici: Sizes of the axes within a slice. Their product is the number of devices per slice;
            one of them may be -1. By default one axis, "fsdp", over all devices of a slice.
        devices: The devices to use. By default all of `jax.devices()`, without those of slices that
            an elastic job with a single controller has lost.

    Returns:
        A mesh with one axis per name.

    Raises:
        UsageError: The sizes do not fit the slices of this job.

    Example:
        ```python
        mesh = kinetic.make_mesh(dcn={"data": 2}, ici={"fsdp": 4, "tensor": 4})  # 2 slices of 16
        ```
    """
    import jax

    with hide_frames:
        slices = _by_slice(_find_devices() if devices is None else devices)
        between = _fill_rest("dcn", {"data": REST} if dcn is None else dcn, len(slices), "slice")
        devices_per_slice = len(slices[0])
        within = _fill_rest(
            "ici",
            {"fsdp": REST} if ici is None else ici,
            devices_per_slice,
            "device",
            " in each slice",
        )
    names = list(dict.fromkeys([*between, *within]))
    return jax.sharding.Mesh(_lay_out_devices(slices, names, between, within), tuple(names))


def _lay_out_devices(
    slices: Sequence[Sequence[Any]],
    names: Sequence[str],
    between: Mapping[str, int],
    within: Mapping[str, int],
) -> Any:
    """Arrange the devices in an array with one dimension for each name."""
    import numpy as np
    from jax.experimental import mesh_utils

    outer = [between.get(name, 1) for name in names]
    inner = [within.get(name, 1) for name in names]
    rank = len(names)
    # Split physical axes, as `jax.make_mesh` does: without it, 64 x 4 on 16 x 16 chips is
    # impossible.
    lay_out = partial(mesh_utils.create_device_mesh, inner, allow_split_physical_axes=True)
    stacked = np.stack([lay_out(devices) for devices in slices])
    # From (*outer, *inner) to (outer[0], inner[0], outer[1], inner[1], …).
    order = [dimension for axis in range(rank) for dimension in (axis, rank + axis)]
    return (
        stacked.reshape(*outer, *inner)
        .transpose(order)
        .reshape([between * within for between, within in zip(outer, inner, strict=True)])
    )


def _find_devices() -> Sequence[Any]:
    """Return the devices of this job, or those that `kinetic.compile_for` compiles for."""
    target = topologies.current.get()
    if target is not None:
        return topologies.describe(target)
    import jax

    return _select_taking_part(jax.devices())


def _select_taking_part(devices: Sequence[Any]) -> Sequence[Any]:
    """Drop the devices of lost slices. JAX still lists them in a job with a single controller."""
    taking_part = read_variable(SLICES)
    if not taking_part:
        return devices
    return [device for device in devices if str(device.slice_index) in taking_part.split(",")]


def _by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    """Group devices by slice, in the order of slices.

    CPU devices of simulated slices may all have the same `slice_index`: they are split evenly, in
    the order of processes and ids.
    """
    count = num_slices()
    indices = {getattr(device, "slice_index", 0) for device in devices}
    if count > 1 and len(indices) == 1:
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        size, rest = divmod(len(ordered), count)
        if rest:
            raise UsageError(
                f"{len(ordered)} devices cannot be split into {count} equal slices. Omit devices= "
                "to use all devices of the job."
            )
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]
    slices = [
        [d for d in devices if getattr(d, "slice_index", 0) == index] for index in sorted(indices)
    ]
    if len({len(members) for members in slices}) != 1:
        sizes = ", ".join(str(len(members)) for members in slices)
        raise UsageError(f"devices= must have the same number from each slice; got {sizes}.")
    return slices


def _fill_rest(
    option: str, axes: Mapping[str, int], total: int, noun: str, where: str = ""
) -> dict[str, int]:
    """Replace `REST` by the size that makes the product equal `total`.

    Raises:
        UsageError: The sizes do not fit, or several of them are `REST`.
    """
    product = math.prod(size for size in axes.values() if size != REST)
    open_ = [name for name, size in axes.items() if size == REST]
    wrong = [size for size in axes.values() if size < 1 and size != REST]
    filled = {
        name: total // product if name in open_ and product else n for name, n in axes.items()
    }
    if wrong or len(open_) > 1 or math.prod(filled.values()) != total:
        are = f"are {total} {noun}s" if total > 1 else f"is 1 {noun}"
        raise UsageError(
            f"{option}={dict(axes)} does not fit: there {are}{where}, and the product of the sizes "
            f"must be {total}. One size may be -1, for the rest."
        )
    return filled
