"""The catalog of slices: their names and machines, derived from the table of families."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kinetic._core.accelerators.families import (
    CPU_DEVICES_MAX,
    FAMILIES,
    GPUS,
    PREFERENCE,
    TPUS,
    Family,
    GpuFamily,
    Machines,
    TpuFamily,
)
from kinetic._core.accelerators.topology import Topology

Shape = tuple[int, ...]


def cpu_slice(devices: int) -> Topology | None:
    """Return the cpu slice with this many virtual devices on one host, or None."""
    if not 1 <= devices <= CPU_DEVICES_MAX:
        return None
    return Topology("cpu" if devices == 1 else f"cpu:{devices}", "cpu", "cpu", (devices,), devices)


def gpu_slice(family: GpuFamily, count: int) -> Topology | None:
    """Return the machine with this many GPUs, or None."""
    machine = dict(family.machines).get(count)
    if machine is None:
        return None
    name = f"gpu-{family.name}" if count == 1 else f"gpu-{family.name}x{count}"
    return Topology(name, "gpu", family.name, (count,), count, machine, family.label)


def tpu_slice(
    family: TpuFamily, shape: Shape, chips_per_host: int | None = None
) -> Topology | None:
    """Return the slice of this shape, or None.

    Args:
        family: the generation of TPU.
        shape: chips along each axis.
        chips_per_host: selects the machines; None for the default ones.
    """
    if is_cube(family, shape):
        # The vendor accepts shapes only with their axes in ascending order.
        shape = tuple(sorted(shape))
    machines = [
        m for m in _find_machines(family, shape) if chips_per_host in (None, m.chips_per_host)
    ]
    if not machines:
        return None
    name = _name_tpu(family, shape, machines[0])
    machine = machines[0]
    return Topology(
        name, "tpu", family.name, shape, machine.chips_per_host, machine.machine_type, family.label
    )


def shape_for(family: TpuFamily, chips: int) -> Shape | None:
    """Return the shape that a bare chip count means: the shape in the family's table, else the
    shape closest to a cube; None if there is no such slice."""
    listed = next((shape for shape in shapes(family) if math.prod(shape) == chips), None)
    if listed or chips % 64 or not 0 < chips <= family.cube_limit_chips:
        return listed
    blocks = chips // 64
    sides = [(a, b, blocks // a // b) for a in _divisors(blocks) for b in _divisors(blocks // a)]
    best = min((tuple(sorted(side)) for side in sides), key=lambda side: (sum(side), side))
    return tuple(4 * n for n in best)


def is_cube(family: TpuFamily, shape: Shape) -> bool:
    """True if the family's rule for large slices allows this shape."""
    fits = len(shape) == 3 and 0 < math.prod(shape) <= family.cube_limit_chips
    ordered = not family.ascending or list(shape) == sorted(shape)
    return fits and ordered and all(n % 4 == 0 for n in shape)


def counts(family: Family) -> tuple[int, ...]:
    """Return every chip or GPU count of the family, ascending."""
    if isinstance(family, GpuFamily):
        return tuple(count for count, _ in family.machines)
    listed = {math.prod(shape) for shape in shapes(family)}
    return tuple(sorted(listed | set(range(64, family.cube_limit_chips + 1, 64))))


def shapes(family: TpuFamily) -> list[Shape]:
    """Return the shapes in the family's table: all shapes but those of larger 3-D slices."""
    return [shape for machine in family.machines for shape in _parse_shapes(machine.shapes)]


def shape_text(shape: Shape) -> str:
    """Return the shape as the vendor writes it: "4x4"."""
    return "x".join(str(n) for n in shape)


def slice_of(family: Family, count: int) -> Topology | None:
    """Return the slice that a bare count of this family means, such as 16 in "v6e-16", or None."""
    if isinstance(family, GpuFamily):
        return gpu_slice(family, count)
    shape = shape_for(family, count)
    return None if shape is None else tpu_slice(family, shape)


def preferred_families(kind: str) -> tuple[Family, ...]:
    """Return the families that a name without one, such as "gpu:4", may mean, most capable
    first."""
    by_name = {family.name: family for family in FAMILIES}
    return tuple(by_name[name] for name in PREFERENCE.get(kind, ()))


def catalog_rows() -> tuple[Topology, ...]:
    """Return every named slice in table order; of the larger 3-D slices only the common sizes."""
    return tuple(_list_rows())


def names() -> tuple[str, ...]:
    """Return the canonical names of `catalog_rows`."""
    return tuple(row.name for row in _list_rows())


def _list_rows() -> Iterator[Topology]:
    rows = [cpu_slice(1)]
    for family in TPUS:
        slices = [
            tpu_slice(family, shape, m.chips_per_host)
            for m in family.machines
            for shape in _parse_shapes(m.shapes)
        ]
        rows += sorted(slices, key=lambda row: row.chips if row else 0)
    rows += [gpu_slice(family, count) for family in GPUS for count in counts(family)]
    return (row for row in rows if row is not None)


def _name_tpu(family: TpuFamily, shape: Shape, machine: Machines) -> str:
    stem = family.name if family.name.startswith("tpu") else f"tpu-{family.name}"
    size = (
        str(math.prod(shape)) if shape_for(family, math.prod(shape)) == shape else shape_text(shape)
    )
    usual = _find_machines(family, shape)[0] == machine
    return f"{stem}-{size}" if usual else f"{stem}-{size}-{machine.chips_per_host}t"


def _find_machines(family: TpuFamily, shape: Shape) -> list[Machines]:
    listed = [m for m in family.machines if shape_text(shape) in m.shapes.split()]
    return listed or ([family.machines[-1]] if is_cube(family, shape) else [])


def _parse_shapes(text: str) -> list[Shape]:
    return [tuple(int(n) for n in shape.split("x")) for shape in text.split()]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
