"""The hosts of a job, as its leader uses them: which are ready or dead, how to end or restart them.

Hosts are named by their index among all hosts of the job. There are three kinds: agents that the
leader's process forks (`ForkedHosts`), hosts whose programs start and end together, one of which
leads (`JoinedHosts`), and hosts that a cluster replaces one by one (`RemoteHosts`).
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
    """Dead hosts that this leader cannot restart: the backend has to start all programs again."""


class HostsListener(Protocol):
    """The callbacks of a leader for events on its hosts."""

    def on_death(self, index: int, why: str) -> None:
        """Handle the death of a host's agent; `why` is a sentence."""
        ...

    def on_report(self, report: HostReport) -> None:
        """Handle a report that did not arrive over the network: from the only host of a gang, or
        for a host that could not begin."""
        ...

    def on_change(self) -> None:
        """Handle a change: a host waits for the next attempt now, or was dismissed."""
        ...


class Hosts(ABC):
    """The agents of all hosts.

    Promises:
        1. When an agent is ended or dies, everything that it started ends too.
        2. Only the current start of each host counts: requests from earlier starts get no
           assignment.
        3. When the job is over, agents end by themselves once they are dismissed.

    Attributes:
        announced: hosts are started by a cluster, and announce each start.
        alone: the gang is one host that this process forks; its report need not be delivered.
        stay: agents outlive an attempt and wait for the next one; otherwise each attempt has new
            agents.
        come_later: hosts of the first attempt may be started long after the leader.
        sees_deaths: all agents are children of this process, which sees their deaths.
        takes_orders: callers may have the leader act on the hosts: kill programs, to rehearse a
            loss, or connect a port to a tunnel.
    """

    announced = takes_orders = sees_deaths = False
    come_later = False

    def __init__(self, *, stay: bool, alone: bool = False) -> None:
        self.stay, self.alone = stay, alone
        self._dead: set[int] = set()
        """Hosts whose agents have ended and were not restarted."""
        self._informed: set[int] = set()
        """Hosts that know that no attempt follows."""
        self._joined: set[int] = set()
        """Hosts that have joined the current attempt."""
        self._places: Mapping[int, HostAssignment] = {}
        """Assignments of the current attempt, by index."""
        self._listener: HostsListener

    @functools.cached_property
    def waiting_room(self) -> WaitingRoom:
        """The room in which agents wait for their assignments to the next attempt."""
        from kinetic._rpc.waiting_room import WaitingRoom

        return WaitingRoom(self, announced=self.announced, leave=self.come_later)

    def listen(self, listener: HostsListener) -> None:
        """Call this listener from now on."""
        self._listener = listener

    # -- readiness ---------------------------------------------------------------------------------

    @property
    def dead(self) -> frozenset[int]:
        """Hosts whose agents have ended and were not restarted."""
        return frozenset(self._dead)

    def are_ready(self, indices: Collection[int]) -> bool:
        """True if all of these hosts can take part in the next attempt."""
        return not self.stay or (
            self.waiting_room.is_complete(indices) and self._dead.isdisjoint(indices)
        )

    def may_write(self, index: int) -> bool:
        """True if this host's agent may still write to the log of the last attempt."""
        return self.stay and index not in self._dead and not self.waiting_room.waits(index)

    @abstractmethod
    def all_gone(self) -> bool:
        """True if every host has ended or knows that the job is over, so that the leader may go."""

    # -- attempts ----------------------------------------------------------------------------------

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """Begin an attempt: hand each host its assignment."""
        self._places, self._joined = places, set()
        self.waiting_room.assign(places)

    def end_attempt(self) -> None:
        """End the attempt: withdraw the assignments."""
        self._places = {}
        if self.stay:
            self.waiting_room.assign({})

    @abstractmethod
    def end(self, indices: Collection[int]) -> None:
        """End the agents on the hosts of a lost slice, and ignore their open requests."""

    @abstractmethod
    def restart(self, indices: Collection[int]) -> None:
        """Restart the hosts of a lost slice.

        Raises:
            OSError: a host cannot be started.
            NeedsNewPrograms: a dead host's program has to be started by the backend.
        """

    def close(self, informed: Collection[int]) -> None:
        """Dismiss the agents: the job is over. The hosts in `informed` know that already."""
        self._informed.update(informed)
        self.waiting_room.close()

    # -- processes ---------------------------------------------------------------------------------

    def await_death(self, limit_s: float) -> bool:
        """Block until a forked agent ends; return False after `limit_s` seconds or on SIGTERM,
        which stays pending. For a process that serves nothing else."""
        return False

    @abstractmethod
    def reap(self) -> None:
        """Report dead agents to the listener, as far as this process sees their deaths."""

    @abstractmethod
    def take_away(self) -> None:
        """Tell the agents on this machine that the cluster takes it away."""

    def connect(self) -> None:  # noqa: B027 - only forked hosts are alone
        """Have the only host of a gang connect now: the leader listens."""

    @abstractmethod
    def kill(self, indices: Collection[int] | None = None) -> None:
        """Kill the agents of these hosts, by default of all hosts."""

    def kill_programs(self, indices: Collection[int]) -> Collection[int]:
        """Kill the programs of these hosts as the loss of a machine would; return the hosts whose
        programs ran. Only for hosts with `takes_orders`."""
        return ()

    # -- events of the gang ------------------------------------------------------------------------

    def note_event(self, event: GangEvent, index: int) -> None:
        """Note an event of the gang about this host."""
        if event.kind is EventKind.JOINED:
            self._joined.add(index)
        is_end = event.kind is EventKind.REPORT and event.exit in (Exit.AGENT_LOST, Exit.EVICTED)
        if self.announced and (is_end or event.kind is EventKind.LOST):
            self.note_gone(index, is_taken_away=event.exit is Exit.EVICTED)

    @abstractmethod
    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Note that a host's agent has ended or is about to, according to the gang; `is_taken_away`
        is True if the cluster takes the host's machine away."""

    def note_late(self, indices: Collection[int]) -> None:
        """Count these hosts as dead, unless they already wait for the next attempt."""
        for index in indices:
            if not self.are_ready([index]):
                self.note_gone(index, is_taken_away=False)

    # -- callbacks of the waiting room -------------------------------------------------------------

    def on_enter(self, index: int) -> None:
        """Handle a host that waits for its assignment."""
        self._listener.on_change()

    def on_start(self, index: int) -> None:
        """Handle a new start of a host: its previous agent is dead, even if no one noticed."""
        if index in self._dead:
            return
        place = self._places.get(index)
        if place is not None and index not in self._joined:
            self.waiting_room.reassign(index, place)
        else:
            self._die(index, "its agent ended and was restarted.")

    def on_leave(self, index: int) -> None:
        """Handle a broken connection of a host that waited for its assignment."""
        if index not in self._dead:
            self._die(index, "its connection broke while it waited for the next attempt.")

    def on_dismissed(self, index: int) -> None:
        """Handle a host's receipt of its dismissal."""
        self._informed.add(index)
        self._listener.on_change()

    def _die(self, index: int, why: str) -> None:
        self._dead.add(index)
        self._listener.on_death(index, why)


