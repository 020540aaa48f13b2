"""The agents of an elastic job as its leader sees them: what it can do to them, what it hears.

In: seats, which are the hosts' indices among all hosts of the job. Out: deaths. Two kinds: agents
that the leader's process forks (`ForkedHosts`), and agents elsewhere, which join over the network
and are started again by somebody else (`RemoteHosts`).
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from kinetic._host.agents import Agents, code_if_delivered


class Hosts(Protocol):
    """The agents of all hosts.

    Promises:
        1. What is ended here, or dies, is over with all that it has started.
        2. `end` and `restart` return which starts count from now on, by seat, where the leader
           starts hosts; () where hosts announce their starts.
        3. When the job is over, agents end by themselves as soon as they are told.
    """

    announces: bool
    """Whether hosts say by themselves that they were started again."""

    def end(self, seats: Collection[int]) -> Mapping[int, int]:
        """End what is left on the hosts of a lost slice."""
        ...

    def restart(self, seats: Collection[int]) -> Mapping[int, int]:
        """Have the hosts of a lost slice started again.

        Raises:
            OSError: one cannot be started.
        """
        ...

    def dead(self) -> Iterator[tuple[int, str]]:
        """Yield the hosts that have died since the last call, and why, as far as this process
        sees it."""
        ...

    def is_there(self, seat: int) -> bool:
        """Whether its agent may be alive, as far as this process sees it."""
        ...

    def serve_world(self, processes: int) -> str:
        """Serve JAX's coordination for the next attempt; return its address, or "" where the first
        host's worker has to serve it."""
        ...

    def world_fault(self, patience_s: float) -> str:
        """Return what became of the process that serves it, if that has ended or has been stopped
        for longer than this; "" otherwise, and where it is no process of the leader's."""
        ...

    def all_gone(self, told: Collection[int]) -> bool:
        """Whether nobody is left to wait for; these were told that nothing follows, or are dead."""
        ...

    def wake(self) -> None:
        """Continue agents that were stopped (SIGSTOP): they must hear that their gang stops."""
        ...

    def kill(self) -> None:
        """Kill what has not ended by itself."""
        ...


class ForkedHosts:
    """Children of this process."""

    announces = False

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._starts: dict[int, int] = {}

    def end(self, seats: Collection[int]) -> Mapping[int, int]:
        """Kill them, and count their next start."""
        self._agents.end(seats)
        self._starts |= {seat: self._starts.get(seat, 1) + 1 for seat in seats}
        return {seat: self._starts[seat] for seat in seats}

    def restart(self, seats: Collection[int]) -> Mapping[int, int]:
        """Fork all of them anew."""
        starts = self.end(seats)
        for seat, start in starts.items():
            self._agents.fork_again(seat, start=start)
        return starts

    def dead(self) -> Iterator[tuple[int, str]]:
        """From their wait statuses."""
        for seat, status in self._agents.dead():
            ended = code_if_delivered(status) is not None
            cause = self._agents.cause_of_death(seat, status)
            yield seat, "Its agent process ended early." if ended else cause
        self._agents.end_orphans()

    def is_there(self, seat: int) -> bool:
        """Whether it has not been reaped."""
        return seat in self._agents.pids.values()

    def serve_world(self, processes: int) -> str:
        """In a child of this process."""
        return self._agents.serve_world(processes)

    def world_fault(self, patience_s: float) -> str:
        """By its wait status, and its state."""
        return self._agents.world_fault(patience_s)

    def all_gone(self, told: Collection[int]) -> bool:
        """Whether all have been reaped."""
        return not self._agents.pids

    def wake(self) -> None:
        """Send SIGCONT."""
        self._agents.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._agents.signal(signal.SIGKILL)


class RemoteHosts:
    """Programs elsewhere, which a cluster replaces."""

    announces = True

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def end(self, seats: Collection[int]) -> Mapping[int, int]:
        """Their gang tells them to end their workers; the agents stay."""
        return {}

    def restart(self, seats: Collection[int]) -> Mapping[int, int]:
        """The cluster starts those that are dead."""
        return {}

    def dead(self) -> Iterator[tuple[int, str]]:
        """Nobody: the coordinator sees their connections."""
        return iter(())

    def is_there(self, seat: int) -> bool:
        """Nobody here can tell."""
        return True

    def serve_world(self, processes: int) -> str:
        """The head has no JAX: its image may be smaller than that of the hosts."""
        return ""

    def world_fault(self, patience_s: float) -> str:
        """It is in the worker of a host."""
        return ""

    def all_gone(self, told: Collection[int]) -> bool:
        """Whether all have been told."""
        return set(range(self._hosts)).issubset(told)

    def wake(self) -> None:
        """Their own programs end agents that were stopped."""

    def kill(self) -> None:
        """They end when their leader is gone."""
