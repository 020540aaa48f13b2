"""Questions of callers that do not reach the leader's port: they ask in the store, for stacks or
for what the hosts are doing.

In: a store, the coordinator. Out: answers in the store. Who has asked for activity asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kinetic._core import layout, record
from kinetic._core.gang.machine import Gang
from kinetic._store.base import Store
from kinetic.errors import KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._rpc.server import Coordinator

DUMP_S = 5.0
"""How long hosts may take to dump their stacks."""
LOOK_SOON_S, WATCHED_S = 2.0, 30.0
"""How often to look while somebody watches what the hosts are doing, and for how long after the
last question."""


async def answer(
    store: Store, job_id: str, coordinator: Coordinator, gang: Callable[[], Gang], far_s: float
) -> None:
    """Answer until it is cancelled. `gang` is that of the current attempt, `far_s` how often to
    look while nobody asks."""

    async def stacks() -> dict[str, object]:
        found = await coordinator.dump_stacks(DUMP_S)
        return {"stacks": {str(host): text for host, text in found.items()}}

    async def activity() -> dict[str, object]:
        return {"activity": gang().snapshot()}

    answered: dict[str, str] = {}
    watched_until = 0.0
    while True:
        await asyncio.sleep(min(far_s, LOOK_SOON_S) if time.monotonic() < watched_until else far_s)
        place = job_id, gang().spec.attempt
        for wanted, key, act in (
            (layout.stacks_wanted(*place), layout.stacks(*place), stacks),
            (layout.activity_wanted(*place), layout.activity(*place), activity),
        ):
            with contextlib.suppress(KineticError):  # It is asked again, or answered next time.
                asked = await asyncio.to_thread(_read_request_id, store, wanted)
                if asked in ("", answered.get(wanted)):
                    continue
                data = json.dumps({"id": asked} | await act()).encode()
                await asyncio.to_thread(store.put, key, data)
                answered[wanted] = asked
                if act is activity:
                    watched_until = time.monotonic() + WATCHED_S


def _read_request_id(store: Store, key: str) -> str:
    try:
        return str(record.parse(store.get(key))["id"])
    except (NotFound, LookupError):
        return ""
