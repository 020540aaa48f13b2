"""What slices cost: list prices, and what a user says that they cost instead.

In: a topology, the zone, the user's own prices. Out: `Price`, in US dollars per hour of one slice.

TPUs are priced by chip and region, machines with GPUs by machine type, each in the first region
that lists it. The figures are those of Google Cloud, as `LIST` and `BILLING` have them; the vendor
changes prices of spot machines every month. What is not here is not known: no list has it with its
region and date, or lists mix prices of several kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kinetic._core.accelerators.families import FAMILIES
from kinetic._core.accelerators.topology import Topology

SPOT = ":spot"
"""Follows the name of a family where its price is for preemptible machines."""
LIST = (
    "Google Cloud's price list of November 2026, as in SkyPilot's catalog "
    "(github.com/skypilot-org/skypilot-catalog, catalogs/v9/gcp/vms.csv at 2c3d7ea)"
)
BILLING = (
    "Google Cloud's billing catalog of 13 October 2026, as in "
    "huggingface.co/datasets/tanod/cloud-gpu-list-prices"
)
_IN_BILLING = ("a3-ultragpu-8g",)


class Rate(NamedTuple):
    """What one chip, or one machine with GPUs, costs in a region, in US dollars per hour.

    Attributes:
        on_demand: until it is given back.
        spot: preemptible; None where the list has no such price.
    """

    on_demand: float
    spot: float | None


class Price(NamedTuple):
    """What one slice costs.

    Attributes:
        usd_per_hour: of all its chips.
        origin: where the figure is from, for users: "list price, us-central1, spot".
        source: the list that has it, with its date; "" for what the user has said.
        region: whose price it is; "" likewise.
    """

    usd_per_hour: float
    origin: str
    source: str = ""
    region: str = ""


_CHIPS: Mapping[str, Mapping[str, Rate]] = {
    "v3": {
        "us-central1": Rate(2.0, 0.51),
        "us-east1": Rate(2.0, 0.6),
        "europe-west4": Rate(2.2, 0.561),
    },
    "v4": {"us-central2": Rate(3.22, 0.9215)},
    "v5litepod": {
        "us-central1": Rate(1.2, 0.29771),
        "us-east1": Rate(1.2, 0.29771),
        "us-east5": Rate(1.2, 0.6),
        "us-south1": Rate(1.416, 0.65419),
        "us-west1": Rate(1.2, 0.29771),
        "us-west4": Rate(1.2, 0.52536),
        "northamerica-northeast1": Rate(1.32132, 0.21727),
        "southamerica-west1": Rate(1.716, 0.28217),
        "europe-north1": Rate(1.32132, 0.66066),
        "europe-west1": Rate(1.32132, 0.52853),
        "europe-west3": Rate(1.416, 0.23284),
        "europe-west4": Rate(1.56, 0.51011),
        "asia-east1": Rate(1.38948, 0.47652),
        "asia-northeast1": Rate(1.54104, 0.2534),
        "asia-southeast1": Rate(1.56, 0.78),
    },
    "v5p": {
        "us-central1": Rate(4.2, 0.78049),
        "us-east1": Rate(4.2, 0.78049),
        "us-east5": Rate(4.2, 1.29995),
        "us-south1": Rate(4.779, 0.78584),
        "europe-west1": Rate(4.45945, 1.60986),
        "europe-west4": Rate(4.2525, 1.04344),
    },
    "v6e": {
        "us-central1": Rate(2.7, 0.59266),
        "us-east1": Rate(2.7, 0.59266),
        "us-east4": Rate(2.7, 0.34491),
        "us-east5": Rate(2.7, 1.27575),
        "us-south1": Rate(2.7, 1.21838),
        "us-west1": Rate(2.7, 0.59266),
        "southamerica-west1": Rate(2.7, None),
        "europe-west4": Rate(2.97, 1.782),
        "asia-northeast1": Rate(3.24, 1.45707),
        "asia-south1": Rate(3.24, 1.38895),
        "asia-southeast1": Rate(2.97, 0.2673),
    },
}
_MACHINES: Mapping[str, tuple[str, Rate]] = {
    "g2-standard-4": ("us-central1", Rate(0.70683, 0.36122)),
    "g2-standard-24": ("us-central1", Rate(2.00083, 1.0225)),
    "g2-standard-48": ("us-central1", Rate(4.00166, 2.045)),
    "g2-standard-96": ("us-central1", Rate(8.00332, 4.09)),
    "a2-highgpu-1g": ("us-central1", Rate(3.67339, 1.90965)),
    "a2-highgpu-2g": ("us-central1", Rate(7.34677, 3.8193)),
    "a2-highgpu-4g": ("us-central1", Rate(14.69354, 7.6386)),
    "a2-highgpu-8g": ("us-central1", Rate(29.38709, 15.2772)),
    "a2-megagpu-16g": ("us-central1", Rate(55.73951, 29.03664)),
    "a2-ultragpu-1g": ("us-east5", Rate(5.52382, 1.69713)),
    "a2-ultragpu-2g": ("us-east5", Rate(11.04763, 3.39426)),
    "a2-ultragpu-4g": ("us-east5", Rate(22.09528, 6.78852)),
    "a2-ultragpu-8g": ("us-east5", Rate(44.19056, 13.57704)),
    "a3-highgpu-1g": ("us-east4", Rate(10.97906, 4.06696)),
    "a3-highgpu-2g": ("us-east4", Rate(21.95812, 8.13394)),
    "a3-highgpu-4g": ("us-east4", Rate(43.91623, 16.26783)),
    "a3-highgpu-8g": ("us-east4", Rate(87.83247, 32.53570)),
    "a3-ultragpu-8g": ("us-central1", Rate(83.492, 50.0856)),
}


def price_of(
    topology: Topology, zone: str = "", own: Mapping[str, float] | None = None
) -> Price | None:
    """Return what one slice costs where it runs; None where that is not known.

    Args:
        topology: the slice; `topology.spot` asks for the price of preemptible machines.
        zone: of the cluster, or its region. Where the list has none for it, the first region of
            the list stands for it, and the price's origin names that one.
        own: what the user pays for one chip or GPU of a family, by the family's name, with
            `SPOT` behind it for preemptible ones.
    """
    key = topology.family + (SPOT if topology.spot else "")
    if own and key in own:
        return Price(own[key] * topology.chips, "your price")
    region, rate = _find_rate(topology, zone)
    each = None if rate is None else rate.spot if topology.spot else rate.on_demand
    if each is None:
        return None
    units = topology.chips if topology.family in _CHIPS else topology.hosts
    kind = ", spot" if topology.spot else ""
    source = BILLING if topology.machine_type in _IN_BILLING else LIST
    return Price(round(each * units, 5), f"list price, {region}{kind}", source, region)


def _find_rate(topology: Topology, zone: str) -> tuple[str, Rate | None]:
    regions = _CHIPS.get(topology.family)
    if regions is None:
        return _MACHINES.get(topology.machine_type, ("", None))
    for region in (zone, zone.rpartition("-")[0]):
        if region in regions:
            return region, regions[region]
    return next(iter(regions.items()))


def check_family(name: str) -> str | None:
    """Return the name of a family, or of its preemptible chips, from one of its names; None if
    there is no such family."""
    given, spot = name.lower().removesuffix(SPOT), SPOT if name.lower().endswith(SPOT) else ""
    given = given.removeprefix("tpu-").removeprefix("gpu-")
    names = {"cpu": "cpu"} | {n: each.name for each in FAMILIES for n in (each.name, *each.aliases)}
    return names[given] + spot if given in names else None


def in_usd(amount: float) -> str:
    """Return an amount as people write it: "$43.20", "$0.0042"."""
    if amount and amount < 0.01:
        return f"${amount:.2g}" if amount >= 0.0001 else "less than $0.0001"
    return f"${amount:,.2f}"
