"""The text that `kinetic up` shows before anything is created: steps and prices. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from kinetic._clusters.bodies import RECORDS_DAYS
from kinetic._clusters.difference import Action, Step
from kinetic._clusters.wanted import Mode, Wanted
from kinetic._core.accelerators.prices import in_usd, price_of
from kinetic._core.accelerators.topology import Topology

CONTROL_PLANE = 0.10
MACHINES = {
    "e2-standard-4": 0.13402,
    "n1-standard-4": 0.19,
    "n2-standard-4": 0.19424,
    "n2d-standard-4": 0.16899,
}
FIXED_SOURCE = "Google's list prices for us-central1 of November 2026"
"""The origin of the prices above, in US dollars per hour."""
BUCKET = "about $0.02 for a GB and month"
CREDIT = "Google credits $74.40 a month for one cluster of a billing account"


def describe(wanted: Wanted, steps: Sequence[Step], own: Mapping[str, float]) -> str:
    """Return the preview of `up` and `pool add`.

    Args:
        wanted: the cluster.
        steps: the steps that the command would take.
        own: the user's prices.
    """
    place = f"in {wanted.location} of {wanted.project}, " if wanted.mode is not Mode.KIND else ""
    lines = [f"Cluster {wanted.name} {place}{wanted.mode}", "", *list_steps(steps)]
    if wanted.mode is not Mode.KIND:
        lines += ["", "Costs:", *_list_costs(wanted, steps, own)]
    return "\n".join(lines)


def list_steps(steps: Sequence[Step]) -> list[str]:
    """Return numbered lines. Consecutive steps for objects inside the cluster share a line."""
    lines: list[str] = []
    number = 1
    for is_object, group in groupby(steps, lambda step: step.action is Action.APPLY):
        members = list(group)
        if is_object and len(members) > 1:
            lines.append(f"{number:>3}. apply {len(members)} objects")
            lines += [f"       {step.name}" for step in members]
            number += 1
            continue
        for step in members:
            lines.append(f"{number:>3}. {step}{f': {step.detail}' if step.detail else ''}")
            number += 1
    return lines or ["Nothing is missing."]


def _list_costs(wanted: Wanted, steps: Sequence[Step], own: Mapping[str, float]) -> list[str]:
    rows = [("control plane", f"{in_usd(CONTROL_PLANE)} an hour ({CREDIT})")]
    fixed: float | None = CONTROL_PLANE
    for step in steps:
        if step.action is Action.CREATE_CLUSTER and wanted.mode is Mode.STANDARD:
            machine = ((step.body or {})["nodePools"][0]["config"])["machineType"]
            price = MACHINES.get(machine)
            rows.append((f"1 {machine}", _format(price)))
            fixed = None if price is None else CONTROL_PLANE + price
    counts = Counter(topology for topology in wanted.slices if topology.kind != "cpu")
    for topology, count in counts.items():
        title = f"{count} x {topology.name}" if count > 1 else topology.name
        rows.append((title, _price(topology, count, own)))
    for pool in wanted.pools:
        if pool.least:
            listed = price_of(pool.topology, own)
            idle = listed.usd_per_hour * pool.least / pool.topology.hosts if listed else None
            rows.append(
                (f"{pool.name}, kept at {pool.least}", f"{_format(idle)}, also without jobs")
            )
            fixed = None if fixed is None or idle is None else fixed + idle
    if not counts:
        rows.append(("machines of jobs", "while a job runs, by what its pods request"))
    rows.append(("bucket", f"{BUCKET}; records are deleted after {RECORDS_DAYS} days"))
    rows.append(("without jobs", f"{_format(fixed)} ({FIXED_SOURCE})"))
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _format(price: float | None) -> str:
    return "price unknown" if price is None else f"{in_usd(price)} an hour"


def _price(topology: Topology, count: int, own: Mapping[str, float]) -> str:
    price = price_of(topology, own)
    if price is None:
        key = topology.family + (":spot" if topology.spot else "")
        return f"price unknown (set KINETIC_PRICES={key}=…), while a job runs"
    return f"{in_usd(price.usd_per_hour * count)} an hour while a job runs ({price.origin})"
