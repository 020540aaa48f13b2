"""What there is to run jobs on: the node pools of a cluster, the nodes of a Ray cluster, or this
machine.

In: settings. Out: a table.
"""

from __future__ import annotations

from typing import NamedTuple

from kinetic._config import settings as configuration
from kinetic._config.settings import Settings


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
    if settings.is_for_ray:
        return _read_ray(settings)
    if settings.cluster:
        return _read_cluster(settings)
    return _read_machine()


def _read_cluster(settings: Settings) -> CapacityTable:
    from kinetic._backends.kubernetes import cluster

    rows = tuple(
        (
            each.name or "–",
            each.pool.name or "–",
            each.pool.topology or "–",
            f"{each.pool.ready} of {each.pool.nodes}",
            str(each.slices),
            "spot" if each.pool.spot else "",
        )
        for each in cluster.list_accelerators(settings)
    )
    return CapacityTable(
        f"Cluster {settings.cluster}",
        "What its node pools have now, busy or not. Pools that are scaled to zero are not shown.",
        ("Accelerator", "Node pool", "Topology", "Nodes ready", "Slices", ""),
        rows,
    )


def _read_ray(settings: Settings) -> CapacityTable:
    from kinetic._backends.ray import checks

    rows = tuple(
        (each.name or "–", each.kind, each.topology or "–", str(each.nodes), f"{each.each:g}")
        for each in checks.list_resources(settings)
    )
    columns = ("Accelerator", "Resource", "Topology", "Nodes", "On each")
    return CapacityTable("Ray cluster", "What its nodes have now, busy or not.", columns, rows)


def _read_machine() -> CapacityTable:
    from kinetic._client.board import text
    from kinetic._system import machine

    processors, free = machine.usable_cpus(), machine.available_memory_bytes()
    rows = (
        ("Processors", str(processors)),
        ("Memory available", text.size(free) if free else "unknown"),
    )
    note = "No cluster is configured: slices are simulated on this machine."
    return CapacityTable("This machine", note, ("", ""), rows)
