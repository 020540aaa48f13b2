"""Figures of one chip of each TPU family: memory, speed and bandwidth.

The figures are from the vendor's pages about each generation (docs.cloud.google.com/tpu/docs/v3,
/v4, /v5e, /v5p, /v6e, /tpu7x) of November 2026; for v3 and v4, from quotations of these pages.
Since v5e, the pages give the bandwidth between chips for both directions together; for v3 and v4,
it is the sum of all links (4 of 656 Gbps, 6 of 400 Gbps).
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30
_GBPS = 10**9


class ChipFacts(NamedTuple):
    """Figures of one chip.

    Attributes:
        hbm_bytes: size of the memory.
        flops: peak bfloat16 operations per second.
        hbm_bytes_s: bandwidth of the memory, in bytes per second.
        ici_bytes_s: bandwidth to other chips of the slice, in one direction.
        dcn_bytes_s: the chip's share of its machine's bandwidth to other slices; 0 if unknown.
        devices: number of JAX devices of the chip, when JAX compiles for it.
        source: page with these figures.
    """

    hbm_bytes: int
    flops: float
    hbm_bytes_s: float
    ici_bytes_s: float
    dcn_bytes_s: float
    devices: int = 1
    source: str = ""


def _page(name: str) -> str:
    return f"https://docs.cloud.google.com/tpu/docs/{name}"


CHIPS: dict[str, ChipFacts] = {
    "v3": ChipFacts(32 * GIB, 123e12, 900 * _GBPS, 328 * _GBPS, 0.0, devices=2, source=_page("v3")),
    "v4": ChipFacts(32 * GIB, 275e12, 1200 * _GBPS, 300 * _GBPS, 0.0, source=_page("v4")),
    "v5litepod": ChipFacts(
        16 * GIB, 197e12, 819 * _GBPS, 200 * _GBPS, 25 * _GBPS / 8, source=_page("v5e")
    ),
    "v5p": ChipFacts(
        95 * GIB, 459e12, 2765 * _GBPS, 600 * _GBPS, 50 * _GBPS / 8, source=_page("tpu7x")
    ),
    "v6e": ChipFacts(
        32 * GIB, 918e12, 1638 * _GBPS, 400 * _GBPS, 100 * _GBPS / 8, source=_page("tpu7x")
    ),
    "tpu7x": ChipFacts(
        192 * GIB,
        2307e12,
        7380 * _GBPS,
        600 * _GBPS,
        100 * _GBPS / 8,
        devices=2,
        source=_page("tpu7x"),
    ),
}
