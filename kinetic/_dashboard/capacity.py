"""Capacity for jobs: the node pools of a cluster, the nodes of a Ray cluster, or this machine."""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from kinetic._client.board import pools, text
from kinetic._config import settings as configuration


class CapacityTable(NamedTuple):
    """A table with a title and a note."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def read_capacity() -> CapacityTable:
    """Read the present capacity of the configured place.

    Raises:
        KineticError: the cluster does not answer, or denies access.
    """
    settings = configuration.load()
    if not settings.is_for_ray and not settings.cluster:
        return _read_machine()
    rows = pools.list_pools(settings)
    unused = pools.list_empty_columns(rows)
    visible = [name not in unused for name in pools.COLUMNS]
    return CapacityTable(
        "Ray cluster" if settings.is_for_ray else f"Cluster {settings.cluster}",
        "Accelerators of nodes, busy or idle. Node pools that are scaled to zero are not listed.",
        tuple(name.capitalize() for name in compress(pools.COLUMNS, visible)),
        tuple(tuple(compress(pools.cells(row), visible)) for row in rows),
    )


def _read_machine() -> CapacityTable:
    from kinetic._system import machine

    processors, free = machine.usable_cpus(), machine.available_memory_bytes()
    rows = (
        ("Processors", str(processors)),
        ("Memory available", text.size(free) if free else "unknown"),
    )
    note = "No cluster is configured: slices are simulated on this machine."
    return CapacityTable("This machine", note, ("", ""), rows)
