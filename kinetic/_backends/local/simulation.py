"""What a simulated slice needs from this machine: pure arithmetic.

In: a plan. Out: the local backend's document, an estimate of memory.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._core import layout
from kinetic._core.plan import needs_jax
from kinetic._core.variables import THREADS
from kinetic.errors import InsufficientMemory, PreflightError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kinetic._core.place import Place
    from kinetic._core.plan import Plan

LOOPBACK_REMEDY = (
    "As root, `ip link set lo up` brings it up; where it is up, with IPv6 alone, `ip addr add "
    "127.0.0.1/8 dev lo` gives it this address."
)
_READ_BY_LIBRARIES = ("KERAS_", "FLAX_", "EQX_", "ORBAX_", "TF_")
PLAIN_HOST_BYTES = 40 << 20
"""Agent and worker of a host that may not use JAX: measured 25-40 MiB of private memory."""
JAX_HOST_BYTES = 110 << 20
"""Agent and worker of a host that JAX runs on: measured 53-102 MiB (proportional set size) on 4 to
16 hosts."""
DEVICE_BYTES = 3 << 19
"""Each virtual device of a process that has those of all hosts: measured 1.3-1.5 MiB with 256 to
2048 devices."""
SHARED_BYTES = 160 << 20
"""Shared by all hosts: the preloaded interpreter and JAX."""


def document(plan: Plan) -> dict[str, Any]:
    """The document of a simulated slice: what the supervisor will start."""
    variables = [*plan.options.env, *plan.captured, *plan.secrets]
    return {
        "kind": "simulated slice",
        "job_id": plan.job_id,
        "name": plan.name,
        "accelerator": plan.topology.name,
        "stands_in_for": plan.place.requested,
        "slices": plan.options.most_slices,
        "hosts": plan.hosts,
        "devices_per_host": plan.devices_per_host,
        "preload": list(preload_modules(needs_jax=needs_jax(plan.options), variables=variables)),
        "memory_estimate_bytes": memory_estimate_bytes(plan),
        "env": dict(plan.options.env),
        "secrets": list(plan.secrets),
    }


def preload_modules(*, needs_jax: bool, variables: Iterable[str]) -> tuple[str, ...]:
    """Modules that are imported once for all hosts, and for all jobs of a caller.

    JAX must be imported anew if the job sets variables that it reads at import, or chooses how many
    threads numpy starts with.
    """
    if any(name.startswith(("JAX_", "XLA_", "PYTHONPATH", *THREADS)) for name in variables):
        return ()
    return ("numpy", "jax") if needs_jax else ()


def preload_libraries(libraries: Iterable[str], *, variables: Iterable[str]) -> tuple[str, ...]:
    """Of the libraries that a job probably imports, those that read no variable of its own."""
    return () if any(name.startswith(_READ_BY_LIBRARIES) for name in variables) else (*libraries,)


def memory_estimate_bytes(plan: Plan) -> int:
    """Memory that the whole gang needs before the function allocates anything."""
    return SHARED_BYTES + plan.hosts * _host_bytes(plan)


def _host_bytes(plan: Plan) -> int:
    if plan.has_single_controller:
        return JAX_HOST_BYTES + plan.devices_per_host * DEVICE_BYTES
    return JAX_HOST_BYTES if plan.topology.kind != "cpu" or plan.hosts > 1 else PLAIN_HOST_BYTES


def can_simulate(system: str) -> bool:
    """Whether the kernel has what kinetic needs to supervise a slice's processes: pidfds,
    subreapers, /proc."""
    return system == "linux"


def check_system(system: str, place: Place) -> None:
    """Refuse a machine that cannot simulate slices.

    Args:
        system: of this machine, as in `sys.platform`.
        place: where the job would go.

    Raises:
        PreflightError: with where it would run.
    """
    if not can_simulate(system):
        stands_in = "No cluster is configured, and"
        cause = stands_in if place.stands_in_for else f'backend="{place.backend}":'
        raise PreflightError(
            f"{cause} slices are simulated on Linux only; this is {name_system(system)}. Name a "
            "cluster (`kinetic profile create NAME --project … --zone … --cluster …`, or "
            "KINETIC_CLUSTER), or run this on a Linux machine, which may be a container or a "
            "virtual machine on this computer. Nothing was submitted."
        )


def name_system(system: str) -> str:
    """The common name of a system; if unknown, its name in `sys.platform`."""
    return {"darwin": "macOS"}.get(system, system)


def check_memory(plan: Plan, available_bytes: int | None) -> None:
    """Refuse a slice that this machine cannot hold.

    Raises:
        InsufficientMemory: with how many hosts fit.
    """
    need = memory_estimate_bytes(plan)
    if available_bytes is None or need <= available_bytes:
        return
    fit = max(0, (available_bytes - SHARED_BYTES) // _host_bytes(plan))
    several = plan.hosts > 1
    takes = f"takes {plan.hosts} hosts and" if several else "takes"
    enough = f", enough for {fit} hosts" if several else ""
    raise InsufficientMemory(
        f"Simulating {plan.topology.name} {takes} about {need / 2**30:.1f} GiB of memory; "
        f"{available_bytes / 2**30:.1f} GiB are available here{enough}. Choose a smaller slice, "
        "free memory, or run it on a cluster.",
        hosts=plan.hosts,
        hosts_that_fit=fit,
    )


def room(plan: Plan | None, cpus: int, available_bytes: int | None) -> int:
    """Return how many gangs of this shape run well at once: a processor for each host, and memory
    for all. At least one.

    Args:
        plan: of one of them; None for gangs of one host.
        cpus: processors of this machine.
        available_bytes: free memory, if known.
    """
    hosts, need = (
        (1, SHARED_BYTES + JAX_HOST_BYTES)
        if plan is None
        else (plan.hosts, memory_estimate_bytes(plan))
    )
    by_memory = cpus if available_bytes is None else available_bytes // need
    return max(1, min(cpus // hosts, by_memory))


def check_loopback(plan: Plan, fault: Callable[[], str]) -> None:
    """Refuse several hosts if they could not talk to each other.

    Raises:
        PreflightError: with how to make it possible.
    """
    if plan.hosts > 1 and (why := fault()):
        raise PreflightError(
            "The hosts of a simulated slice talk to each other over 127.0.0.1, which cannot be "
            f"used here: {why}. {LOOPBACK_REMEDY} Nothing was submitted."
        )


def check_debugger(plan: Plan, *, installed: Callable[[], bool]) -> None:
    """Refuse a debug job if there is no debugger.

    Raises:
        PreflightError: debugpy is missing.
    """
    if plan.options.debug and not installed():
        raise PreflightError(
            "debug=True needs debugpy on the hosts, here in this environment: pip install debugpy."
        )


def has_debugger() -> bool:
    """Whether debugpy is installed here."""
    from importlib.util import find_spec

    return find_spec("debugpy") is not None


def check_pathways(plan: Plan) -> None:
    """Refuse a single controller whose slices may be lost, if what calls its function again is not
    installed.

    Raises:
        PreflightError: with what to install.
    """
    from importlib.util import find_spec

    if plan.elastic_controller is not None and find_spec("pathwaysutils") is None:
        raise PreflightError(
            'slices=(least, most) with controller="single" needs pathwaysutils: pip install '
            "'pathwaysutils[gke]'."
        )


def check_reach(plan: Plan, store_folder: Path | None) -> None:
    """Refuse data that only a cluster mounts, and say what stands in for it here.

    Args:
        plan: of the job.
        store_folder: of the store, which also has what stands in for buckets; None if it is none.

    Raises:
        UsageError: with its name and what to do here.
    """
    for data in (data for data in plan.data if data.writable):
        if store_folder is None:
            raise UsageError(
                f"{data.source} can be written to on a cluster only, while the store is a bucket, "
                "too. Leave KINETIC_STORE out, and a folder of this machine stands in for it."
            )
        folder = store_folder / layout.bucket_folder(data.source)
        logging.getLogger("kinetic").warning(
            "kinetic: %s is simulated, by the folder %s.", data.source, folder
        )
    mounted = [
        data.source
        for data in plan.data
        if data.fuse and not data.writable and "://" in data.source
    ]
    if mounted:
        raise UsageError(
            f"{mounted[0]} is mounted by a cluster only: hosts on this machine fetch it. Leave "
            "fuse=True out."
        )


def check_places(plan: Plan, needed: Sequence[str]) -> None:
    """Refuse an output folder that cannot be created, and data that would hide what the hosts
    themselves read.

    Args:
        needed: folders that hosts on this machine read: the store, the interpreter.

    Raises:
        UsageError: with the path and what to do.
    """
    if plan.output_dir and "://" not in plan.output_dir:
        _check_output_dir(plan.output_dir)
    for mount in (each.mount for each in plan.data if each.mount):
        hidden = [folder for folder in needed if Path(folder).is_relative_to(mount)]
        if hidden:
            raise UsageError(
                f"volumes: data at {mount} would hide {hidden[0]}, which jobs need. Choose another "
                "path, such as /data."
            )


def _check_output_dir(path: str) -> None:
    # Path.exists raises where a folder cannot be searched.
    existing = next(p for p in (Path(path), *Path(path).parents) if os.path.exists(p))  # noqa: PTH110
    if existing.is_dir() and (existing == Path(path) or os.access(existing, os.W_OK | os.X_OK)):
        return
    why = f"you may not write to {existing}" if existing.is_dir() else f"{existing} is a file"
    raise UsageError(
        f"The output folder {path} cannot be created: {why}. Set output_dir= to a folder."
    )
