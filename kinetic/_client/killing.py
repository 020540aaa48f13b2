"""Which hosts of a job `kill_hosts` and `kinetic jobs kill` mean, and which signal. Pure.

In: a reference, a slice, a host, a signal's name. Out: indices of hosts, a number; errors that name
the valid ones.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence

from kinetic._client.board import shape
from kinetic._core.outcome import name_hosts, name_of
from kinetic._core.ref import JobRef
from kinetic.errors import UsageError

_MANY = 1 << 16
"""Slices of a single controller: a reference does not say how many there are."""


def choose_hosts(ref: JobRef, slice: int | None, host: int | None) -> tuple[int, ...]:
    """Return the hosts of a slice, or only its `host`-th one; without a slice, the
    `host`-th of the job.

    The machines of a single controller's slices run no function. They count after the hosts.

    Raises:
        UsageError: there is no such slice or host, or none was named.
    """
    if slice is None and host is None:
        raise UsageError(
            f"Say which hosts of {ref.job_id} to kill: a slice, a host, or both. To stop the job, "
            "cancel it."
        )
    if slice is None:
        return (_check_index(ref, "host", host, ref.hosts),)
    hosts_each = shape.machines_of_a_slice(ref)
    if ref.has_single_controller:
        first = ref.hosts + _check_index(ref, "slice", slice, _MANY) * hosts_each
    else:
        first = _check_index(ref, "slice", slice, ref.hosts // hosts_each) * hosts_each
    if host is None:
        return tuple(range(first, first + hosts_each))
    return (first + _check_index(ref, "host", host, hosts_each, f" of slice {slice}"),)


def name_machines(ref: JobRef, hosts: Sequence[int], *, of_all: bool = False) -> str:
    """Return "hosts 4-7", or "hosts 4-7 of 8"; "machines 0-3 of slice 1" where a single controller
    has the slices."""
    machines = [host - ref.hosts for host in hosts if host >= ref.hosts]
    if not machines:
        return name_of(hosts, ref.hosts) if of_all else name_hosts(hosts)
    hosts_each = shape.machines_of_a_slice(ref)
    of_slice = name_hosts([machine % hosts_each for machine in machines]).replace("host", "machine")
    return f"{of_slice} of slice {machines[0] // hosts_each}"


def _check_index(ref: JobRef, noun: str, value: object, count: int, where: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        some = f"{noun}s 0 to {count - 1}" if count > 1 else f"only {noun} 0"
        has = "" if count == _MANY else f": {ref.job_id} has {some}{where}"
        raise UsageError(f"There is no {noun} {value!r}{where}{has}.")
    return value


def signal_of(name: str | int) -> signals.Signals:
    """Return the signal with this name or number: "KILL", "SIGKILL", "9" or 9.

    Raises:
        UsageError: there is no such signal.
    """
    text = str(name).strip().upper()
    by_name = {each.name: each for each in signals.Signals}
    by_name |= {each.name.removeprefix("SIG"): each for each in signals.Signals}
    by_name |= {str(each.value): each for each in signals.Signals}
    if text not in by_name:
        raise UsageError(f"There is no signal {name!r}. Give a name or a number: KILL, TERM, 9.")
    return by_name[text]
