"""The checks of `kinetic doctor` on this machine: installed software, memory, the store, settings.

Each probe returns findings and never raises: facts that cannot be read count as unknown. Facts that
several probes need are read once, into `Machine` and `StoreFolder`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path

from kinetic._backends.local.simulation import (
    JAX_HOST_BYTES,
    LOOPBACK_REMEDY,
    SHARED_BYTES,
    can_simulate,
    name_system,
)
from kinetic._compile.topologies import CONTAINER, WITHOUT_LIBTPU, TpuCompiler, find_compiler
from kinetic._core import layout
from kinetic._core.findings import Finding, ok, problem, warn
from kinetic._core.values import dataclass
from kinetic._store import privacy
from kinetic._store.base import is_near
from kinetic._store.open import open_store
from kinetic._system.machine import available_memory_bytes, loopback_fault, usable_cpus
from kinetic.errors import KineticError, PreflightError
from kinetic.version import __version__

OLDEST_PYTHON = (3, 11)
OLDEST_JAX = (0, 6)
HOSTS_PER_CPU = 8
"""Simulated hosts that can share one processor well: on 2, 16 hosts start in about 2 s."""
LITTLE_BYTES = 1 << 30
NOTHING_BYTES = 100 << 20
_COMMON_HOSTS = 4
"""Warn if the machine lacks the memory for this many hosts, as many as 16 v6e chips have."""
_OTHERS = 0o077
_PACKAGES = ("jax", "keras")
_UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x00020000) != 0)"
"""A program that tries CLONE_NEWUSER and CLONE_NEWNS, in a process that ends at once."""
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Machine:
    """The software and hardware of this machine.

    Attributes:
        system: "linux", "darwin", ...
        python: the version of Python.
        versions: versions of packages, by name; None for a package that is not installed.
        available_bytes: memory available to new processes; None if unknown.
        cpus: processors that this process may use, within its quota; None if unknown.
        namespaces: True if users other than root may create mount namespaces; None if unknown.
        arch: the processor architecture, in Python's spelling.
        loopback_fault: why programs cannot connect over 127.0.0.1; "" if they can.
    """

    system: str
    python: tuple[int, ...]
    versions: Mapping[str, str | None] = field(default_factory=dict)
    available_bytes: int | None = None
    namespaces: bool | None = None
    cpus: int | None = None
    arch: str = "x86_64"
    loopback_fault: str = ""


@dataclass(frozen=True)
class StoreFolder:
    """The folder of the local store, which may not exist yet.

    Attributes:
        path: the path of the folder.
        exists: True if something exists at the path.
        is_folder: True if that is a folder.
        writable: True if files in the folder, or the folder itself, can be created.
        is_mine: True if the folder belongs to this user.
        mode: the permissions; 0 if the folder does not exist.
        free_bytes: free space on the disk; None if unknown.
        refused: why kinetic refuses to use the folder; "" if it does not.
    """

    path: str
    exists: bool = True
    is_folder: bool = True
    writable: bool = True
    is_mine: bool = True
    mode: int = 0o700
    free_bytes: int | None = None
    refused: str = ""


def read_machine() -> Machine:
    """Read the facts about this machine."""
    packages = {"kinetic": __version__} | {name: _read_version(name) for name in _PACKAGES}
    return Machine(
        sys.platform,
        tuple(sys.version_info[:3]),
        packages,
        available_memory_bytes(),
        _try_unshare(sys.platform),
        usable_cpus(),
        platform.machine(),
        loopback_fault(),
    )


def _read_version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _try_unshare(system: str) -> bool | None:
    if system != "linux":
        return None
    try:
        result = subprocess.run(
            [sys.executable, "-ISc", _UNSHARE],
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        return result.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return None


def list_slices() -> dict[str, int]:
    """Return the number of hosts of every TPU slice, by name."""
    from kinetic._core.accelerators.catalog import catalog_rows

    return {row.name: row.hosts for row in catalog_rows() if row.kind == "tpu"}


def read_folder(path: Path) -> StoreFolder:
    """Read the facts about the store's folder, or about its parent if it does not exist."""
    existing = next((p for p in (path, *path.parents) if p.exists()), path)
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK | os.X_OK)
    if existing != path:
        return StoreFolder(
            str(path),
            exists=False,
            writable=writable and existing.is_dir(),
            mode=0,
            free_bytes=free,
        )
    facts = path.stat()
    is_mine, refused = facts.st_uid == os.geteuid(), privacy.fault_of(str(path), facts)
    return StoreFolder(
        str(path), True, path.is_dir(), writable, is_mine, facts.st_mode & 0o7777, free, refused
    )


