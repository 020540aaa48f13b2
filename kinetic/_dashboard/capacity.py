"""What there is to run jobs on: the node pools of a cluster, the nodes of a Ray cluster, or this
machine.

In: settings. Out: a table.
"""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from kinetic._client.board import pools, text
from kinetic._config import settings as configuration


class CapacityTable(NamedTuple):
    """A table with a title, and a sentence about it."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def read_capacity() -> CapacityTable:
    """Ask what the configured place has now.

    Raises:
        KineticError: it does not answer, or lets nobody in.
    """
    settings = configuration.load()
    if not settings.is_for_ray and not settings.cluster:
        return _read_machine()
    rows = pools.list_pools(settings)
    unused = pools.unused_columns(rows)
    is_shown = [name not in unused for name in pools.COLUMNS]
    return CapacityTable(
        "Ray cluster" if settings.is_for_ray else f"Cluster {settings.cluster}",
        "What its nodes have now, busy or not. Node pools that are scaled to zero are not shown.",
        tuple(name.capitalize() for name in compress(pools.COLUMNS, is_shown)),
        tuple(tuple(compress(pools.cells(row), is_shown)) for row in rows),
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
