"""The leader's event loop: its server, its signals, its periodic reads of the store.

The leader waits in `pause` between two decisions; `wake` ends the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from kinetic._core import layout, record
from kinetic._core.gang.machine import Gang
from kinetic._host.hosts import Hosts
from kinetic._rpc.server import Coordinator
from kinetic._store.base import Store, is_near
from kinetic._system import pipes, processes
from kinetic.errors import CorruptRecord, KineticError, NotFound, StoreError

PAUSE_S = 0.1
"""Longest pause between two decisions while something may be due."""
RECORDS_S, FAR_RECORDS_S = 0.5, 10.0
"""Time between two checks that the job's records exist: in a folder, in a remote store."""
MISSES = 2
"""Checks in a row that find no records before the job counts as removed."""
DUMP_S = 5.0
"""Time that hosts have to dump their stacks."""
QUEUE_S = 0.3
"""Time between two reads of a session's queue in a remote store."""
POLL_SOON_S, WATCHED_S = 2.0, 30.0
"""Polling interval while a caller follows the activity of the hosts, and how long after its last
request that interval lasts."""
WRITE_S = 600.0
"""Longest time for which a verdict is written again and again while the store fails."""
T = TypeVar("T")
_Row = tuple[str, str, Callable[[Mapping[str, Any]], Awaitable[dict[str, object]]]]
"""Key of a request, key of its response, and the function that makes the response."""


