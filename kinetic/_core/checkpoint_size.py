"""How much memory local checkpoints need on each host. Pure.

In: the number of parameters, or the size of a host's part of the state. Out: bytes, and how they
come about.

A checkpoint of a model that is trained with Adam in mixed precision has 12 bytes for each
parameter; the hosts of a slice share it. A host keeps its last checkpoint while it writes the next
one, so it needs twice its part, and some room beyond.
"""

from __future__ import annotations

import math

from kinetic._core.values import dataclass

BYTES_PER_PARAMETER = 12.0
COPIES = 2
MARGIN = 0.15


@dataclass(frozen=True)
class Size:
    """What a host of a slice needs.

    Attributes:
        parameters: of the model.
        hosts: of a slice, which share the state.
        bytes_per_parameter: of a checkpoint: weights and the optimizer's state.
        margin: room beyond, as a fraction.
    """

    parameters: float
    hosts: int
    bytes_per_parameter: float = BYTES_PER_PARAMETER
    margin: float = MARGIN

    @property
    def checkpoint_bytes(self) -> float:
        """Of the whole state."""
        return self.parameters * self.bytes_per_parameter

    @property
    def part_bytes(self) -> float:
        """Of one host's part."""
        return self.checkpoint_bytes / self.hosts

    @property
    def host_bytes(self) -> int:
        """What the folder in memory of each host needs."""
        return room_for(self.part_bytes, self.margin)


def room_for(part_bytes: float, margin: float = MARGIN) -> int:
    """Return what a host needs that keeps a part of this size: two copies and a margin."""
    return math.ceil(part_bytes * COPIES * (1 + margin))


def quantity(size_bytes: float) -> str:
    """Return a size as Kubernetes takes it, rounded up: 57579Mi."""
    return f"{math.ceil(size_bytes / 2**20)}Mi"


def in_gigabytes(size_bytes: float) -> str:
    """Return a size as text, in units of 1000: 60.375 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale * 0.9999995:
            digits = f"{size_bytes / scale:.3f}".rstrip("0").rstrip(".")
            return f"{digits} {unit}"
    return f"{size_bytes:.0f} B"
