"""Why a gang is stopped: which hosts are to blame, and the reason in one sentence.

In: facts about its hosts, their stacks. Out: a `Stop`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from kinetic._core.exits import Exit
from kinetic._core.gang import blame
from kinetic._core.gang.members import Roster
from kinetic._core.gang.messages import GangSpec
from kinetic._core.gang.rendezvous import Delay
from kinetic._core.outcome import name_hosts, name_of
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Stop:
    """A decision to stop the gang.

    Attributes:
        exit: how hosts end that are not in `exits`.
        reason: one line for users.
        blamed: the hosts to blame, most to blame first.
        exits: how single hosts end.
    """

    exit: Exit
    reason: str
    blamed: tuple[int, ...] = ()
    exits: Mapping[int, Exit] = field(default_factory=dict)


def describe_standstill(hosts: Roster, stalled: tuple[int, ...], spec: GangSpec) -> str:
    """Say which hosts are stalled, and for how long."""
    longest = max(m.beat.stalled_s for i in stalled if (m := hosts[i]).beat is not None)
    return (
        f"{name_places(stalled, spec)} stood still for {longest:.0f} s (hang_timeout is "
        f"{spec.hang_timeout_s:g} s)"
    )


def notice_of_still(held_up: tuple[int, ...], stacks: Mapping[int, str], spec: GangSpec) -> str:
    """Say which hosts stand still, where the first of them does, and that others wait."""
    have = "has" if len(held_up) == 1 else "have"
    others = len(held_up) < spec.hosts
    waited_for = f"; all others wait for {'it' if len(held_up) == 1 else 'them'}" if others else ""
    return (
        f"{name_places(held_up, spec)} {have} stood still for {spec.still_notice_s:g} s"
        f"{blame.place_of(stacks[held_up[0]])}{waited_for}."
    )


def name_places(which: tuple[int, ...], spec: GangSpec) -> str:
    """Return "host 2 of 4"; in an elastic job, where indices are others in each attempt, "host 0 of
    slice 1"."""
    per_slice = spec.hosts // len(spec.slices) if spec.slices else 0
    if not per_slice or len(which) == spec.hosts > 1:
        return name_of(which, spec.hosts)
    places: dict[int, list[int]] = {}
    for host in which:
        places.setdefault(spec.slices[host // per_slice], []).append(host % per_slice)
    named = [f"{name_hosts(places[s])} of slice {s}" for s in sorted(places)]
    return ", ".join(named)


def first_failure(hosts: Roster, blamed: tuple[int, ...], spec: GangSpec) -> str:
    """Say why the first of these hosts failed, and which of the others failed in the same way."""
    report = hosts[blamed[0]].report or hosts[blamed[0]].announced
    if report is None:
        return name_places(blamed, spec)
    alike = sorted(
        host
        for host in blamed
        if (other := hosts[host].report or hosts[host].announced) is not None
        and other.is_like(report)
    )
    return f"{name_places(tuple(alike), spec)}: {blame.why(report)}"


def of_hang(
    running: dict[int, str], returned: tuple[int, ...], stalled: tuple[int, ...], still: str
) -> tuple[Stop, str]:
    """Decide who holds a hung gang up; also return the stacks, grouped, as text.

    Args:
        running: the stacks of hosts whose function runs; "" of those that have not answered.
        returned: hosts whose function has returned.
        stalled: the hosts that are stalled.
        still: what `stood_still` says of them.
    """
    odd = blame.odd_hosts(running, ())
    stacks = running | dict.fromkeys(returned, blame.RETURNED)
    reason = blame.explain_hang(stacks, stalled, odd, still)
    stop = Stop(Exit.STOPPED, reason, odd, dict.fromkeys(odd, Exit.HANG))
    return stop, blame.format_groups(stacks)


def of_delay(delay: Delay, running: dict[int, str], spec: GangSpec) -> Stop:
    """Decide who keeps the others waiting in JAX, or is late with its start."""
    if delay.waiting:
        guilty = delay.waiting if delay.final or not delay.missing else delay.missing
        exits = dict.fromkeys(guilty, Exit.HANG)
        return Stop(Exit.STOPPED, delay.reason, guilty[:1], exits)
    odd = blame.odd_hosts({i: running[i] for i in delay.missing}, ())
    reason = f"{name_places(odd, spec)} {delay.reason}"
    text = "" if (stack := blame.parse(running[odd[0]])).frames else stack.text
    reason += f": {text.splitlines()[0]}" if text else ""
    return Stop(Exit.STOPPED, reason, odd, dict.fromkeys(odd, Exit.NEVER_JOINED))
