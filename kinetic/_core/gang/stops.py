"""Decisions to stop a gang: the hosts to blame, and the reason in one sentence. Pure.

In: facts about the gang's hosts, their stacks. Out: a `Stop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from kinetic._core.exits import CONSEQUENCE_RANK, Exit
from kinetic._core.gang import blame
from kinetic._core.gang.members import Roster
from kinetic._core.gang.messages import GangSpec
from kinetic._core.gang.programs import Difference
from kinetic._core.gang.rendezvous import Delay
from kinetic._core.outcome import HostReport, blame_rank, name_hosts, name_of
from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Stop:
    """A decision to stop the gang.

    Attributes:
        exit: exit of hosts that are not in `exits`.
        reason: one line for users.
        blamed: the hosts to blame, most to blame first.
        exits: exits of single hosts.
    """

    exit: Exit
    reason: str
    blamed: tuple[int, ...] = ()
    exits: Mapping[int, Exit] = field(default_factory=dict)


def describe_standstill(hosts: Roster, stalled: tuple[int, ...], spec: GangSpec) -> str:
    """Return text that says which hosts are stalled, and for how long."""
    longest = max(m.beat.stalled_s for i in stalled if (m := hosts[i]).beat is not None)
    return (
        f"{name_by_slice(stalled, spec)} stood still for {longest:.0f} s (hang_timeout is "
        f"{spec.hang_timeout_s:g} s)"
    )


def notice_of_still(
    held_up: tuple[int, ...], stacks: Mapping[int, str], spec: GangSpec, cause: str = ""
) -> str:
    """Return a notice that these hosts stand still. It names the `cause`; without one, it names the
    position of the first host, and says that all others wait for these hosts."""
    if cause:
        still = f"{name_by_slice(held_up, spec)} have stood still for {spec.still_notice_s:g} s"
        return f"{still}: {cause}"
    have = "has" if len(held_up) == 1 else "have"
    others = len(held_up) < spec.hosts
    waited_for = f"; all others wait for {'it' if len(held_up) == 1 else 'them'}" if others else ""
    return (
        f"{name_by_slice(held_up, spec)} {have} stood still for {spec.still_notice_s:g} s"
        f"{blame.describe_position(stacks[held_up[0]])}{waited_for}."
    )


def name_by_slice(which: tuple[int, ...], spec: GangSpec) -> str:
    """Return "host 2 of 4"; in an elastic job, whose indices differ between attempts, "host 0 of
    slice 1"."""
    per_slice = spec.hosts // len(spec.slices) if spec.slices else 0
    if not per_slice or len(which) == spec.hosts > 1:
        return name_of(which, spec.hosts)
    by_slice: dict[int, list[int]] = {}
    for host in which:
        by_slice.setdefault(spec.slices[host // per_slice], []).append(host % per_slice)
    return ", ".join(f"{name_hosts(by_slice[s])} of slice {s}" for s in sorted(by_slice))


def first_failure(hosts: Roster, blamed: tuple[int, ...], spec: GangSpec) -> str:
    """Return the reason for which the first of these hosts failed, with the names of the hosts that
    failed in the same way."""
    report = hosts[blamed[0]].report or hosts[blamed[0]].announced
    if report is None:
        return name_by_slice(blamed, spec)
    alike = sorted(
        host
        for host in blamed
        if (other := hosts[host].report or hosts[host].announced) is not None
        and other.is_like(report)
    )
    return f"{name_by_slice(tuple(alike), spec)}: {blame.why(report)}"


def of_hang(
    running: dict[int, str],
    returned: tuple[int, ...],
    stalled: tuple[int, ...],
    still: str,
    difference: Difference | None = None,
) -> tuple[Stop, str]:
    """Decide which hosts hold a hung gang up, and return the stop and the grouped stacks as text.

    Args:
        running: stacks of hosts whose function runs; "" for hosts that have not answered.
        returned: hosts whose function has returned.
        stalled: hosts that are stalled.
        still: the result of `describe_standstill` for the stalled hosts.
        difference: the difference between the programs of the hosts, if any: then it is the cause.
    """
    odd = blame.odd_hosts(running, ())
    stacks = running | dict.fromkeys(returned, blame.RETURNED)
    reason = blame.explain_hang(stacks, stalled, odd, still)
    if difference is not None:
        odd = tuple(host for host in difference.hosts if host in running) or odd
        reason = f"{difference.sentence} {still[:1].upper()}{still[1:]}"
    stop = Stop(Exit.STOPPED, reason, odd, dict.fromkeys(odd, Exit.HANG))
    return stop, blame.format_groups(stacks)


def blame_difference(report: HostReport, sentence: str) -> HostReport:
    """Return the report of a host that differed: unchanged if the host failed for a cause of its
    own, else with the exit DIFFERED."""
    is_own = blame_rank(report) < CONSEQUENCE_RANK
    return report if is_own else replace(report, exit=Exit.DIFFERED, detail=sentence, error=None)


def explain(stop: Stop, cause: str) -> Stop:
    """Return a stop whose reason also names this cause."""
    is_said = cause in stop.reason
    reason = stop.reason if stop.reason.endswith((".", "?")) else f"{stop.reason}."
    reason = f"{reason} {cause[:1].upper()}{cause[1:]}"
    return stop if is_said else replace(stop, reason=reason)


def of_delay(delay: Delay, running: dict[int, str], spec: GangSpec) -> Stop:
    """Return the Stop that ends an attempt because hosts started late, or keep the others waiting
    in JAX.

    Args:
        delay: the hosts that are late, and those that wait for them.
        running: stacks of each host, by host; "" for hosts that have not answered.
        spec: specification of the gang.
    """
    if delay.waiting:
        guilty = delay.waiting if delay.final or not delay.missing else delay.missing
        exits = dict.fromkeys(guilty, Exit.HANG)
        return Stop(Exit.STOPPED, delay.reason, guilty[:1], exits)
    odd = blame.odd_hosts({i: running[i] for i in delay.missing}, ())
    reason = f"{name_by_slice(odd, spec)} {delay.reason}"
    text = "" if (stack := blame.parse(running[odd[0]])).frames else stack.text
    reason += f": {text.splitlines()[0]}" if text else ""
    return Stop(Exit.STOPPED, reason, odd, dict.fromkeys(odd, Exit.NEVER_JOINED))