class ForkedHosts(Hosts):
    """Hosts whose agents are children of this process."""

    sees_deaths = True

    def __init__(
        self, agents: Agents, *, stay: bool, alone: bool = False, attempt: int = 1
    ) -> None:
        super().__init__(stay=stay, alone=alone)
        self._agents = agents
        self._attempt = attempt

    def are_ready(self, indices: Collection[int]) -> bool:
        """True if all of these hosts can take part in the next attempt. Agents that do not stay
        must all be reaped first, so that their ends are not taken for ends of the next agents."""
        return super().are_ready(indices) if self.stay else not self._agents.pids

    def may_write(self, index: int) -> bool:
        """True if this host's agent may still write to the log: until it is reaped."""
        return index in self._agents.pids.values() and super().may_write(index)

    def all_gone(self) -> bool:
        """True if all agents have been reaped."""
        return not self._agents.pids

    def give(self, places: Mapping[int, HostAssignment]) -> None:
        """Hand assignments to agents that stay; otherwise fork an agent for each assignment."""
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
        """Kill these agents and all their descendants; from now on the next start counts."""
        self._agents.end(indices)
        for index in indices if self.stay else ():
            self.waiting_room.expect_next(index)

    def restart(self, indices: Collection[int]) -> None:
        """Fork new agents if agents stay; otherwise `give` forks them."""
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
        """Report the ends of agents to the listener, by their wait statuses."""
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
        if self.stay or self.alone:  # Other agents end with their gang.
            self._agents.end_orphans()
        self._listener.on_change()

    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Do nothing: `reap` will see the agent's wait status."""

    def take_away(self) -> None:
        """Send SIGTERM to the agents."""
        self._agents.signal(signal.SIGTERM)

    def connect(self) -> None:
        """Send SIGCONT to the only agent: it connects now."""
        if self.alone:
            self._agents.signal(signal.SIGCONT)

    def kill(self, indices: Collection[int] | None = None) -> None:
        """Send SIGKILL to the agents of these hosts."""
        self._agents.signal(signal.SIGKILL, indices)


