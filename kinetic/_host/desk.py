"""Where a leader sits while its gangs are served: one coordinator, signals, looks into the store.

In: a coordinator, what to do on signals. Out: a wake-up whenever something has happened; answers in
the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Mapping

from kinetic._core import layout, record
from kinetic._core.gang.machine import Gang
from kinetic._rpc.server import Coordinator
from kinetic._store.base import Store
from kinetic.errors import KineticError, NotFound

LOOK_S = 0.1
"""How often the leader looks what there is to do when nothing wakes it."""
RECORDS_S, FAR_RECORDS_S = 0.5, 10.0
"""How often it checks that the job's records still exist; where each check is a request."""
DUMP_S = 5.0
"""How long hosts may take to dump their stacks."""
LOOK_SOON_S, WATCHED_S = 2.0, 30.0
"""How often to look while somebody watches what the hosts are doing, and for how long after the
last question."""


class Desk:
    """A coordinator, in the event loop that runs."""

    def __init__(self, store: Store, job_id: str, coordinator: Coordinator) -> None:
        self._store = store
        self._job_id = job_id
        self._coordinator = coordinator
        self._changed = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    async def open(self, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Serve, and handle these signals."""
        await self._coordinator.start()
        for signum, handler in handlers.items():
            asyncio.get_running_loop().add_signal_handler(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    def watch_records(
        self, has_records: Callable[[], bool], on_removal: Callable[[], None]
    ) -> None:
        """Call back once when the job has no records any more: it could not be found, watched or
        cancelled."""

        async def watch() -> None:
            while has_records():
                await asyncio.sleep(self._records_s)
            on_removal()

        self._watching.append(asyncio.create_task(watch()))

    def answer_questions(self, gang: Callable[[], Gang]) -> None:
        """Answer those that are asked in the store."""
        store, job_id = self._store, self._job_id
        answers = _answer(store, job_id, self._coordinator, gang, self._records_s)
        self._watching.append(asyncio.create_task(answers))

    @property
    def _records_s(self) -> float:
        return RECORDS_S if self._store.as_folder() is not None else FAR_RECORDS_S

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
        await self._coordinator.stop()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


async def _answer(
    store: Store, job_id: str, coordinator: Coordinator, gang: Callable[[], Gang], far_s: float
) -> None:
    """Answer callers that do not reach the leader's port, and ask in the store: for stacks, or,
    again and again, for what the hosts are doing. `gang` is that of the current attempt, `far_s`
    how often to look while nobody asks."""

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
