"""The capacity of the configured place: node pools of a cluster, or nodes of a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kinetic._backends.base import PoolRow
    from kinetic._config.settings import Settings

COLUMNS = ("NAME", "KIND", "NODE POOL", "TOPOLOGY", "NODES", "READY", "EACH", "SLICES", "SPOT")
NUMBERS = ("NODES", "READY", "EACH", "SLICES")


def list_pools(settings: Settings) -> tuple[PoolRow, ...]:
    """Return the current node pools, or groups of Ray nodes, whether busy or free.

    Raises:
        KineticError: the cluster does not exist, or does not answer.
    """
    if settings.is_for_ray:
        from kinetic._backends.ray import checks

        return checks.list_resources(settings)
    from kinetic._backends.kubernetes import cluster

    return cluster.list_accelerators(settings)


def cells(row: PoolRow) -> tuple[str, ...]:
    """Return the cells of a row, one for each of the `COLUMNS`."""
    return (
        row.name or "-",
        row.kind,
        row.pool or "-",
        row.topology or "-",
        str(row.nodes),
        str(row.ready),
        f"{row.per_node:g}",
        str(row.slices),
        "yes" if row.is_spot else "-",
    )


def list_empty_columns(rows: Sequence[PoolRow]) -> list[str]:
    """Return the columns that are empty in all rows."""
    table = [cells(row) for row in rows]
    return [name for n, name in enumerate(COLUMNS) if table and all(row[n] == "-" for row in table)]
