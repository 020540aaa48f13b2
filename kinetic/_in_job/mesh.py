"""A mesh over several slices: some axes between slices, over the data center's network (DCN), the
others within each, over its own interconnect (ICI).

In: the sizes of the axes, JAX's devices. Out: a `jax.sharding.Mesh`.

The devices of a slice are laid out by JAX's `mesh_utils.create_device_mesh`, which knows how chips
are connected. Axes as in `mesh_utils.create_hybrid_device_mesh`; here they have names.
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
"""As the size of an axis: the rest, given the other axes."""


def make_mesh(
    dcn: Mapping[str, int] | None = None,
    ici: Mapping[str, int] | None = None,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Return a mesh whose axes `dcn` go over slices, and whose axes `ici` stay within one.

    The same on simulated and on real slices, and for those of `kinetic.compile_for`. The axes keep
    their order, those of `dcn` first; an axis in both has the product of its sizes, slice by slice.

    Args:
        dcn: sizes of the axes between slices, for example `{"data": 2}`; their product is the
            number of slices. One of them may be -1, for the rest. By default one axis,
            "data", over all slices.
        ici: sizes of the axes within a slice, for example `{"fsdp": 4, "tensor": 4}`; their product
            is the number of devices of a slice. By default one axis, "fsdp", over all of them.
        devices: the devices to use; by default those of `jax.devices()` whose slice takes part:
            all, unless an elastic job with a single controller has lost one.

    Raises:
        UsageError: the sizes do not fit the slices of this job.
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
    """The devices as an array with one dimension for each name."""
    import numpy as np
    from jax.experimental import mesh_utils

    outer = [between.get(name, 1) for name in names]
    inner = [within.get(name, 1) for name in names]
    rank = len(names)
    # As `jax.make_mesh` does: 64 x 4 on 16 x 16 chips parts an axis of the torus.
    lay_out = partial(mesh_utils.create_device_mesh, inner, allow_split_physical_axes=True)
    laid = np.stack([lay_out(devices) for devices in slices])
    # From (*outer, *inner) to outer and inner of each axis side by side.
    order = [dimension for axis in range(rank) for dimension in (axis, rank + axis)]
    return (
        laid.reshape(*outer, *inner)
        .transpose(order)
        .reshape([many * few for many, few in zip(outer, inner, strict=True)])
    )


def _find_devices() -> Sequence[Any]:
    """The devices of this job, or of the slices that are compiled for."""
    target = topologies.current.get()
    if target is not None:
        return topologies.describe(target)
    import jax

    return _select_present(jax.devices())


def _select_present(devices: Sequence[Any]) -> Sequence[Any]:
    """Those devices whose slice takes part; a single controller sees the others as well."""
    taking_part = read_variable(SLICES)
    if not taking_part:
        return devices
    return [device for device in devices if str(device.slice_index) in taking_part.split(",")]


def _by_slice(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice, in the order of slices.

    Devices know their slice, except those of processors in some places: there, slices have equally
    many processes, or one process has them all, in the order of slices.
    """
    count = num_slices()
    indices = {getattr(device, "slice_index", 0) for device in devices}
    if count > 1 and len(indices) == 1:
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        size, rest = divmod(len(ordered), count)
        if rest:
            raise UsageError(
                f"{len(ordered)} devices are no {count} equal slices: leave devices= away."
            )
        return [ordered[start : start + size] for start in range(0, len(ordered), size)]
    slices = [
        [d for d in devices if getattr(d, "slice_index", 0) == index] for index in sorted(indices)
    ]
    if len({len(index) for index in slices}) != 1:
        sizes = ", ".join(str(len(index)) for index in slices)
        raise UsageError(f"The slices have {sizes} devices: a mesh needs equally many of each.")
    return slices


def _fill_rest(
    option: str, axes: Mapping[str, int], total: int, noun: str, where: str = ""
) -> dict[str, int]:
    """The sizes with `REST` filled in."""
    product = math.prod(size for size in axes.values() if size != REST)
    open_ = [name for name, size in axes.items() if size == REST]
    wrong = [size for size in axes.values() if size < 1 and size != REST]
    filled = {
        name: total // product if name in open_ and product else n for name, n in axes.items()
    }
    if wrong or len(open_) > 1 or math.prod(filled.values()) != total:
        are = f"are {total} {noun}s" if total > 1 else f"is 1 {noun}"
        raise UsageError(
            f"{option}={dict(axes)} does not fit: there {are}{where}, and the product "
            f"of the sizes must be {total}; one of them may be -1, for what the others leave."
        )
    return filled
