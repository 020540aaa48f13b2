"""The leader's event loop: its server, its signals, its periodic reads of the store.

The leader waits here between two decisions, and is woken whenever something has happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kinetic._core import layout, record
from kinetic._core.gang.machine import Gang
from kinetic._host.hosts import Hosts
from kinetic._rpc.server import Coordinator
from kinetic._store.base import Store, is_near
from kinetic._system import processes
from kinetic.errors import CorruptRecord, KineticError, NotFound

LOOK_S = 0.1
"""How often the leader looks what there is to do when nothing wakes it."""
RECORDS_S, FAR_RECORDS_S = 0.5, 10.0
"""How often it checks that the job's records still exist; where each check is a request."""
MISSES = 2
"""Checks in a row that find no records before the job counts as removed."""
DUMP_S = 5.0
"""How long hosts may take to dump their stacks."""
LOOK_SOON_S, WATCHED_S = 2.0, 30.0
"""How often to look while somebody watches what the hosts are doing, and for how long after the
last question."""
_Row = tuple[str, str, Callable[[Mapping[str, Any]], Awaitable[dict[str, object]]]]
"""Where it is asked, where the answer goes, and what finds it."""


class LeaderRuntime:
    """Serves a coordinator in the running event loop."""

    def __init__(self, store: Store, job_id: str, coordinator: Coordinator) -> None:
        self._store = store
        self._job_id = job_id
        self._coordinator = coordinator
        self._changed = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    async def open(self, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Serve, and handle these signals."""
        with processes.dying_when_stuck():
            await self._coordinator.start()
        for signum, handler in handlers.items():
            asyncio.get_running_loop().add_signal_handler(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    def watch_records(
        self, has_records: Callable[[], bool], on_removal: Callable[[], None]
    ) -> None:
        """Call back once when the job has no records any more: it could not be found, watched or
        cancelled. Two checks in a row must say so: a file system of a network may miss a file for
        a moment. A store that is slow, or does not answer, keeps nobody waiting here."""

        async def watch() -> None:
            misses = 0
            while True:
                try:
                    misses = 0 if await self.ask(has_records) else misses + 1
                except (KineticError, OSError):
                    misses = 0
                if misses == MISSES:
                    return on_removal()
                await asyncio.sleep(self._records_s)

        self._watching.append(asyncio.create_task(watch()))

    async def ask(self, question: Callable[[], bool]) -> bool:
        """Return what the store answers; the gang is served meanwhile, also where that takes
        minutes."""
        is_far = not is_near(self._store)
        return await asyncio.to_thread(question) if is_far else question()

    def ask_for(self, question: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Call this later with what the store answers; where it does not, that is no."""

        async def find_out() -> None:
            answer = False
            with contextlib.suppress(KineticError, OSError):
                answer = await self.ask(question)
            then(answer)

        self._watching.append(asyncio.create_task(find_out()))

    def answer_questions(self, hosts: Hosts, gang: Callable[[], Gang]) -> None:
        """Answer those that are asked in the store."""
        about = self._store, self._job_id, self._coordinator, hosts
        answers = answer_questions(*about, gang=gang, far_s=self._records_s)
        self._watching.append(asyncio.create_task(answers))

    @property
    def _records_s(self) -> float:
        return RECORDS_S if is_near(self._store) else FAR_RECORDS_S

    def wake(self) -> None:
        """Something has happened."""
        self._changed.set()

    async def pause(
        self, finished: asyncio.Task[None] | None = None, *, is_due: bool = True
    ) -> None:
        """Until something has happened, this has finished, or, where something may be due, a moment
        has passed."""
        waking = asyncio.create_task(self._changed.wait())
        awaited = {waking} if finished is None else {waking, finished}
        await asyncio.wait(
            awaited, timeout=LOOK_S if is_due else None, return_when=asyncio.FIRST_COMPLETED
        )
        waking.cancel()
        self._changed.clear()

    def stop_watching(self) -> None:
        """Look for nothing in the store any more."""
        for task in self._watching:
            task.cancel()

    async def close(self) -> None:
        """Serve no more. SIGTERM stays pending from now on: it must not kill this process before it
        has written the verdict."""
        with processes.dying_when_stuck():
            await self._coordinator.stop()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


async def answer_questions(
    store: Store,
    job_id: str,
    coordinator: Coordinator,
    hosts: Hosts,
    *,
    gang: Callable[[], Gang],
    far_s: float,
) -> None:
    """Answer the questions of callers that do not reach the leader's port, until it is cancelled:
    they ask in the store, for stacks, for what the hosts are doing, or to kill some. Who has asked
    for activity asks again.

    Args:
        store, job_id, coordinator, hosts: of the job.
        gang: that of the current attempt.
        far_s: how often to look while nobody asks.
    """

    async def stacks(_: Mapping[str, Any]) -> dict[str, object]:
        answers = await coordinator.dump_stacks(DUMP_S)
        return {"stacks": {str(host): text for host, text in answers.items()}}

    async def activity(_: Mapping[str, Any]) -> dict[str, object]:
        return {"activity": gang().snapshot()}

    answered: dict[str, str] = {}
    watched_until = 0.0
    obeyed: dict[str, dict[str, object]] = {}
    while True:
        await asyncio.sleep(min(far_s, LOOK_SOON_S) if time.monotonic() < watched_until else far_s)
        place = job_id, gang().spec.attempt
        rows: list[_Row] = [
            (layout.AttemptKeys(*place).stacks_wanted, layout.AttemptKeys(*place).stacks, stacks),
            (
                layout.AttemptKeys(*place).activity_wanted,
                layout.AttemptKeys(*place).activity,
                activity,
            ),
        ]
        for wanted, key, act in rows:
            # It is asked again, or answered next time; or it is no question of ours.
            with contextlib.suppress(KineticError, LookupError, TypeError, ValueError):
                request = await asyncio.to_thread(_read_request, store, wanted)
                if request["id"] in ("", answered.get(wanted)):
                    continue
                data = json.dumps({"id": request["id"]} | await act(request)).encode()
                await asyncio.to_thread(store.put, key, data)
                answered[wanted] = request["id"]
                if act is activity:
                    watched_until = time.monotonic() + WATCHED_S
        if hosts.takes_orders:
            with contextlib.suppress(KineticError):  # They are looked for again.
                await _obey_orders(store, place, hosts, obeyed)


async def _obey_orders(
    store: Store,
    place: tuple[str, int],
    hosts: Hosts,
    obeyed: dict[str, dict[str, object]],
) -> None:
    """Kill hosts as ordered, once for each order: its answer may not have arrived in the store.
    Several callers may order something at the same time."""
    keys = await asyncio.to_thread(lambda: list(store.list(layout.AttemptKeys(*place).orders)))
    for key in keys:
        request_id = key.rpartition("/")[2].removesuffix(".json")
        # What raises these is no order of ours.
        with contextlib.suppress(CorruptRecord, LookupError, TypeError, ValueError):
            order = await asyncio.to_thread(_read_request, store, key)
            if order["id"] != request_id:
                raise ValueError(key)
            if request_id not in obeyed:
                obeyed[request_id] = {"hosts": sorted(hosts.kill_programs(order["hosts"]))}
            data = json.dumps({"id": request_id} | obeyed[request_id]).encode()
            await asyncio.to_thread(
                store.put, layout.AttemptKeys(*place).order_answer(request_id), data
            )
        await asyncio.to_thread(store.delete, key)


def _read_request(store: Store, key: str) -> Mapping[str, Any]:
    try:
        request = record.parse(store.get(key))
        return request | {"id": str(request["id"])}
    except (NotFound, LookupError):
        return {"id": ""}