def versions(machine: Machine, *, has_cluster: bool) -> list[Finding]:
    """Check the versions of Python, JAX and Keras, and the operating system."""
    text = ".".join(map(str, machine.python[:3]))
    if machine.python[:2] < OLDEST_PYTHON:
        python = problem(
            "python",
            f"Python {text} is too old.",
            "Install Python 3.11 or later, and kinetic in it.",
        )
    else:
        python = ok(
            "python",
            f"Python {text}, kinetic {machine.versions.get('kinetic') or 'from its source'}.",
        )
    simulates = can_simulate(machine.system)
    system = [] if simulates else [_check_system(machine.system, has_cluster=has_cluster)]
    jax = _check_jax(machine.versions.get("jax"), simulates=simulates)
    return [python, *system, jax, _check_keras(machine.versions)]


def _check_system(system: str, *, has_cluster: bool) -> Finding:
    """Return the finding for a machine that cannot simulate slices."""
    limit = f"This is {name_system(system)}; slices are simulated on Linux only."
    if has_cluster:
        return ok("system", f"{limit} Jobs run on a cluster.")
    return problem(
        "system",
        f"{limit} No cluster is configured either, so no job can run.",
        "Name a cluster (`kinetic profile create`), or use a Linux machine, container or virtual "
        "machine.",
    )


def _check_jax(version: str | None, *, simulates: bool) -> Finding:
    if version is None and not simulates:
        return ok("jax", "JAX is not installed; only functions that use it need it.")
    if version is None:
        return warn(
            "jax",
            "JAX is not installed: slices of several hosts, and functions that use JAX, cannot run "
            "here.",
            "pip install jax",
        )
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST_JAX:
        return warn(
            "jax",
            f"JAX {version} is older than 0.6, the oldest version that kinetic is tested with.",
            "pip install --upgrade jax",
        )
    return ok("jax", f"JAX {version}.")


def _check_keras(versions: Mapping[str, str | None]) -> Finding:
    version = versions.get("keras")
    return ok(
        "keras",
        f"Keras {version}."
        if version
        else "Keras is not installed; only functions that use it need it.",
    )


def tpu_compiler(machine: Machine, find: Callable[[], TpuCompiler] = find_compiler) -> Finding:
    """Check whether `kinetic.compile_for` and `compile_check` work here; `find` is for tests."""
    compiler: TpuCompiler | PreflightError
    try:
        compiler = find()
    except PreflightError as error:
        compiler = error
    check, jax = "compiler", machine.versions.get("jax")
    if (machine.system, machine.arch) != ("linux", "x86_64"):
        return ok(
            check,
            f"The TPU compiler runs only on Linux on x86-64; this is {machine.system} on "
            f"{machine.arch}. In a container: {CONTAINER}",
        )
    if str(compiler) == WITHOUT_LIBTPU or jax is None:
        return ok(
            check,
            "The TPU compiler is not installed; only kinetic.compile_for and compile_check need "
            "it: pip install 'jax>=0.10' libtpu.",
        )
    if isinstance(compiler, PreflightError):
        return warn(check, str(compiler), "pip install --upgrade jax libtpu")
    return ok(check, f"{compiler} compile for TPUs on this machine, with JAX {jax}.")