class LeaderRuntime:
    """Serves a coordinator in the running event loop."""

    def __init__(self, store: Store, job_id: str, coordinator: Coordinator) -> None:
        self._store = store
        self._job_id = job_id
        self._coordinator = coordinator
        self._changed = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []
        self._listener: asyncio.Server | None = None
        self._callers: set[asyncio.Transport] = set()

    async def open(self, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Start the server, and handle these signals."""
        with processes.dying_when_stuck():
            await self._coordinator.start()
        for signum, handler in handlers.items():
            asyncio.get_running_loop().add_signal_handler(signum, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    def watch_records(
        self, has_records: Callable[[], bool], on_removal: Callable[[], None]
    ) -> None:
        """Call `on_removal` once the job's records are gone: nobody could find, watch or cancel the
        job. Two checks in a row must miss them, because a network file system may miss a file for a
        moment. A store that is slow or does not answer does not block the loop."""

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

    async def ask(self, question: Callable[[], T]) -> T:
        """Put a question to the store and return the answer. The gang is served meanwhile, even if
        the store takes minutes."""
        is_far = not is_near(self._store)
        return await asyncio.to_thread(question) if is_far else question()

    async def ask_until_done(self, write: Callable[[], object]) -> None:
        """Write to the store; while it fails, repeat it every second, for at most `WRITE_S`.

        Raises:
            StoreError: it still fails.
        """
        until = time.monotonic() + WRITE_S
        while True:
            try:
                await self.ask(write)
            except StoreError:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(1.0)
            else:
                return

    def watch(self, question: Callable[[], bool], then: Callable[[], object]) -> asyncio.Task[None]:
        """Ask a question of the store until the answer is True, then call `then` once. The caller
        cancels the task when it is no longer needed."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(PAUSE_S if is_near(self._store) else POLL_SOON_S)
                with contextlib.suppress(StoreError):
                    if await self.ask(question):
                        then()
                        return

        return asyncio.create_task(watch())

    def listen(self, bell: Path) -> None:
        """End the current or the next pause whenever somebody writes to this pipe."""
        fd = pipes.listen(bell)

        def wake() -> None:
            os.read(fd, 1 << 16)
            self.wake()

        asyncio.get_running_loop().add_reader(fd, wake)

    async def listen_on_port(self, session_id: str) -> None:
        """Listen on a port of the pod's loopback address, and store its number, for callers that
        port-forward to it. Whatever they send ends the current or the next pause."""
        callers, wake = self._callers, self.wake

        class Caller(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = cast("asyncio.Transport", transport)
                callers.add(self.transport)

            def data_received(self, data: bytes) -> None:
                wake()
                self.transport.write(b"\n")  # Callers give up a connection without an answer.

            def connection_lost(self, exc: Exception | None) -> None:
                callers.discard(self.transport)

        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(Caller, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        key = layout.JobKeys(session_id).bell_port
        with contextlib.suppress(StoreError):  # Callers poll the store instead.
            await self.ask(lambda: self._store.put(key, json.dumps({"port": port}).encode()))

    def tell_callers(self, job_id: str) -> None:
        """Tell all connected callers that a call has a verdict."""
        for transport in self._callers:
            transport.write(f"{job_id}\n".encode())

    def ask_for(self, question: Callable[[], bool], then: Callable[[bool], None]) -> None:
        """Put a question to the store, and call `then` with the answer; False on an error."""

        async def ask() -> None:
            answer = False
            with contextlib.suppress(KineticError, OSError):
                answer = await self.ask(question)
            then(answer)

        self._watching.append(asyncio.create_task(ask()))

    def answer_questions(self, hosts: Hosts, gang: Callable[[], Gang]) -> None:
        """Answer the requests that callers put into the store."""
        about = self._store, self._job_id, self._coordinator, hosts
        answers = answer_questions(*about, gang=gang, far_s=self._records_s)
        self._watching.append(asyncio.create_task(answers))

    @property
    def _records_s(self) -> float:
        return RECORDS_S if is_near(self._store) else FAR_RECORDS_S

    def wake(self) -> None:
        """End the current or the next pause."""
        self._changed.set()

    async def pause(self, limit_s: float | None = PAUSE_S) -> None:
        """Wait until `wake` is called, but at most this many seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        self._changed.clear()

    async def pause_between_reads(self) -> None:
        """Wait until `wake` is called, or until a queue in the store should be read again."""
        await self.pause(PAUSE_S if is_near(self._store) else QUEUE_S)

    def stop_watching(self) -> None:
        """Stop polling the store."""
        for task in self._watching:
            task.cancel()

    async def close(self) -> None:
        """Stop the server. SIGTERM stays pending from now on: it must not kill this process before
        the verdict is written."""
        if self._listener is not None:
            self._listener.close()
        for transport in list(self._callers):
            transport.close()
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
    """Answer requests that callers put into the store because they cannot reach the leader's port:
    for stacks, for the activity of the hosts, or to kill hosts. Runs until it is cancelled.

    Args:
        store, job_id, coordinator, hosts: of the job.
        gang: returns the gang of the current attempt.
        far_s: seconds between two polls; shorter for a while after a request for activity, whose
            caller asks repeatedly.
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
        await asyncio.sleep(min(far_s, POLL_SOON_S) if time.monotonic() < watched_until else far_s)
        keys = layout.AttemptKeys(job_id, gang().spec.attempt)
        rows: list[_Row] = [
            (keys.stacks_wanted, keys.stacks, stacks),
            (keys.activity_wanted, keys.activity, activity),
        ]
        for wanted, key, act in rows:
            # A lost answer is sent in the next round; a malformed request is ignored.
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
            with contextlib.suppress(KineticError):  # The next round reads the orders again.
                await _obey_orders(store, keys, hosts, obeyed)


async def _obey_orders(
    store: Store,
    attempt_keys: layout.AttemptKeys,
    hosts: Hosts,
    obeyed: dict[str, dict[str, object]],
) -> None:
    """Kill hosts as ordered, once per order: an order whose answer did not reach the store is read
    again. `obeyed` keeps the answers, by id. Several callers may put orders at the same time."""
    for key in await asyncio.to_thread(lambda: list(store.list(attempt_keys.orders))):
        request_id = key.rpartition("/")[2].removesuffix(".json")
        # Malformed orders are deleted unanswered.
        with contextlib.suppress(CorruptRecord, LookupError, TypeError, ValueError):
            order = await asyncio.to_thread(_read_request, store, key)
            if order["id"] != request_id:
                raise ValueError(key)
            if request_id not in obeyed:
                obeyed[request_id] = {"hosts": sorted(hosts.kill_programs(order["hosts"]))}
            data = json.dumps({"id": request_id} | obeyed[request_id]).encode()
            await asyncio.to_thread(store.put, attempt_keys.order_answer(request_id), data)
        await asyncio.to_thread(store.delete, key)


def _read_request(store: Store, key: str) -> Mapping[str, Any]:
    try:
        request = record.parse(store.get(key))
        return request | {"id": str(request["id"])}
    except (NotFound, LookupError):
        return {"id": ""}
