"""From the name of an accelerator to the shape of the slice behind it."""

from kinetic.accelerators.resolve import resolve
from kinetic.accelerators.topology import Topology

__all__ = ["Topology", "resolve"]