def memory(machine: Machine, slices: Mapping[str, int]) -> Finding:
    """Check which slices fit into memory; `slices` maps a slice's name to its number of hosts."""
    if machine.available_bytes is None:
        return ok("memory", "The available memory is unknown.")
    hosts = max(0, (machine.available_bytes - SHARED_BYTES) // JAX_HOST_BYTES)
    free = f"{machine.available_bytes / 2**30:.1f} GiB of memory are available"
    remedy = "Close other programs, or use a larger machine or a cluster for larger slices."
    if hosts == 0:
        return problem(
            "memory", f"{free}: too little to simulate even one host that uses JAX.", remedy
        )
    if hosts < _COMMON_HOSTS:
        return warn(
            "memory",
            f"{free}: enough only for slices of up to {hosts} host{'s' if hosts > 1 else ''}.",
            remedy,
        )
    if machine.cpus is None or hosts <= machine.cpus * HOSTS_PER_CPU:
        return ok(
            "memory",
            f"{free}: enough for slices of up to {_name_example(hosts, slices)}, not counting what "
            "your functions allocate.",
        )
    return ok(
        "memory",
        f"{free}: enough for every slice that the processors run well, not counting what your "
        "functions allocate.",
    )


def processors(machine: Machine, slices: Mapping[str, int]) -> Finding:
    """Report which simulated slices this machine's processors can run at a reasonable speed.
    `slices` maps a slice's name to its number of hosts."""
    if machine.cpus is None:
        return ok("processors", "The number of processors is unknown.")
    text = f"{machine.cpus} processor{'s' if machine.cpus > 1 else ''}"
    well = _name_example(machine.cpus * HOSTS_PER_CPU, slices)
    return ok(
        "processors", f"{text}: good for slices of up to about {well}. Larger slices run slowly."
    )


def _name_example(hosts: int, slices: Mapping[str, int]) -> str:
    fitting = [name for name, needed in slices.items() if needed <= hosts]
    largest = max(fitting, key=lambda name: (slices[name], "v6e" in name), default=None)
    text = f"{hosts} host{'s' if hosts > 1 else ''}"
    return text if largest is None else f"{text}, for example {largest} ({slices[largest]} hosts)"


def namespaces(machine: Machine) -> Finding:
    """Check whether simulated hosts can have data at fixed paths."""
    if machine.namespaces is None:
        return ok("namespaces", "It is unknown whether mount namespaces can be created.")
    if machine.namespaces:
        return ok("namespaces", "User and mount namespaces can be created.")
    return warn(
        "namespaces",
        "User and mount namespaces cannot be created, so simulated hosts cannot have data at fixed "
        "paths (volumes=).",
        "Allow namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces), "
        "or pass data as arguments.",
    )


def loopback(machine: Machine) -> Finding:
    """Check whether simulated hosts can connect to each other."""
    if not machine.loopback_fault:
        return ok("loopback", "Programs on this machine can connect over 127.0.0.1.")
    return problem(
        "loopback",
        f"127.0.0.1, which jobs of several hosts need, cannot be used: {machine.loopback_fault}.",
        LOOPBACK_REMEDY,
    )


def store(folder: StoreFolder, remote_store: str = "") -> list[Finding]:
    """Check the local store's folder. `remote_store`: the address of a configured remote store."""
    elsewhere = "or set KINETIC_STORE to a folder of your own."
    if folder.exists and not folder.is_folder:
        return [problem("store", f"{folder.path} is not a folder.", f"Rename it, {elsewhere}")]
    if folder.exists and not folder.is_mine:
        return [
            problem(
                "store",
                f"{folder.path} belongs to another user, who could read and change your jobs.",
                "Set KINETIC_STORE to a folder of your own.",
            )
        ]
    if folder.refused:
        why, _, remedy = folder.refused.partition(" Run: ")
        return [problem("store", why, remedy)]
    if not folder.writable:
        verb = "written to" if folder.exists else "created"
        remedy = f"Change its permissions or those of its parent, {elsewhere}"
        return [problem("store", f"{folder.path} cannot be {verb}.", remedy)]
    if remote_store:
        other = f"the configured store is {remote_store}."
        findings = [ok("local store", f"{folder.path} is for jobs on this machine; {other}")]
    else:
        note = "" if folder.exists else " (the first job creates it)"
        findings = [ok("store", f"{folder.path}{note}.")]
    if folder.exists and folder.mode & _OTHERS:
        findings.append(
            warn(
                "permissions",
                f"Other users can read {folder.path}, where your jobs are stored (mode "
                f"{folder.mode & 0o777:o}).",
                f"chmod 700 {folder.path}",
            )
        )
    return [*findings, *_check_space(folder, elsewhere)]


def _check_space(folder: StoreFolder, elsewhere: str) -> list[Finding]:
    free = folder.free_bytes
    if free is None:
        return []
    text = f"{free / 2**30:.1f} GiB are free where jobs are stored."
    remedy = f"Free some space (`kinetic jobs prune` removes old jobs), {elsewhere}"
    if free < NOTHING_BYTES:
        return [
            problem(
                "space",
                f"Only {free / 2**20:.0f} MiB are free on the disk of {folder.path}, where jobs "
                "are stored, so jobs will lose output.",
                remedy,
            )
        ]
    return [warn("space", text, remedy) if free < LITTLE_BYTES else ok("space", text)]


def zygote(machine: Machine, environ: dict[str, str], *, enabled: bool) -> Finding:
    """Check that the process that starts hosts can start: start it as a job would, and end it."""
    if not enabled:
        return ok("zygote", "Not tried: KINETIC_PRELOAD is off.")
    from kinetic._backends.local import launcher

    modules = ("numpy", "jax") if machine.versions.get("jax") else ()
    process = f"The process that starts hosts{' with JAX imported' if 'jax' in modules else ''}"
    begun = time.monotonic()
    if last_words := launcher.try_out(modules, environ):
        return problem(
            "zygote",
            f"{process} does not start. Its last output: {last_words}",
            "Repair this Python environment: no job can run from it.",
        )
    return ok("zygote", f"{process} starts ({time.monotonic() - begun:.1f} s).")


def configuration(settings_fault: str, profiles_fault: str, profile: str | None) -> list[Finding]:
    """Report faults of settings and profiles. Each fault is a message; "" if there is none."""
    findings = []
    if settings_fault:
        findings.append(
            problem(
                "settings",
                settings_fault,
                "Correct the variable; `kinetic config` shows all settings.",
            )
        )
    if profiles_fault:
        findings.append(
            problem(
                "profiles",
                profiles_fault,
                "Correct this: commands that need settings fail until then.",
            )
        )
    if not findings:
        findings.append(
            ok(
                "settings",
                "Readable; "
                f"{f'profile {profile} is in use' if profile else 'no profile is in use'}.",
            )
        )
    return findings


def variables(misspelt: Mapping[str, str]) -> list[Finding]:
    """Warn of environment variables whose names look like misspelt settings. `misspelt` maps each
    such name to the variable that was probably meant."""
    return [
        warn(
            "variables",
            f"The environment variable {name} has no effect: kinetic has no such setting.",
            f"Did you mean {meant}? Rename or unset {name}.",
        )
        for name, meant in misspelt.items()
    ]


def access(uri: str, *, has_cluster: bool, pods_store: str) -> list[Finding]:
    """Check a remote store by writing, finding and deleting a small object. A local folder is a
    problem only for a cluster, whose pods cannot reach it.

    Args:
        uri: the address of the store.
        has_cluster: True if jobs go to a cluster.
        pods_store: the address by which pods reach the store, if it differs; else "".
    """
    fault = ""
    try:
        store = open_store(uri)
        if not is_near(store):
            key = f"{layout.PROBES}/{secrets.token_hex(8)}"
            store.put(key, b"kinetic doctor\n")
            try:
                fault = "" if store.has(key) else "an object disappeared after it was written."
            finally:
                store.delete(key)
        elif not has_cluster:
            return []
        elif pods_store:
            text = f"Pods use {pods_store}, which cannot be checked from this machine."
            return [ok("store access", text)]
        else:
            text = f"The store is the folder {uri}, which the pods of a cluster cannot reach."
            remedy = (
                "Name a bucket: KINETIC_STORE=gs://BUCKET, or --store of `kinetic profile create`."
            )
            return [problem("store access", text, remedy)]
    except KineticError as error:
        fault = str(error)
    if fault:
        remedy = "Check the address and your rights: KINETIC_STORE, or `kinetic profile show`."
        return [problem("store access", f"{uri} cannot be used: {fault}", remedy)]
    return [ok("store access", f"{uri} can be written to and read.")]
