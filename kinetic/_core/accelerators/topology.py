"""The shape and the machines of one slice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from kinetic._core.documents import Record
from kinetic._core.values import dataclass

Kind = Literal["cpu", "gpu", "tpu"]


@dataclass(frozen=True)
class Topology(Record, called="The topology of the job"):
    """One slice of accelerators.

    Attributes:
        name: canonical name, for example "tpu-v6e-16", "gpu-a100x4", "cpu"; `resolve(name)` gives
            this value back.
        kind: "cpu", "gpu" or "tpu".
        family: "v6e", "l4", "cpu".
        shape: chips along each axis; their product is the number of chips. One axis for cpu and
            gpu.
        chips_per_host: chips (devices) of one host.
        machine_type: cloud machine type of each host, "" for cpu.
        gke_accelerator: value of the GKE accelerator node label, "" for cpu.
        spot: True if preemptible machines are requested.
    """

    name: str
    kind: Kind
    family: str
    shape: tuple[int, ...]
    chips_per_host: int
    machine_type: str = ""
    gke_accelerator: str = ""
    spot: bool = False

    @property
    def chips(self) -> int:
        """Number of chips of the slice."""
        return math.prod(self.shape)

    @property
    def hosts(self) -> int:
        """Number of hosts (machines) of the slice."""
        return self.chips // self.chips_per_host

    @property
    def multi_host(self) -> bool:
        """True if the slice spans more than one machine."""
        return self.hosts > 1

    @property
    def shape_text(self) -> str:
        """The shape as the vendor writes it: "4x4"."""
        return "x".join(str(n) for n in self.shape)

    def as_one_host(self) -> Topology:
        """Return the shape as a single controller sees it: one host with all chips."""
        return replace(self, chips_per_host=self.chips)
