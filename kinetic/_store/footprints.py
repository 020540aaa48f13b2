"""How much memory a host took in a function's last run: a small record per function that took much.

In: a store, plans, verdicts. Out: bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import TYPE_CHECKING

from kinetic._core import layout, record
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._core.outcome import Outcome
    from kinetic._core.plan import Plan
    from kinetic._store.base import Store

WORTH_BYTES = 256 << 20
"""Less is not recorded: any host with JAX takes that much."""


def peak_bytes(store: Store, plan: Plan) -> int:
    """Return the most memory that a host took when the plan's function ran last; 0 if unknown."""
    try:
        document = record.parse(store.get(_key(plan)))
        return max(0, int(document["peak_rss_bytes"]))
    except (KineticError, KeyError, TypeError, ValueError):
        return 0  # absent or damaged


def remember(store: Store, plan: Plan, outcome: Outcome) -> None:
    """Record what the hosts took. A failed run may have ended early, so it can only raise the
    number."""
    peak = max(
        (report.peak_rss_bytes for report in outcome.reports if report.started_at), default=0
    )
    before = peak_bytes(store, plan)
    if (peak <= before and not outcome.ok) or max(peak, before) < WORTH_BYTES:
        return
    document = {
        "name": plan.name,
        "peak_rss_bytes": peak,
        "hosts": plan.hosts,
        "accelerator": plan.topology.name,
    }
    with contextlib.suppress(KineticError):  # on a full disk, for example: it is only an estimate
        store.put(_key(plan), json.dumps(document).encode())


def _key(plan: Plan) -> str:
    """One key for every run of a function or program, on any slice."""
    identity = "\0".join((plan.client_root, plan.entry_rel, plan.name))
    return layout.footprint(hashlib.sha256(identity.encode(errors="surrogatepass")).hexdigest())
