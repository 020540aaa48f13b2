"""The table of accelerators: families, their machines and their slices.

The N of a TPU name counts chips. The vendor's own names for v3, v4, v5p and tpu7x count cores, two
to a chip.

Families are named tuples because every command imports this module, and dataclasses take several
times longer to create.
"""

from __future__ import annotations

from typing import NamedTuple

CPU_DEVICES_MAX = 1024
"""Most virtual devices of a cpu slice; a larger number is surely a typing error."""


class Machines(NamedTuple):
    """One machine type of a family, and the slices that consist of it.

    Attributes:
        shapes: shapes of the slices, as the vendor writes them, separated by spaces.
        machine_type: cloud machine type of each host.
        chips_per_host: number of chips of one machine.
    """

    shapes: str
    machine_type: str
    chips_per_host: int


class TpuFamily(NamedTuple):
    """One generation of TPU.

    Attributes:
        name: the family's part of canonical names.
        label: GKE accelerator label.
        default_chips: chips of the slice that the bare family name means.
        machines: machine types; the first that lists a shape is its default.
        aliases: other names of the family.
        cube_limit_chips: the last of the machine types also forms every slice AxBxC of multiples of
            4 up to this many chips; 0 for none.
        ascending: True if the vendor accepts AxBxC only in ascending order.
    """

    name: str
    label: str
    default_chips: int
    machines: tuple[Machines, ...]
    aliases: tuple[str, ...] = ()
    cube_limit_chips: int = 0
    ascending: bool = False
    kind: str = "tpu"


class GpuFamily(NamedTuple):
    """One type of GPU; always a single host.

    Attributes:
        name: the family's part of canonical names.
        label: GKE accelerator label.
        machines: (GPUs, machine type), fewest first; the bare family name means the first.
        aliases: other names of the family.
    """

    name: str
    label: str
    machines: tuple[tuple[int, str], ...]
    aliases: tuple[str, ...] = ()
    kind: str = "gpu"


Family = TpuFamily | GpuFamily

TPUS = (
    TpuFamily(
        "v3",
        "tpu-v3-podslice",
        4,
        (
            Machines("2x2", "ct3-hightpu-4t", 4),
            Machines("4x4 4x8 8x8 8x16 16x16 16x32 32x32 32x64", "ct3p-hightpu-4t", 4),
        ),
    ),
    TpuFamily(
        "v4",
        "tpu-v4-podslice",
        4,
        (
            Machines(
                "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16 16x16x16",
                "ct4p-hightpu-4t",
                4,
            ),
        ),
        cube_limit_chips=4096,
    ),
    TpuFamily(
        "v5litepod",
        "tpu-v5-lite-podslice",
        4,
        (
            Machines("1x1", "ct5lp-hightpu-1t", 1),
            Machines("2x2 4x4 4x8 8x8 8x16 16x16", "ct5lp-hightpu-4t", 4),
            Machines("2x4", "ct5lp-hightpu-8t", 8),
        ),
        aliases=("v5e",),
    ),
    TpuFamily(
        "v5p",
        "tpu-v5p-slice",
        8,
        (
            Machines(
                "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 4x4x20 4x8x12 8x8x8 8x8x12 "
                "8x8x16 8x12x12 12x12x12 8x16x16 12x16x16 16x16x16 16x16x24 16x20x28",
                "ct5p-hightpu-4t",
                4,
            ),
        ),
        cube_limit_chips=8960,
        ascending=True,
    ),
    TpuFamily(
        "v6e",
        "tpu-v6e-slice",
        8,
        (
            Machines("1x1", "ct6e-standard-1t", 1),
            Machines("2x2 2x4 4x4 4x8 8x8 8x16 16x16", "ct6e-standard-4t", 4),
            Machines("2x4", "ct6e-standard-8t", 8),
        ),
        aliases=("trillium",),
    ),
    TpuFamily(
        "tpu7x",
        "tpu7x",
        4,
        (
            Machines("1x1x1", "tpu7x-standard-1t", 1),
            Machines(
                "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24 "
                "16x24x24",
                "tpu7x-standard-4t",
                4,
            ),
        ),
        aliases=("v7x", "ironwood"),
        cube_limit_chips=9216,
    ),
)

GPUS = (
    GpuFamily(
        "l4",
        "nvidia-l4",
        ((1, "g2-standard-4"), (2, "g2-standard-24"), (4, "g2-standard-48"), (8, "g2-standard-96")),
    ),
    GpuFamily(
        "t4", "nvidia-tesla-t4", ((1, "n1-standard-4"), (2, "n1-standard-8"), (4, "n1-standard-16"))
    ),
    GpuFamily(
        "v100",
        "nvidia-tesla-v100",
        ((1, "n1-standard-8"), (2, "n1-standard-16"), (4, "n1-standard-32"), (8, "n1-standard-64")),
    ),
    GpuFamily(
        "p4", "nvidia-tesla-p4", ((1, "n1-standard-4"), (2, "n1-standard-8"), (4, "n1-standard-16"))
    ),
    GpuFamily(
        "p100",
        "nvidia-tesla-p100",
        ((1, "n1-standard-4"), (2, "n1-standard-8"), (4, "n1-standard-16")),
    ),
    GpuFamily(
        "a100",
        "nvidia-tesla-a100",
        (
            (1, "a2-highgpu-1g"),
            (2, "a2-highgpu-2g"),
            (4, "a2-highgpu-4g"),
            (8, "a2-highgpu-8g"),
            (16, "a2-megagpu-16g"),
        ),
        aliases=("a100-40gb",),
    ),
    GpuFamily(
        "a100-80gb",
        "nvidia-a100-80gb",
        (
            (1, "a2-ultragpu-1g"),
            (2, "a2-ultragpu-2g"),
            (4, "a2-ultragpu-4g"),
            (8, "a2-ultragpu-8g"),
            (16, "a2-ultragpu-16g"),
        ),
    ),
    GpuFamily(
        "h100",
        "nvidia-h100-80gb",
        ((1, "a3-highgpu-1g"), (2, "a3-highgpu-2g"), (4, "a3-highgpu-4g"), (8, "a3-highgpu-8g")),
        aliases=("h100-80gb",),
    ),
    GpuFamily(
        "h100-mega", "nvidia-h100-mega-80gb", ((8, "a3-megagpu-8g"),), aliases=("h100-mega-80gb",)
    ),
    GpuFamily("h200", "nvidia-h200-141gb", ((8, "a3-ultragpu-8g"),), aliases=("h200-141gb",)),
    GpuFamily("b200", "nvidia-b200", ((8, "a4-highgpu-8g"),)),
    GpuFamily("gb200", "nvidia-gb200", ((4, "a4x-highgpu-4g"),)),
)

FAMILIES: tuple[Family, ...] = TPUS + GPUS

PATHWAYS_MACHINES = frozenset(
    (
        *("ct4p-hightpu-4t", "ct5lp-hightpu-4t", "ct5lp-hightpu-8t", "ct5p-hightpu-4t"),
        *("ct6e-standard-4t", "ct6e-standard-8t", "tpu7x-standard-4t"),
    )
)
"""Machine types on which Pathways' single controller runs."""

DEFAULTS = {"gpu": "l4", "tpu": "v5litepod-4"}
"""The slices that the names "gpu" and "tpu" mean."""

PREFERENCE = {
    "gpu": ("h100", "a100-80gb", "a100", "l4", "v100", "t4", "p100", "p4"),
    "tpu": ("v6e", "v5p", "v5litepod", "v4", "v3"),
}
"""Families that a count without a family, such as "gpu:4", may mean, most capable first."""
