"""What one chip of each TPU family has, as data.

In: nothing. Out: `ChipFacts` by the name of the family.

From the vendor's pages about each generation (docs.cloud.google.com/tpu/docs/v3, /v4, /v5e, /v5p,
/v6e, /tpu7x), as read in November 2026; those of v3 and v4 as others quote them. The pages give
bandwidth between chips in both directions together, since v5e; for v3 and v4 it is that of all
links (4 of 656 Gbps, 6 of 400 Gbps).
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30
_GBPS = 10**9


class ChipFacts(NamedTuple):
    """One chip.

    Attributes:
        hbm_bytes: memory.
        flops: peak, of bfloat16, per second.
        hbm_bytes_s: bandwidth of its memory.
        ici_bytes_s: what it can send to other chips of its slice, in one direction.
        dcn_bytes_s: its share of its machine's network to other slices; 0 where nobody says.
        devices: how many devices JAX sees of it where it compiles for one.
        source: where these figures are from.
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
