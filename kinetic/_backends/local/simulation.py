"""The needs of a simulated slice: its document, its memory, and checks of this machine."""

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
    "As root, run `ip link set lo up`; if the interface is up, but has only IPv6, run `ip addr "
    "add 127.0.0.1/8 dev lo`."
)
_READ_BY_LIBRARIES = ("KERAS_", "FLAX_", "EQX_", "ORBAX_", "TF_")
PLAIN_HOST_BYTES = 40 << 20
"""The memory of agent and worker of a host without JAX: measured 25-40 MiB of private memory."""
JAX_HOST_BYTES = 110 << 20
"""The memory of agent and worker of a host with JAX: measured 53-102 MiB (proportional set size)
on 4 to 16 hosts."""
DEVICE_BYTES = 3 << 19
"""Memory of a single controller's virtual device: measured 1.3-1.5 MiB with 256-2048 devices."""
SHARED_BYTES = 160 << 20
"""The memory that all hosts share: the preloaded interpreter and JAX."""


def document(plan: Plan) -> dict[str, Any]:
    """Return the document of a simulated slice, from which the supervisor starts it."""
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
        "preload": list(
            preload_modules(
                needs_jax=needs_jax(plan.options) or plan.holds is not None, variables=variables
            )
        ),
        "memory_estimate_bytes": memory_estimate_bytes(plan),
        "env": dict(plan.options.env),
        "secrets": list(plan.secrets),
    }


def preload_modules(*, needs_jax: bool, variables: Iterable[str]) -> tuple[str, ...]:
    """Return the modules to import once, in the zygote, for all hosts and all jobs of a caller; ()
    if the job sets variables that JAX or numpy read when they are imported."""
    if any(name.startswith(("JAX_", "XLA_", "PYTHONPATH", *THREADS)) for name in variables):
        return ()
    return ("numpy", "jax") if needs_jax else ()


def preload_libraries(libraries: Iterable[str], *, variables: Iterable[str]) -> tuple[str, ...]:
    """Return the libraries to import early; () if the job sets variables that they may read."""
    return () if any(name.startswith(_READ_BY_LIBRARIES) for name in variables) else (*libraries,)


def memory_estimate_bytes(plan: Plan) -> int:
    """Return the memory, in bytes, that the gang needs before the function allocates anything."""
    return SHARED_BYTES + plan.hosts * _host_bytes(plan)


def _host_bytes(plan: Plan) -> int:
    if plan.has_single_controller:
        return JAX_HOST_BYTES + plan.devices_per_host * DEVICE_BYTES
    return JAX_HOST_BYTES if plan.topology.kind != "cpu" or plan.hosts > 1 else PLAIN_HOST_BYTES


def can_simulate(system: str) -> bool:
    """True if the kernel can supervise a slice's processes: it has pidfds, subreapers, /proc."""
    return system == "linux"


def check_system(system: str, place: Place) -> None:
    """Refuse a machine that cannot simulate slices.

    Args:
        system: the operating system of this machine, as in `sys.platform`.
        place: the place of the job.

    Raises:
        PreflightError: this machine cannot simulate slices; the message says where else to run.
    """
    if not can_simulate(system):
        no_cluster = "No cluster is configured, and"
        cause = no_cluster if place.stands_in_for else f'backend="{place.backend}":'
        raise PreflightError(
            f"{cause} slices are simulated on Linux only; this is {name_system(system)}. Name a "
            "cluster (`kinetic profile create NAME --project … --zone … --cluster …`, or "
            "KINETIC_CLUSTER), or run this on Linux, for example in a container or a virtual "
            "machine. Nothing was submitted."
        )


def name_system(system: str) -> str:
    """Return the common name of a system, or else its name in `sys.platform`."""
    return {"darwin": "macOS"}.get(system, system)


