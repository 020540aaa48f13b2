"""The agents of a job as its leader sees them: who is there, which start of each counts, what can
be done to them.

In: hosts, by index among all hosts of the job; what agents ask and how they end. Out: deaths;
places in the next attempt. Three kinds: agents that the leader's process forks (`ForkedHosts`),
those of programs of which one leads (`JoinedHosts`), and those of programs that somebody else
starts again, one by one (`RemoteHosts`).
"""

from __future__ import annotations

import functools
import signal
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol

from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.outcome import HostReport
from kinetic._host.agents import Agents, read_delivered_code

if TYPE_CHECKING:
    from kinetic._rpc.waiting_room import WaitingRoom  # most hosts that are alone never need it


class NeedsNewPrograms(Exception):
    """Hosts are gone that this leader cannot start again: whoever started them has to start all."""


class HostsListener(Protocol):
    """The leader, as its hosts call it back."""

    def on_death(self, index: int, why: str) -> None:
        """The agent of a host has ended."""
        ...

    def on_report(self, report: HostReport) -> None:
        """A host has ended that does not report itself: the only one of its gang, or one that could
        not begin."""
        ...

    def on_change(self) -> None:
        """A host waits for its place, or knows that nothing follows."""
        ...


class Hosts(ABC):
    """The agents of all hosts.

    Promises:
        1. What is ended here, or dies, is over with all that it has started.
        2. Of each host one start counts: what another one asks is not answered with a place.
        3. When the job is over, agents end by themselves as soon as they are told.

    Attributes:
        announced: whether hosts announce their starts, which somebody else makes.
        alone: whether one host, forked here, has all of the gang, and need not deliver its report.
        stay: whether agents outlive an attempt, and wait for their place in the next one; otherwise
            each attempt has new ones.
        come_later: whether hosts of the first attempt may be started long after the leader.
        sees_deaths: whether all agents are children of this process, whose deaths it sees.
        takes_orders: whether callers have the leader do something on the hosts: kill programs, to
            rehearse a loss, or bring a port to a tunnel.
    """

    announced = takes_orders = sees_deaths = False
    come_later = False

    def __init__(self, *, stay: bool, alone: bool = False) -> None:
        self.stay, self.alone = stay, alone
        self._dead: set[int] = set()
        """Hosts whose agents have ended, and were not started again."""
        self._informed: set[int] = set()
        """Hosts that know that nothing follows."""
        self._joined: set[int] = set()
        """Hosts that have joined the current attempt."""
        self._places: Mapping[int, HostAssignment] = {}
        """In the current attempt, by index."""
        self._listener: HostsListener

    @functools.cached_property
    def waiting_room(self) -> WaitingRoom:
        """The room in which agents wait for their places in the next attempt."""
        from kinetic._rpc.waiting_room import WaitingRoom

        return WaitingRoom(self, announced=self.announced, leave=self.come_later)

    def listen(self, listener: HostsListener) -> None:
        """Call this listener back from now on."""
        self._listener = listener

    # -- who is there ------------------------------------------------------------------------------

    @property
    def dead(self) -> frozenset[int]:
        """Hosts whose agents have ended, and were not started again."""
        return frozenset(self._dead)

    def are_ready(self, indices: Collection[int]) -> bool:
        """Whether all of these can take part in the next attempt."""
        return not self.stay or (
            self.waiting_room.is_complete(indices) and self._dead.isdisjoint(indices)
        )

    def may_write(self, index: int) -> bool:
        """Whether this host's agent may still write to the log of the last attempt."""
        return self.stay and index not in self._dead and not self.waiting_room.waits(index)

    @abstractmethod
    def all_gone(self) -> bool:
        """Whether nobody is left to wait for at the end of the job."""

    # -- attempts ----------------------------------------------------------------------------------

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """An attempt begins, in which these hosts take part."""
        self._places, self._joined = places, set()
        self.waiting_room.give(places)

    def end_attempt(self) -> None:
        """The attempt has ended: nobody takes part in it any more."""
        self._places = {}
        if self.stay:
            self.waiting_room.give({})

    @abstractmethod
    def end(self, indices: Collection[int]) -> None:
        """End what is left on the hosts of a lost slice; what their agents have asked for counts no
        more."""

    @abstractmethod
    def restart(self, indices: Collection[int]) -> None:
        """Have the hosts of a lost slice started again.

        Raises:
            OSError: one cannot be started.
            NeedsNewPrograms: as said there.
        """

    def close(self, informed: Collection[int]) -> None:
        """Tell agents that the job is over; `informed` are hosts that know it already."""
        self._informed.update(informed)
        self.waiting_room.close()

    # -- processes ---------------------------------------------------------------------------------

    def await_death(self, limit_s: float) -> bool:
        """Wait for an agent of this process to end; return whether one has in time, and before
        SIGTERM, which stays pending. Only where nothing else waits."""
        return False

    @abstractmethod
    def reap(self) -> None:
        """Tell the listener of agents that have died, as far as this process sees it."""

    @abstractmethod
    def take_away(self) -> None:
        """Tell the agents of this machine that it is taken away."""

    def connect(self) -> None:  # noqa: B027 - only forked hosts are alone
        """Have a host that is alone connect now, if it has not yet: the leader listens."""

    @abstractmethod
    def kill(self, indices: Collection[int] | None = None) -> None:
        """Kill what does not end by itself; by default on all hosts."""

    def kill_programs(self, indices: Collection[int]) -> Collection[int]:
        """Kill the programs of these hosts as the loss of a machine would; return those that ran.
        Only where this `takes_orders`."""
        return ()

    # -- what is known from the gang ---------------------------------------------------------------

    def note_event(self, event: GangEvent, index: int) -> None:
        """Something has happened to a host."""
        if event.kind is EventKind.JOINED:
            self._joined.add(index)
        is_end = event.kind is EventKind.REPORT and event.exit in (Exit.AGENT_LOST, Exit.EVICTED)
        if self.announced and (is_end or event.kind is EventKind.LOST):
            self.note_gone(index, is_taken_away=event.exit is Exit.EVICTED)

    @abstractmethod
    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Note that the gang says that the agent of a host has ended, or is about to."""

    def note_late(self, indices: Collection[int]) -> None:
        """Take those of these hosts for gone that do not wait for their places yet."""
        for index in indices:
            if not self.are_ready([index]):
                self.note_gone(index, is_taken_away=False)

    # -- from the waiting room ---------------------------------------------------------------------

    def on_enter(self, index: int) -> None:
        """A host waits for its place."""
        self._listener.on_change()

    def on_start(self, index: int) -> None:
        """A host was started again: what was there before is dead, if nobody knew it yet."""
        if index in self._dead:
            return
        place = self._places.get(index)
        if place is not None and index not in self._joined:
            self.waiting_room.give_again(index, place)
        else:
            self._die(index, "its agent ended, and was started again.")

    def on_leave(self, index: int) -> None:
        """A host that waited is gone."""
        if index not in self._dead:
            self._die(index, "its connection broke while it waited for its place.")

    def on_told(self, index: int) -> None:
        """A host knows that nothing follows."""
        self._informed.add(index)
        self._listener.on_change()

    def _die(self, index: int, why: str) -> None:
        self._dead.add(index)
        self._listener.on_death(index, why)


class ForkedHosts(Hosts):
    """Children of this process."""

    sees_deaths = True

    def __init__(
        self, agents: Agents, *, stay: bool, alone: bool = False, attempt: int = 1
    ) -> None:
        super().__init__(stay=stay, alone=alone)
        self._agents = agents
        self._attempt = attempt

    def are_ready(self, indices: Collection[int]) -> bool:
        """Whether all of these can take part in the next attempt. Agents that do not stay are
        forked anew, once the last ones were reaped: their ends are not those of the next."""
        return super().are_ready(indices) if self.stay else not self._agents.pids

    def may_write(self, index: int) -> bool:
        """Whether this host's agent may still write to the log; not once it was reaped."""
        return index in self._agents.pids.values() and super().may_write(index)

    def all_gone(self) -> bool:
        """Whether all agents have been reaped."""
        return not self._agents.pids

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """Give places to agents that stay; fork those that do not, with their places."""
        if self.stay:
            super().give(places)
            return
        for index, place in places.items():
            self._attempt = place.attempt
            try:
                self._agents.fork_again(index, place)
            except OSError as error:
                self._die(index, f"its agent could not be started: {error}.")

    def end(self, indices: Collection[int]) -> None:
        """Kill these agents with all that is below them; their next start counts."""
        self._agents.end(indices)
        for index in indices if self.stay else ():
            self.waiting_room.expect_next(index)

    def restart(self, indices: Collection[int]) -> None:
        """Fork agents that stay anew; others are forked when they have their places."""
        self.end(indices)
        for index in indices:
            if self.stay:
                self._agents.fork_again(index, start=self.waiting_room.start_of(index))
            self._dead.discard(index)

    def await_death(self, limit_s: float) -> bool:
        """Wait for SIGCHLD or SIGTERM; return whether SIGCHLD came in time."""
        came = self._agents.await_signal(limit_s) if self.alone else None
        if came == signal.SIGTERM:
            signal.raise_signal(came)
        return came == signal.SIGCHLD

    def reap(self) -> None:
        """Tell the listener how agents have ended, by their wait statuses."""
        for index, status in self._agents.dead():
            delivered = read_delivered_code(status) is not None
            report = None
            if self.alone and delivered:
                report = self._agents.report_left_by(index, self._attempt)
            if report is not None:
                self._listener.on_report(report)
            elif self.stay or self.alone or not delivered:
                is_early = delivered and not self.alone
                why = "Its agent process ended early."
                self._die(index, why if is_early else self._agents.cause_of_death(index, status))
        if self.stay or self.alone:  # Others end with their gang.
            self._agents.end_orphans()
        self._listener.on_change()

    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Do nothing: the wait status of the agent will say so."""

    def take_away(self) -> None:
        """Send SIGTERM to the agents."""
        self._agents.signal(signal.SIGTERM)

    def connect(self) -> None:
        """Send SIGCONT to an agent that is alone: it connects now."""
        if self.alone:
            self._agents.signal(signal.SIGCONT)

    def kill(self, indices: Collection[int] | None = None) -> None:
        """Send SIGKILL to the agents of these hosts."""
        self._agents.signal(signal.SIGKILL, indices)


class JoinedHosts(ForkedHosts):
    """Programs, of which the leader's has forked the agent of its own host; whoever started them
    starts all of them again, or none."""

    come_later = True

    def __init__(
        self, agents: Agents, hosts: int, *, stay: bool, alone: bool = False, attempt: int = 1
    ) -> None:
        super().__init__(agents, stay=stay, alone=alone, attempt=attempt)
        self._others = frozenset(range(hosts)) - set(agents.pids.values())
        self.sees_deaths = not self._others
        self._is_incomplete = False

    def all_gone(self) -> bool:
        """Whether the own agent has been reaped, and others that wait have been told."""
        waiting = self._others - self._informed - self._dead if self.stay else ()
        return super().all_gone() and not waiting

    def end(self, indices: Collection[int]) -> None:
        """Kill the own agent if it is one of these; the others end with their gang."""
        super().end([index for index in indices if index not in self._others])

    def restart(self, indices: Collection[int]) -> None:
        """Fork the own agent anew; whoever started the other programs must start them again."""
        if self._is_incomplete or not self._others.isdisjoint(self._dead):
            raise NeedsNewPrograms
        super().restart([index for index in indices if index not in self._others])

    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Note that the hosts are incomplete: nobody starts one of them again alone."""
        self._is_incomplete |= is_taken_away or index in self._others


class RemoteHosts(Hosts):
    """Programs elsewhere, which a cluster replaces one by one."""

    announced = True
    come_later = True

    def __init__(self, hosts: int) -> None:
        super().__init__(stay=True)
        self._hosts = hosts

    def all_gone(self) -> bool:
        """Whether all hosts know that nothing follows, or are dead."""
        return (self._informed | self._dead).issuperset(range(self._hosts))

    def end(self, indices: Collection[int]) -> None:
        """Do nothing: the gang tells the agents to end their workers, and they stay."""

    def restart(self, indices: Collection[int]) -> None:
        """Do nothing: the cluster starts dead hosts again."""

    def reap(self) -> None:
        """Do nothing: the coordinator sees the connections of the hosts."""

    def take_away(self) -> None:
        """Do nothing: the head's machine is taken away, not those of the hosts."""

    def kill(self, indices: Collection[int] | None = None) -> None:
        """Do nothing: the hosts end when their leader is gone."""

    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Count the host as dead until it comes back as another start."""
        self._dead.add(index)

    def on_enter(self, index: int) -> None:
        """Count a host that waits for its place as alive."""
        self._dead.discard(index)
        super().on_enter(index)
