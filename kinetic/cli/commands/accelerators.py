"""`kinetic accelerators`: the catalog.

In: part of a name. Out: a table or JSON.
"""

from __future__ import annotations

from typing import Any

import click

from kinetic._core.accelerators.topology import Topology
from kinetic.cli import output
from kinetic.cli.lazy import suggested
from kinetic.cli.options import accepted, json_option
from kinetic.errors import PreflightError

_COLUMNS = ("NAME", "KIND", "CHIPS", "HOSTS", "CHIPS/HOST", "SHAPE", "MACHINE TYPE")
_NUMBERS = ("CHIPS", "HOSTS", "CHIPS/HOST")

_HELP = """List the accelerators that can be asked for.

FILTER is a part of a name, or any name that `--accelerator` takes.

\b
Examples:
  kinetic accelerators
  kinetic accelerators v6e
  kinetic accelerators trillium-8
  kinetic accelerators --json
"""


@click.command(
    "accelerators", help=_HELP, short_help="List the accelerators that can be asked for."
)
@json_option
@click.option("--live", is_flag=True, hidden=True)
@accepted("--project")
@accepted("--zone")
@accepted("--cluster")
@click.argument(
    "words", metavar="[FILTER]", required=False, shell_complete=suggested("accelerators")
)
def accelerators(words: str | None, as_json: bool, live: bool) -> None:
    """Print the catalog, or the part of it that matches."""
    if live:
        raise PreflightError(
            "--live asks a cloud what it has, and this version has no cluster backends yet. Leave "
            "it out: every accelerator of `kinetic accelerators` can be simulated on this machine."
        )
    rows = _matching(words)
    if as_json:
        output.json_document([_document(row) for row in rows])
    else:
        output.table(_COLUMNS, [_cells(row) for row in rows], right=_NUMBERS)


def _matching(words: str | None) -> tuple[Topology, ...]:
    from kinetic._core.accelerators.catalog import catalog_rows

    rows = catalog_rows()
    if not words:
        return rows
    found = tuple(row for row in rows if words.lower() in row.name)
    return found or (_resolved(words),)


def _resolved(words: str) -> Topology:
    """Resolve an alias or another spelling; an unknown name raises with the nearest ones."""
    from kinetic._core.accelerators.resolve import resolve

    return resolve(words)


def _document(row: Topology) -> dict[str, Any]:
    return row.to_json() | {"chips": row.chips, "hosts": row.hosts}


def _cells(row: Topology) -> tuple[str, ...]:
    return (
        row.name,
        row.kind,
        str(row.chips),
        str(row.hosts),
        str(row.chips_per_host),
        row.shape_text,
        row.machine_type or "-",
    )