def check_memory(plan: Plan, available_bytes: int | None) -> None:
    """Refuse a slice that this machine cannot hold.

    Raises:
        InsufficientMemory: the slice needs more memory than is free; the message says how many
            hosts fit.
    """
    need = memory_estimate_bytes(plan)
    if available_bytes is None or need <= available_bytes:
        return
    fit = max(0, (available_bytes - SHARED_BYTES) // _host_bytes(plan))
    several = plan.hosts > 1
    takes = f"takes {plan.hosts} hosts and" if several else "takes"
    enough = f", enough for {fit} hosts" if several else ""
    raise InsufficientMemory(
        f"Simulating {plan.topology.name} {takes} about {need / 2**30:.1f} GiB of memory; this "
        f"machine has {available_bytes / 2**30:.1f} GiB available{enough}. Choose a smaller slice, "
        "free memory, or run the job on a cluster.",
        hosts=plan.hosts,
        hosts_that_fit=fit,
    )


def room(plan: Plan | None, cpus: int, available_bytes: int | None) -> int:
    """Return how many gangs with this plan run well at the same time: each host needs a processor,
    and all of them memory. At least 1.

    Args:
        plan: the plan of the gangs; None for gangs of one host.
        cpus: the number of processors of this machine.
        available_bytes: the free memory; None if unknown.
    """
    hosts, need = (
        (1, SHARED_BYTES + JAX_HOST_BYTES)
        if plan is None
        else (plan.hosts, memory_estimate_bytes(plan))
    )
    by_memory = cpus if available_bytes is None else available_bytes // need
    return max(1, min(cpus // hosts, by_memory))


def check_loopback(plan: Plan, fault: Callable[[], str]) -> None:
    """Refuse a job of several hosts if the hosts could not connect to each other.

    Args:
        plan: the job's plan.
        fault: returns why the loopback interface does not work; "" if it does.

    Raises:
        PreflightError: the loopback interface does not work; the message says how to repair it.
    """
    if plan.hosts > 1 and (why := fault()):
        raise PreflightError(
            "The hosts of a simulated slice connect to each other over 127.0.0.1, which does not "
            f"work on this machine: {why}. {LOOPBACK_REMEDY} Nothing was submitted."
        )


def check_debugger(plan: Plan, *, installed: Callable[[], bool]) -> None:
    """Refuse a job with debug=True if debugpy is missing.

    Raises:
        PreflightError: debugpy is missing.
    """
    if plan.options.debug and not installed():
        raise PreflightError(
            "debug=True needs the package debugpy in this Python environment, in which simulated "
            "hosts run. Install it: pip install debugpy"
        )


def has_debugger() -> bool:
    """True if debugpy is installed in this environment."""
    from importlib.util import find_spec

    return find_spec("debugpy") is not None


def check_pathways(plan: Plan) -> None:
    """Refuse an elastic single controller without pathwaysutils, which restarts its function.

    Raises:
        PreflightError: pathwaysutils is missing.
    """
    from importlib.util import find_spec

    if plan.elastic_controller is not None and find_spec("pathwaysutils") is None:
        raise PreflightError(
            'slices=(least, most) with controller="single" needs the package pathwaysutils. '
            "Install it: pip install 'pathwaysutils[gke]'"
        )


def check_reach(plan: Plan, store_folder: Path | None) -> None:
    """Refuse data that only a cluster can mount. Log which folders simulate writable buckets.

    Args:
        plan: the job's plan.
        store_folder: the folder of the store, which contains simulated buckets; None if the store
            is no folder.

    Raises:
        UsageError: the plan has such data; the message names it and says what to do.
    """
    for data in (data for data in plan.data if data.writable):
        if store_folder is None:
            raise UsageError(
                f"{data.source} cannot be simulated while the store is a bucket. Unset "
                "KINETIC_STORE, so that a folder of this machine simulates the data's bucket, or "
                "use a cluster."
            )
        folder = store_folder / layout.bucket_folder(data.source)
        logging.getLogger("kinetic").warning(
            "kinetic: %s is simulated by the folder %s.", data.source, folder
        )
    mounted = [
        data.source
        for data in plan.data
        if data.fuse and not data.writable and "://" in data.source
    ]
    if mounted:
        raise UsageError(
            f"{mounted[0]} has fuse=True, but only clusters mount buckets. Remove fuse=True: hosts "
            "on this machine then fetch the data."
        )


def check_places(plan: Plan, needed: Sequence[str]) -> None:
    """Refuse an output folder that cannot be created, and mounts that would hide a needed folder.

    Args:
        plan: the job's plan.
        needed: the folders that hosts on this machine need: the store, the interpreter.

    Raises:
        UsageError: the plan has such a folder or mount.
    """
    if plan.output_dir and "://" not in plan.output_dir:
        _check_output_dir(plan.output_dir)
    for mount in (data.mount for data in plan.data if data.mount):
        hidden = [folder for folder in needed if Path(folder).is_relative_to(mount)]
        if hidden:
            raise UsageError(
                f"volumes: data mounted at {mount} would hide {hidden[0]}, which jobs need. Choose "
                "another path for the data, such as /data."
            )


def _check_output_dir(path: str) -> None:
    # os.path, because Path.exists raises for folders that cannot be searched.
    existing = next(p for p in (Path(path), *Path(path).parents) if os.path.exists(p))  # noqa: PTH110
    if existing.is_dir() and (existing == Path(path) or os.access(existing, os.W_OK | os.X_OK)):
        return
    why = f"you may not write to {existing}" if existing.is_dir() else f"{existing} is a file"
    raise UsageError(
        f"The output folder {path} cannot be created: {why}. Set output_dir= to a folder that "
        "you can write to."
    )
