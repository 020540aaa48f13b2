"""The shape of a job's gang: its slices, and the hosts of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kinetic._client.board import text
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.accelerators.topology import Topology
from kinetic._core.ref import JobRef
from kinetic.errors import UsageError

MANY = 1 << 16
"""Limit for a slice's index with a single controller, whose number of slices is not known here."""


def topology_of(ref: JobRef) -> Topology | None:
    """Return the shape of each slice; None if this version does not know the accelerator."""
    try:
        topology = resolve(ref.accelerator)
        return topology.as_one_host() if ref.has_single_controller else topology
    except UsageError:
        return None


def name_slice(topology: Topology) -> str:
    """Return a slice's name and shape, such as "tpu-v6e-16 · 4x4"; only the name if it contains the
    shape, such as "cpu:2"."""
    is_line = topology.shape_text.isdecimal()
    return topology.name if is_line else f"{topology.name} · {topology.shape_text}"


def machines_of_a_slice(ref: JobRef) -> int:
    """Return the number of machines of a slice, including those that do not run the function."""
    try:
        return resolve(ref.accelerator).hosts
    except UsageError:
        return ref.hosts


def slice_of(ref: JobRef, host: int, slices: Sequence[int] = ()) -> int | None:
    """Return the slice of a host; None if the job has one slice, or each slice has one host.
    `slices` are the slices that take part in an elastic job."""
    topology = topology_of(ref)
    if topology is None or not 1 < topology.hosts < ref.hosts:
        return None
    index = host // topology.hosts
    return slices[index] if index < len(slices) else index


def describe_shape(ref: JobRef, slices: int | tuple[int, int] = 1) -> str:
    """Return "2 slices of tpu-v6e-8 (4 hosts)", or for a single controller "2 to 3 slices of
    tpu-v6e-8 (single controller)". `slices` is the option; only a single controller needs it."""
    if ref.has_single_controller:
        least, most = (slices, slices) if isinstance(slices, int) else slices
        several = f"{most}" if least == most else f"{least} to {most}"
        return f"{f'{several} slices of ' if most > 1 else ''}{ref.accelerator} (single controller)"
    topology, hosts = topology_of(ref), text.count(ref.hosts, "host")
    slices = 1 if topology is None else ref.hosts // topology.hosts
    return f"{f'{slices} slices of ' if slices > 1 else ''}{ref.accelerator} ({hosts})"


def check_host(ref: JobRef, host: object) -> int:
    """Check that the job has the host `host`; return its index.

    Raises:
        UsageError: the job has no such host.
    """
    return check_index(ref, "host", host, ref.hosts)


def check_index(ref: JobRef, noun: str, value: object, count: int, where: str = "") -> int:
    """Check that `value` is an index from 0 to `count` - 1; return it as an int.

    Args:
        ref: the job, for the error message.
        noun: "host" or "slice", for the error message.
        value: the index to check.
        count: the number of hosts or slices.
        where: text for the error message after the count, such as " of slice 1".

    Raises:
        UsageError: the index is not an integer, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        valid = f"{noun}s 0 to {count - 1}" if count > 1 else f"only {noun} 0"
        has = f"has {valid}{where}" if count != MANY else f"counts its {noun}s from 0"
        raise UsageError(f"There is no {noun} {value!r}{where}: {ref.job_id} {has}.")
    return value
