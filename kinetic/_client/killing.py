"""The arguments of `kill_hosts` and `kinetic jobs kill`: converts slice, host and signal as users
write them to host indices and a signal number. Pure; errors name the valid values."""

from __future__ import annotations

import signal as signals
from collections.abc import Sequence

from kinetic._client.board import shape
from kinetic._core.outcome import name_hosts, name_of
from kinetic._core.ref import JobRef
from kinetic.errors import UsageError


def choose_hosts(ref: JobRef, slice: int | None, host: int | None) -> tuple[int, ...]:
    """Return the indices of the hosts to kill: all hosts of a slice, the `host`-th host of a slice,
    or without `slice` the `host`-th host of the job.

    A single controller's slices have machines that do not run the function; their indices follow
    those of the hosts.

    Raises:
        UsageError: the slice or host does not exist, or neither was named.
    """
    if slice is None and host is None:
        raise UsageError(
            f"Name the hosts of {ref.job_id} to kill: a slice, a host, or both. To stop the whole "
            "job, cancel it."
        )
    if slice is None:
        return (shape.check_host(ref, host),)
    hosts_each = shape.machines_of_a_slice(ref)
    if ref.has_single_controller:
        first = ref.hosts + shape.check_index(ref, "slice", slice, shape.MANY) * hosts_each
    else:
        first = shape.check_index(ref, "slice", slice, ref.hosts // hosts_each) * hosts_each
    if host is None:
        return tuple(range(first, first + hosts_each))
    return (first + shape.check_index(ref, "host", host, hosts_each, f" of slice {slice}"),)


def name_machines(ref: JobRef, hosts: Sequence[int], *, of_all: bool = False) -> str:
    """Return "hosts 4-7"; with `of_all`, "hosts 4-7 of 8"; for the slices of a single controller,
    "machines 0-3 of slice 1"."""
    machines = [host - ref.hosts for host in hosts if host >= ref.hosts]
    if not machines:
        return name_of(hosts, ref.hosts) if of_all else name_hosts(hosts)
    hosts_each = shape.machines_of_a_slice(ref)
    of_slice = name_hosts([machine % hosts_each for machine in machines]).replace("host", "machine")
    return f"{of_slice} of slice {machines[0] // hosts_each}"


def signal_of(name: str | int) -> signals.Signals:
    """Return the signal with this name or number: "KILL", "SIGKILL", "9" or 9.

    Raises:
        UsageError: no signal has this name or number.
    """
    text = str(name).strip().upper()
    by_name = {each.name: each for each in signals.Signals}
    by_name |= {each.name.removeprefix("SIG"): each for each in signals.Signals}
    by_name |= {str(each.value): each for each in signals.Signals}
    if text not in by_name:
        raise UsageError(
            f"There is no signal {name!r}. Give a name or a number, such as KILL or 9."
        )
    return by_name[text]
