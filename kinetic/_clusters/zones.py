"""The zones that have TPUs. A zone without them is thus refused before any service is called."""

from __future__ import annotations

DATE = "November 2026"
SOURCE = "https://docs.cloud.google.com/tpu/docs/regions-zones"
GPU_SOURCE = "https://docs.cloud.google.com/compute/docs/gpus/gpu-regions-zones"
TPU_ZONES: dict[str, tuple[str, ...]] = {
    "v3": ("us-central1-a", "us-central1-b", "europe-west4-a"),
    "v4": ("us-central2-b",),
    "v5litepod": ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b"),
    "v5p": ("us-central1-a", "us-east5-a", "europe-west4-b"),
    "v6e": (
        *("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b"),
        *("europe-west4-a", "asia-northeast1-b"),
    ),
    "tpu7x": ("us-central1-c",),
}
USUAL = "us-central1-a"
"""The zone for accelerators that every zone has."""


def region_of(location: str) -> str:
    """Return the region of a zone. A region is returned unchanged."""
    return "-".join(location.split("-")[:2])


def zones_of(family: str) -> tuple[str, ...]:
    """Return the zones that have a family of TPUs; () if the table does not contain the family."""
    return TPU_ZONES.get(family, ())


def fits_location(location: str, wanted: str) -> bool:
    """True if a cluster at `location` is where the user wants it. `wanted` may be the location
    itself, its region, a zone in it, or "" for any location."""
    return wanted in ("", location, region_of(location)) or region_of(wanted) == location
