"""`kinetic accelerators`: the catalog, or the accelerators of a cluster."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from kinetic._core.accelerators.prices import SPOT, Price, price_of
from kinetic._core.accelerators.topology import Topology
from kinetic.cli import output
from kinetic.cli.lazy import complete_with
from kinetic.cli.options import json_option

if TYPE_CHECKING:
    from kinetic._config.settings import Settings

_COLUMNS = (
    "NAME",
    "KIND",
    "CHIPS",
    "HOSTS",
    "CHIPS/HOST",
    "SHAPE",
    "$/HOUR",
    "SPOT",
    "MACHINE TYPE",
)
_NUMBERS = ("CHIPS", "HOSTS", "CHIPS/HOST", "$/HOUR", "SPOT")

_WIDE = 90
_LEFT_OUT = {"KIND": _WIDE, "CHIPS/HOST": 70}
"""Columns that repeat others, with the terminal width in columns below which each is hidden."""

_HELP = """List the accelerators that jobs can use.

FILTER is part of a name, or any name that `--accelerator` accepts.

Prices are list prices of one slice, in the first region that has the accelerator. Set
KINETIC_PRICES to use your own prices, also for preemptible machines. --json shows the source of
each price.

With --live, list the accelerators in the node pools of a cluster, busy or idle. Pools that are
scaled to zero are not listed. If jobs go to a Ray cluster, list the accelerators of its nodes.

\b
Examples:
  kinetic accelerators
  kinetic accelerators v6e
  kinetic accelerators trillium-8
  kinetic accelerators --json
  kinetic accelerators --live --cluster my-cluster
"""


@click.command("accelerators", help=_HELP, short_help="List the accelerators that jobs can use.")
@json_option
@click.option("--live", is_flag=True, help="List the accelerators of a cluster.")
@click.option("--cluster", metavar="NAME", help="Use this cluster instead of the configured one.")
@click.option("--project", metavar="NAME", help="Google Cloud project of the cluster.")
@click.option("--zone", metavar="NAME", help="Zone of the cluster.")
@click.argument(
    "words", metavar="[FILTER]", required=False, shell_complete=complete_with("accelerators")
)
def accelerators(words: str | None, as_json: bool, live: bool, **place: str | None) -> None:
    """Print the catalog, the part of it that matches `words`, or the accelerators of a cluster."""
    if live:
        _print_live(words, place, as_json=as_json)
        return
    from kinetic._config import settings

    chosen = settings.load(flags=place)
    rows = _find_rows(words)
    if as_json:
        output.json_document([_document(row, chosen) for row in rows])
    else:
        cells, width = [_cells(row, chosen) for row in rows], output.width() or _WIDE
        left_out = [name for name, least in _LEFT_OUT.items() if width < least]
        if not any(name.endswith(SPOT) for name in chosen.prices):
            left_out.append("SPOT")
        output.table(_COLUMNS, cells, left_out=left_out, right=_NUMBERS, cut=_COLUMNS[-1])
        priced = [price for row in rows for price in _prices(row, chosen).values() if price]
        for source in dict.fromkeys(price.source for price in priced if price.source):
            regions = dict.fromkeys(price.region for price in priced if price.source == source)
            output.notice(f"Prices in {', '.join(regions)}: {source}.")


def _print_live(words: str | None, flags: dict[str, str | None], *, as_json: bool) -> None:
    from kinetic._client.board import pools
    from kinetic._config import settings

    rows = [
        row
        for row in pools.list_pools(settings.load(flags=flags))
        if not words or words.lower() in f"{row.name} {row.kind}".lower()
    ]
    if as_json:
        return output.json_document([asdict(row) for row in rows])
    return output.table(
        pools.COLUMNS,
        map(pools.cells, rows),
        left_out=pools.list_empty_columns(rows),
        right=pools.NUMBERS,
    )


def _find_rows(words: str | None) -> tuple[Topology, ...]:
    from kinetic._core.accelerators.catalog import catalog_rows
    from kinetic._core.accelerators.resolve import resolve

    rows = catalog_rows()
    if not words:
        return rows
    matches = tuple(row for row in rows if words.lower() in row.name)
    if matches:
        return matches
    topology = resolve(words)  # An alias or another spelling; raises with the nearest names.
    if re.search(r"[-:x]\d", words.removeprefix("tpu-").removeprefix("gpu-")):
        return (topology,)
    return tuple(row for row in rows if row.family == topology.family)  # v5e, trillium


def _prices(row: Topology, settings: Settings) -> dict[str, Price | None]:
    return {
        name: price_of(replace(row, spot=spot), settings.prices)
        for name, spot in (("on_demand", False), ("spot", True))
    }


def _document(row: Topology, settings: Settings) -> dict[str, Any]:
    prices = _prices(row, settings)
    documents = {name: price and price._asdict() for name, price in prices.items()}
    return row.to_json() | {"chips": row.chips, "hosts": row.hosts, "price": documents}


def _cells(row: Topology, settings: Settings) -> tuple[str, ...]:
    return (
        row.name,
        row.kind,
        str(row.chips),
        str(row.hosts),
        str(row.chips_per_host),
        row.shape_text,
        *(
            "-" if price is None else f"{price.usd_per_hour:,.2f}"
            for price in _prices(row, settings).values()
        ),
        row.machine_type or "-",
    )
