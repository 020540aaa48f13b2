"""Questions of callers that do not reach the leader's port: they ask in the store, for stacks, for
what the hosts are doing, to kill some, or to reach a port of one.

In: a store, the coordinator, the hosts. Out: answers in the store. Who has asked for activity asks
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from kinetic._core import layout, record
from kinetic._core.gang.machine import Gang
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, KineticError, NotFound

if TYPE_CHECKING:
    from kinetic._host.hosts import Hosts
    from kinetic._rpc.server import Coordinator

DUMP_S = 5.0
"""How long hosts may take to dump their stacks."""
LOOK_SOON_S, WATCHED_S = 2.0, 30.0
"""How often to look while somebody watches what the hosts are doing, and for how long after the
last question."""


_Row = tuple[str, str, Callable[[Mapping[str, Any]], Awaitable[dict[str, object]]]]
"""Where it is asked, where the answer goes, and what finds it."""


async def answer(
    store: Store,
    job_id: str,
    coordinator: Coordinator,
    hosts: Hosts,
    *,
    gang: Callable[[], Gang],
    far_s: float,
) -> None:
    """Answer until it is cancelled. `gang` is that of the current attempt, `far_s` how often to
    look while nobody asks."""

    async def stacks(_: Mapping[str, Any]) -> dict[str, object]:
        found = await coordinator.dump_stacks(DUMP_S)
        return {"stacks": {str(host): text for host, text in found.items()}}

    async def activity(_: Mapping[str, Any]) -> dict[str, object]:
        return {"activity": gang().snapshot()}

    answered: dict[str, str] = {}
    watched_until = 0.0
    obeyed: dict[str, dict[str, object]] = {}
    while True:
        await asyncio.sleep(min(far_s, LOOK_SOON_S) if time.monotonic() < watched_until else far_s)
        place = job_id, gang().spec.attempt
        rows: list[_Row] = [
            (layout.stacks_wanted(*place), layout.stacks(*place), stacks),
            (layout.activity_wanted(*place), layout.activity(*place), activity),
        ]
        for wanted, key, act in rows:
            # It is asked again, or answered next time; or it is no question of ours.
            with contextlib.suppress(KineticError, LookupError, TypeError, ValueError):
                asked = await asyncio.to_thread(_read_request, store, wanted)
                if asked["id"] in ("", answered.get(wanted)):
                    continue
                data = json.dumps({"id": asked["id"]} | await act(asked)).encode()
                await asyncio.to_thread(store.put, key, data)
                answered[wanted] = asked["id"]
                if act is activity:
                    watched_until = time.monotonic() + WATCHED_S
        if hosts.takes_orders:
            with contextlib.suppress(KineticError):  # They are looked for again.
                await _answer_orders(store, place, hosts, gang(), obeyed)


async def _answer_orders(
    store: Store,
    place: tuple[str, int],
    hosts: Hosts,
    gang: Gang,
    obeyed: dict[str, dict[str, object]],
) -> None:
    """Obey each order once: its answer may not have arrived in the store. Several callers may order
    something at the same time."""
    keys = await asyncio.to_thread(lambda: list(store.list(layout.orders(*place))))
    for key in keys:
        request_id = key.rpartition("/")[2].removesuffix(".json")
        # What raises these is no order of ours.
        with contextlib.suppress(CorruptRecord, LookupError, TypeError, ValueError):
            asked = await asyncio.to_thread(_read_request, store, key)
            if asked["id"] != request_id:
                raise ValueError(key)
            if request_id not in obeyed:
                obeyed[request_id] = await _obey(place[0], asked, hosts, gang)
            data = json.dumps({"id": request_id} | obeyed[request_id]).encode()
            await asyncio.to_thread(store.put, layout.order_answer(*place, request_id), data)
        await asyncio.to_thread(store.delete, key)


async def _obey(
    job_id: str, asked: Mapping[str, Any], hosts: Hosts, gang: Gang
) -> dict[str, object]:
    """Do as somebody has ordered."""
    if "port" not in asked:
        return {"hosts": sorted(hosts.kill_programs(asked["hosts"]))}
    host, slices = asked["host"], gang.spec.slices or (0,)
    if host not in range(gang.spec.hosts):
        return {"refused": f"there is no host {host}"}
    which, index = divmod(host, gang.spec.hosts // len(slices))
    index += slices[which] * (gang.spec.hosts // len(slices))
    tunnel = layout.tunnel(job_id, gang.spec.attempt, asked["id"])
    try:
        opening = hosts.open_tunnel(index, asked["port"], tunnel)
        return {"refused": await asyncio.wait_for(opening, DUMP_S)}
    except TimeoutError:
        return {"refused": f"host {host} did not answer within {DUMP_S:g} s"}


def _read_request(store: Store, key: str) -> Mapping[str, Any]:
    try:
        found = record.parse(store.get(key))
        return found | {"id": str(found["id"])}
    except (NotFound, LookupError):
        return {"id": ""}
