"""Gangs of joined hosts, reports of hosts, and random events for tests of the gang's states."""

from __future__ import annotations

from hypothesis import strategies as st

from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Activity, Gang, GangSpec, Heartbeat
from kinetic._core.outcome import HostReport, RemoteError


def gang_of(hosts: int, *, joined: bool = True, **limits) -> Gang:
    gang = Gang(GangSpec(hosts=hosts, **limits), 0.0)
    for host in range(hosts if joined else 0):
        gang.join(host, f"agent-{host}", f"address-{host}", 0.0)
    return gang


def ended(host: int, how: Exit = Exit.RETURNED, **facts) -> HostReport:
    return HostReport(host, how, **facts)


def raised(host: int, *, consequence: bool = False) -> HostReport:
    kind = "XlaRuntimeError" if consequence else "ValueError"
    return ended(
        host, Exit.RAISED, error=RemoteError(kind, f"on {host}", "", consequence=consequence)
    )


def let_pass(
    gang: Gang,
    start: float,
    seconds: float,
    beating=(),
    state: str = "running",
    stalled_s: float = 0.0,
) -> float:
    """Sweep ten times a second, with heartbeats of `beating` each second; return the end time."""
    for step in range(1, round(seconds * 10) + 1):
        now = start + step / 10
        if step % 10 == 0:
            for host in beating:
                gang.heartbeat(Heartbeat(host, Activity(state), stalled_s=stalled_s), now)
        gang.sweep(now)
    return start + seconds


def exits(gang: Gang) -> list[Exit]:
    return [r.exit for r in gang.reports]


# --- random events


HOSTS = 3


hosts = st.integers(0, HOSTS - 1)
