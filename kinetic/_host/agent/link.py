"""The agent's connection to the coordinator, in its own thread, so that a slow or dead coordinator
never delays the worker's output.

Events for the agent's loop are queued; a byte on a pipe wakes the loop.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kinetic._core.gang.messages import Heartbeat, HostView
from kinetic._core.gang.programs import ProgramNote
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass
from kinetic._host.identity import Identity
from kinetic._system import processes
from kinetic.errors import CoordinatorLost, KineticError

if TYPE_CHECKING:
    from kinetic._rpc.client import AgentClient


@dataclass(frozen=True)
class Event:
    """An event for the agent's loop: a new view, a delivered report, a lost coordinator (`lost` is
    a sentence), or another exception that ended the link."""

    view: HostView | None = None
    reported: bool = False
    lost: str = ""
    fault: Exception | None = None


HANG_UP_S = 2.0


class Link:
    """Joins the gang, sends heartbeats and delivers reports; results come back as `Event`s."""

    def __init__(
        self, identity: Identity, beat: Callable[[], Heartbeat], channel: Any = None
    ) -> None:
        """Make the link; `beat` returns a heartbeat, `channel` is an open channel or None."""
        self._identity, self._channel = identity, channel
        self._beat = beat
        self._orders: queue.SimpleQueue[Callable[[AgentClient], object] | None]
        self._orders = queue.SimpleQueue()  # None ends the link.
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._notes: queue.SimpleQueue[ProgramNote] = queue.SimpleQueue()
        self.wake_fd, self._wake = os.pipe()
        self._joined = self._reached = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect, and watch the gang, without joining it yet. Idempotent."""
        if self._thread is None:
            if self._identity.turn <= 1:  # It takes 10 ms, and each call of a session has a link.
                processes.check_threads()
            self._thread = threading.Thread(target=self._run, name="kinetic-link", daemon=True)
            self._orders.put(lambda client: client.watch(self._on_view, self._on_fault))
            self._thread.start()

    def join(self, address: str, began: Callable[[], float]) -> None:
        """Join the gang. Heartbeats are sent as soon as the coordinator is reached; from now on a
        heartbeat that does not arrive ends the link.

        Args:
            address: where the other hosts reach this one.
            began: returns the monotonic time at which the function began; 0.0 before that.
        """
        incarnation = os.urandom(8).hex()

        def join(client: AgentClient) -> None:
            client.join(incarnation, address, began())
            self._joined = True

        self._orders.put(join)

    def report(self, report: HostReport) -> None:
        """Deliver the report of the host's end."""

        def deliver(client: AgentClient) -> None:
            client.report(report)
            self._post(Event(reported=True))

        self._orders.put(deliver)

    def announce(self, report: HostReport) -> None:
        """Announce that the host ends soon, and how; `report` then delivers the same report."""
        report = replace(report, announced=True)
        self._orders.put(lambda client: client.report(report))

    def stacks(self, request: int, text: str) -> None:
        """Deliver the worker's stacks in response to a request."""
        self._orders.put(lambda client: client.stacks(request, text))

    def tell_program(self, note: ProgramNote) -> None:
        """Tell the leader of a program that the host runs for the first time."""
        self._notes.put(note)

        def deliver(client: AgentClient) -> None:
            if not self._notes.empty():  # One message may tell of several.
                client.programs(tuple(self._notes.get() for _ in range(self._notes.qsize())))

        self._orders.put(deliver)

    def beat_now(self) -> None:
        """Send a heartbeat now, because the activity that users see has changed."""
        self._orders.put(lambda client: client.heartbeat(self._beat()))

    def stop(self) -> None:
        """Close the connection, and free the pipe unless the thread hangs."""
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(HANG_UP_S)
        if self._thread is None or not self._thread.is_alive():
            for fd in (self.wake_fd, self._wake):
                os.close(fd)

    def events(self) -> list[Event]:
        """Return the events since the last call, and empty the wake pipe.

        Raises:
            Exception: the fault that ended the link; a lost coordinator is an event instead.
        """
        os.read(self.wake_fd, 4096)
        events = []
        while not self._events.empty():
            events.append(event := self._events.get())
            if event.fault is not None:  # An agent without a link must not live on.
                raise event.fault
        return events

    def _on_view(self, view: HostView) -> None:
        self._reached = True
        self._post(Event(view=view))

    def _on_fault(self, fault: Exception) -> None:
        if isinstance(fault, CoordinatorLost):
            self._post(Event(lost=str(fault)))
        elif isinstance(fault, KineticError):
            self._post(Event(lost=f"The leader of the job refused this host: {fault}"))
        else:
            self._post(Event(fault=fault))

    def _post(self, event: Event) -> None:
        self._events.put(event)
        os.write(self._wake, b"!")

    def _run(self) -> None:
        from kinetic._rpc.client import (
            AgentClient,  # Importing it takes longer than a small job, which does not need it.
        )

        identity = self._identity
        try:
            with processes.dying_when_stuck():
                client = AgentClient(
                    identity.endpoint,
                    identity.host,
                    unreachable_after_s=identity.unreachable_after_s,
                    join_timeout_s=identity.join_timeout_s,
                    channel=self._channel,
                )
            with contextlib.closing(client):
                self._serve(client)
        except Exception as error:  # noqa: BLE001 - the agent's loop raises it
            self._on_fault(error)

    def _serve(self, client: AgentClient) -> None:
        due = time.monotonic() + self._identity.heartbeat_s
        while True:
            try:
                order = self._orders.get(timeout=max(due - time.monotonic(), 0.0))
            except queue.Empty:
                if self._joined:
                    client.heartbeat(self._beat())
                elif self._reached:
                    with contextlib.suppress(CoordinatorLost):  # A cluster may replace the leader.
                        client.heartbeat(self._beat())
                due = time.monotonic() + self._identity.heartbeat_s
                continue
            if order is None:
                return
            order(client)
