"""Where a leader sits while its gangs are served: one coordinator, signals, looks into the store.

In: a coordinator, what to do on signals. Out: a wake-up whenever something has happened.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from kinetic._core.gang.machine import Gang
from kinetic._host import questions
from kinetic._host.hosts import Hosts
from kinetic._rpc.server import Coordinator
from kinetic._store.base import Store
from kinetic.errors import KineticError

LOOK_S = 0.1
"""How often the leader looks what there is to do when nothing wakes it."""
RECORDS_S, FAR_RECORDS_S = 0.5, 10.0
"""How often it checks that the job's records still exist; where each check is a request."""


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
        cancelled. A store that is slow, or does not answer, keeps nobody waiting here."""

        async def look() -> bool:
            with suppress(KineticError, OSError):
                return await self.ask(has_records)
            return True  # It is not known, and asked again.

        async def watch() -> None:
            while await look():
                await asyncio.sleep(self._records_s)
            on_removal()

        self._watching.append(asyncio.create_task(watch()))

    async def ask(self, question: Callable[[], bool]) -> bool:
        """Return what the store answers; the gang is served meanwhile, also where that takes
        minutes."""
        is_far = self._store.as_folder() is None
        return await asyncio.to_thread(question) if is_far else question()

    def ask_for(self, question: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Call this later with what the store answers; where it does not, that is no."""

        async def find_out() -> None:
            answer = False
            with suppress(KineticError, OSError):
                answer = await self.ask(question)
            then(answer)

        self._watching.append(asyncio.create_task(find_out()))

    def answer_questions(self, hosts: Hosts, gang: Callable[[], Gang]) -> None:
        """Answer those that are asked in the store."""
        about = self._store, self._job_id, self._coordinator, hosts
        answers = questions.answer(*about, gang=gang, far_s=self._records_s)
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
