"""The agent's connection to the coordinator, in a thread of its own, so that a slow or dead
coordinator never holds up the worker's output.

In: beats, reports and stacks from the agent. Out: events for the agent's loop, with a byte on a
pipe to wake it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kinetic._core.gang.messages import Heartbeat, HostView
from kinetic._core.outcome import HostReport
from kinetic._core.values import dataclass
from kinetic._host.identity import Identity
from kinetic._system import processes
from kinetic.errors import CoordinatorLost, KineticError

if TYPE_CHECKING:
    from kinetic._rpc.client import AgentClient


@dataclass(frozen=True)
class Event:
    """Something the agent's loop must know: a new view, a delivered report, that the coordinator is
    lost, or what else has ended the link."""

    view: HostView | None = None
    reported: bool = False
    lost: str = ""
    fault: Exception | None = None


HANG_UP_S = 2.0


class _HungUpError(Exception):
    """The agent needs the link no more."""


def _hang_up(_: AgentClient) -> None:
    raise _HungUpError


class Link:
    """Joins, sends heartbeats, and delivers; results come back as `Event`s."""

    def __init__(self, identity: Identity, beat: Callable[[], Heartbeat]) -> None:
        self._identity = identity
        self._beat = beat
        self._orders: queue.SimpleQueue[Callable[[AgentClient], object]] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.wake_fd, self._wake = os.pipe()
        self._joined = self._reached = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect and watch, without joining the gang yet. Idempotent."""
        if self._thread is None:
            processes.check_threads()
            self._thread = threading.Thread(target=self._run, name="kinetic-link", daemon=True)
            self._orders.put(lambda client: client.watch(self._on_view, self._on_fault))
            self._thread.start()

    def join(self, address: str, ran_s: Callable[[], float]) -> None:
        """Join as a host that its peers reach at `address`, and whose function has run for `ran_s`,
        0.0 if it has not begun. Heartbeats are sent since the coordinator was reached first; from
        now on they must arrive."""
        incarnation = os.urandom(8).hex()

        def join(client: AgentClient) -> None:
            client.join(incarnation, address, ran_s())
            self._joined = True

        self._orders.put(join)

    def report(self, report: HostReport) -> None:
        """Deliver the report of the host's end."""

        def deliver(client: AgentClient) -> None:
            client.report(report)
            self._post(Event(reported=True))

        self._orders.put(deliver)

    def announce(self, report: HostReport) -> None:
        """Tell how the host is about to end; its report follows."""
        report = replace(report, announced=True)
        self._orders.put(lambda client: client.report(report))

    def stacks(self, request: int, text: str) -> None:
        """Deliver the worker's stacks."""
        self._orders.put(lambda client: client.stacks(request, text))

    def beat_now(self) -> None:
        """Send a heartbeat now: the activity that users see has changed."""
        self._orders.put(lambda client: client.heartbeat(self._beat()))

    def stop(self) -> None:
        """Hang up, and free the pipe. Nothing happens any more."""
        if self._thread is not None:
            self._orders.put(_hang_up)
            self._thread.join(HANG_UP_S)
        if self._thread is None or not self._thread.is_alive():
            for fd in (self.wake_fd, self._wake):
                os.close(fd)

    def events(self) -> list[Event]:
        """Events since the last call; empties the wake pipe.

        Raises:
            Exception: what has ended the link, unless the coordinator is lost.
        """
        os.read(self.wake_fd, 4096)
        events = []
        while not self._events.empty():
            events.append(event := self._events.get())
            if event.fault is not None:  # An agent that hears nothing must not live on.
                raise event.fault
        return events

    def _on_view(self, view: HostView) -> None:
        self._reached = True
        self._post(Event(view=view))

    def _on_fault(self, fault: Exception) -> None:
        if isinstance(fault, CoordinatorLost):
            self._post(Event(lost=str(fault)))
        elif isinstance(fault, KineticError):
            self._post(Event(lost=f"The coordinator refused this host: {fault}"))
        else:
            self._post(Event(fault=fault))

    def _post(self, event: Event) -> None:
        self._events.put(event)
        os.write(self._wake, b"!")

    def _run(self) -> None:
        from kinetic._rpc.client import (
            AgentClient,  # Importing takes longer than a small job, which does not need it.
        )

        who = self._identity
        try:
            with processes.dying_when_stuck():
                client = AgentClient(
                    who.endpoint,
                    who.host,
                    unreachable_after_s=who.unreachable_after_s,
                    join_timeout_s=who.join_timeout_s,
                )
            with contextlib.closing(client):
                self._serve(client)
        except _HungUpError:
            return
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
                    with contextlib.suppress(CoordinatorLost):  # Another one may take its place.
                        client.heartbeat(self._beat())
                due = time.monotonic() + self._identity.heartbeat_s
                continue
            order(client)