class JoinedHosts(ForkedHosts):
    """Hosts with a program each; the leader's program has forked the agent of its own host. The
    backend restarts either all programs or none."""

    come_later = True

    def __init__(
        self, agents: Agents, hosts: int, *, stay: bool, alone: bool = False, attempt: int = 1
    ) -> None:
        super().__init__(agents, stay=stay, alone=alone, attempt=attempt)
        self._others = frozenset(range(hosts)) - set(agents.pids.values())
        self.sees_deaths = not self._others
        self._is_incomplete = False

    def all_gone(self) -> bool:
        """True if this program's agent was reaped and all waiting agents know that they may go."""
        waiting = self._others - self._informed - self._dead if self.stay else ()
        return super().all_gone() and not waiting

    def end(self, indices: Collection[int]) -> None:
        """Kill this program's agent if its host is among them; other agents end with their gang."""
        super().end([index for index in indices if index not in self._others])

    def restart(self, indices: Collection[int]) -> None:
        """Fork a new agent for this program's host; only the backend can restart other programs."""
        if self._is_incomplete or not self._others.isdisjoint(self._dead):
            raise NeedsNewPrograms
        super().restart([index for index in indices if index not in self._others])

    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Note that the hosts are incomplete: the backend never restarts a single host."""
        self._is_incomplete |= is_taken_away or index in self._others


class RemoteHosts(Hosts):
    """Hosts on other machines, which a cluster replaces one by one."""

    announced = True
    come_later = True

    def __init__(self, hosts: int) -> None:
        super().__init__(stay=True)
        self._hosts = hosts

    def all_gone(self) -> bool:
        """True if every host is dead or knows that no attempt follows."""
        return (self._informed | self._dead).issuperset(range(self._hosts))

    def end(self, indices: Collection[int]) -> None:
        """Do nothing: the gang has the agents end their workers, and the agents stay."""

    def restart(self, indices: Collection[int]) -> None:
        """Do nothing: the cluster restarts dead hosts."""

    def reap(self) -> None:
        """Do nothing: the coordinator sees the connections of the hosts."""

    def take_away(self) -> None:
        """Do nothing: the head's machine is taken away, not those of the hosts."""

    def kill(self, indices: Collection[int] | None = None) -> None:
        """Do nothing: the hosts end when their leader has ended."""

    def note_gone(self, index: int, *, is_taken_away: bool) -> None:
        """Count the host as dead until a new start of it waits for an assignment."""
        self._dead.add(index)

    def on_enter(self, index: int) -> None:
        """Count a host that waits for its assignment as alive."""
        self._dead.discard(index)
        super().on_enter(index)
