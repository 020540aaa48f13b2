"""Prices of slices in US dollars per hour: list prices, or the user's own prices instead.

TPUs are priced by chip, machines with GPUs by machine type. Each price is for on-demand use in the
first region that lists the type. Preemptible machines are left out, because their prices change
every month. So are families without a published price that names its region and date.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kinetic._core.accelerators.families import FAMILIES
from kinetic._core.accelerators.topology import Topology

SPOT = ":spot"
"""Suffix of a family's name for the price of its preemptible machines."""
LIST = (
    "Google Cloud's price list of November 2026, as in SkyPilot's catalog "
    "(github.com/skypilot-org/skypilot-catalog, catalogs/v9/gcp/vms.csv at 2c3d7ea)"
)
BILLING = (
    "Google Cloud's billing catalog of 13 October 2026, as in "
    "huggingface.co/datasets/tanod/cloud-gpu-list-prices"
)
_IN_BILLING = ("a3-ultragpu-8g",)
_USUAL_REGION = "us-central1"
_REGIONS = {"v4": "us-central2", "a2-ultragpu": "us-east5", "a3-highgpu": "us-east4"}
"""Regions of families and machines that are not listed in the usual region."""
_CHIPS = {"v3": 2.0, "v4": 3.22, "v5litepod": 1.2, "v5p": 4.2, "v6e": 2.7}
_MACHINES = {
    "g2-standard-4": 0.70683,
    "g2-standard-24": 2.00083,
    "g2-standard-48": 4.00166,
    "g2-standard-96": 8.00332,
    "a2-highgpu-1g": 3.67339,
    "a2-highgpu-2g": 7.34677,
    "a2-highgpu-4g": 14.69354,
    "a2-highgpu-8g": 29.38709,
    "a2-megagpu-16g": 55.73951,
    "a2-ultragpu-1g": 5.52382,
    "a2-ultragpu-2g": 11.04763,
    "a2-ultragpu-4g": 22.09528,
    "a2-ultragpu-8g": 44.19056,
    "a3-highgpu-1g": 10.97906,
    "a3-highgpu-2g": 21.95812,
    "a3-highgpu-4g": 43.91623,
    "a3-highgpu-8g": 87.83247,
    "a3-ultragpu-8g": 83.492,
}


class Price(NamedTuple):
    """The price of one slice.

    Attributes:
        usd_per_hour: price of all chips of the slice.
        origin: where the price comes from, as users see it: "list price, us-central1".
        source: the price list, with its date; "" for the user's own price.
        region: region of the price; "" for the user's own price.
    """

    usd_per_hour: float
    origin: str
    source: str = ""
    region: str = ""


def price_of(topology: Topology, own: Mapping[str, float] | None = None) -> Price | None:
    """Return the price of one slice; None if unknown.

    Args:
        topology: the slice.
        own: the user's prices of one chip or GPU and hour, by family; with the suffix `SPOT` for
            preemptible machines.
    """
    key = topology.family + (SPOT if topology.spot else "")
    if own and key in own:
        return Price(own[key] * topology.chips, "your price")
    machine = topology.machine_type
    unit_price, units = _CHIPS.get(topology.family), topology.chips
    if unit_price is None:
        unit_price, units = _MACHINES.get(machine), topology.hosts
    if unit_price is None or topology.spot:
        return None
    kind = topology.family if topology.family in _CHIPS else machine.rpartition("-")[0]
    region = _REGIONS.get(kind, _USUAL_REGION)
    source = BILLING if machine in _IN_BILLING else LIST
    return Price(round(unit_price * units, 5), f"list price, {region}", source, region)


def check_family(name: str) -> str | None:
    """Return the canonical key of a price from any name of its family, with or without `SPOT`; None
    if there is no such family."""
    family, spot = name.lower().removesuffix(SPOT), SPOT if name.lower().endswith(SPOT) else ""
    family = family.removeprefix("tpu-").removeprefix("gpu-")
    names = {"cpu": "cpu"} | {n: each.name for each in FAMILIES for n in (each.name, *each.aliases)}
    return names[family] + spot if family in names else None


def in_usd(amount: float) -> str:
    """Format an amount: "$43.20", "$0.0042"."""
    if amount and amount < 0.01:
        return f"${amount:.2g}" if amount >= 0.0001 else "less than $0.0001"
    return f"${amount:,.2f}"
