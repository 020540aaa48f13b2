"""Memory that local checkpoints need on each host. Pure.

A checkpoint of a model that is trained with Adam in mixed precision has 12 bytes for each
parameter; the hosts of a slice split it into equal parts. A host keeps its last checkpoint while it
writes the next one, so it needs twice its part, plus a margin.
"""

from __future__ import annotations

import math

from kinetic._core.values import dataclass

BYTES_PER_PARAMETER = 12.0
COPIES = 2
MARGIN = 0.15


@dataclass(frozen=True)
class Size:
    """The memory that one host of a slice needs for checkpoints of a model.

    Attributes:
        parameters: number of parameters of the model.
        hosts: number of hosts of a slice, which share the state.
        bytes_per_parameter: bytes of a checkpoint: weights and the optimizer's state.
        margin: extra room, as a fraction.
    """

    parameters: float
    hosts: int
    bytes_per_parameter: float = BYTES_PER_PARAMETER
    margin: float = MARGIN

    @property
    def checkpoint_bytes(self) -> float:
        """Bytes of the whole checkpoint."""
        return self.parameters * self.bytes_per_parameter

    @property
    def part_bytes(self) -> float:
        """Bytes of one host's part of a checkpoint."""
        return self.checkpoint_bytes / self.hosts

    @property
    def host_bytes(self) -> int:
        """Bytes that the memory folder of each host needs."""
        return room_for(self.part_bytes, self.margin)


def room_for(part_bytes: float, margin: float = MARGIN) -> int:
    """Return the bytes that a host needs to keep a part of this size: two copies and a margin."""
    return math.ceil(part_bytes * COPIES * (1 + margin))


def quantity(size_bytes: float) -> str:
    """Format a size for Kubernetes, rounded up: 57579Mi."""
    return f"{math.ceil(size_bytes / 2**20)}Mi"


def in_gigabytes(size_bytes: float) -> str:
    """Format a size in units of 1000: 60.375 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale * 0.9999995:
            digits = f"{size_bytes / scale:.3f}".rstrip("0").rstrip(".")
            return f"{digits} {unit}"
    return f"{size_bytes:.0f} B"
