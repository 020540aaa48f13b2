"""Looking at this machine: its Python, memory, namespaces, store, and leftovers of jobs.

In: settings. Out: facts, as `checks` and `leftovers` take them. Changes nothing. Probes must not
raise: unknown facts are None.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kinetic._backends import registry
from kinetic._backends.base import Backend, Processes
from kinetic._client.doctor.checks import Machine, StoreAccess, StoreFolder, ZygoteStart
from kinetic._client.doctor.leftovers import SETTLED_S, LocalJob, Process, Scrap, Traces
from kinetic._compile.topologies import TpuCompiler, find_compiler
from kinetic._core import layout
from kinetic._core.outcome import Outcome
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._store import index, privacy
from kinetic._store.local import LocalStore
from kinetic._store.many import has_many
from kinetic._store.open import open_store
from kinetic._system import locks, processes
from kinetic._system.machine import available_memory_bytes, loopback_fault, usable_cpus
from kinetic.errors import KineticError, NotFound, PreflightError, UnsupportedVersion
from kinetic.version import __version__

_PACKAGES = ("jax", "keras")
_OF_A_RUNNING_JOB = ("work", "socket", "supervisor.json")
"""What a supervisor removes when its job ends, below the job's `local` folder."""
_TITLE = re.compile(r"kinetic-(supervisor|agent|worker) (job-[0-9a-f]+)(?: host (\d+))?")
_UNSHARE = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000 | 0x00020000) != 0)"
"""CLONE_NEWUSER and CLONE_NEWNS, in a process that ends at once."""
_PATIENCE_S = 10.0
HERE = Place("local")
"""Where jobs run on this machine."""


def machine() -> Machine:
    """Look at what is installed, and at processors and memory."""
    known = {"kinetic": __version__} | {name: _version(name) for name in _PACKAGES}
    return Machine(
        sys.platform,
        tuple(sys.version_info[:3]),
        known,
        available_memory_bytes(),
        _namespaces(sys.platform),
        usable_cpus(),
        platform.machine(),
        loopback_fault(),
    )


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _namespaces(system: str) -> bool | None:
    if system != "linux":
        return None
    try:
        tried = subprocess.run(
            [sys.executable, "-ISc", _UNSHARE],
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        return tried.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return None


def tpu_compiler() -> TpuCompiler | PreflightError:
    """Look for the compiler of TPUs."""
    try:
        return find_compiler()
    except PreflightError as error:
        return error


def slices() -> dict[str, int]:
    """Return the number of hosts of every TPU slice, by name."""
    from kinetic._core.accelerators.catalog import catalog_rows

    return {row.name: row.hosts for row in catalog_rows() if row.kind == "tpu"}


def folder(path: Path) -> StoreFolder:
    """Look at the folder of the store, or at the place for it."""
    there = next((p for p in (path, *path.parents) if p.exists()), path)
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK | os.X_OK)
    if there != path:
        return StoreFolder(
            str(path), exists=False, writable=writable and there.is_dir(), mode=0, free_bytes=free
        )
    facts = path.stat()
    mine, refused = facts.st_uid == os.geteuid(), privacy.fault_of(str(path), facts)
    return StoreFolder(
        str(path), True, path.is_dir(), writable, mine, facts.st_mode & 0o7777, free, refused
    )


def access(uri: str) -> StoreAccess:
    """Test a store that is not a folder: write, find and delete a small object."""
    try:
        store = open_store(uri)
        if store.as_folder() is not None:
            return StoreAccess(uri, is_folder=True)
        key = f"{layout.PROBES}/{secrets.token_hex(8)}"
        store.put(key, b"kinetic doctor\n")
        try:
            found = store.has(key)
        finally:
            store.delete(key)
    except KineticError as error:
        return StoreAccess(uri, fault=str(error))
    if not found:
        return StoreAccess(uri, fault="what was written is not there.")
    return StoreAccess(uri)


def zygote(machine: Machine, environ: dict[str, str], *, enabled: bool) -> ZygoteStart | None:
    """Start the process that starts hosts, as a job would, and end it."""
    if not enabled:
        return None
    from kinetic._backends.local import launcher

    modules = ("numpy", "jax") if machine.versions.get("jax") else ()
    begun = time.monotonic()
    last_words = launcher.try_out(modules, environ)
    return ZygoteStart(modules, last_words, time.monotonic() - begun)


# -- what jobs left --------------------------------------------------------------------------------


def traces(store: LocalStore, now: float) -> Traces:
    """Look for what jobs left in the store, in the folder for temporary files, and among the
    processes."""
    found, damaged = _references(store)
    here = [ref for ref in found if ref.backend == HERE.backend]
    return Traces(
        jobs=tuple(_jobs(store, here, now)),
        processes=tuple(_processes()),
        scraps=(*_writes(store, now), *_find_unfinished(store, now), *_socket_folders(now)),
        damaged=(*damaged, *(fault for ref in found for fault in _find_damage(store, ref))),
    )


def _references(store: LocalStore) -> tuple[list[JobRef], list[tuple[str, str]]]:
    found, damaged = [], []
    for job_id in index.ids(store):
        try:
            found.append(index.find(store, job_id))
        except NotFound:
            continue  # removed since
        except KineticError as fault:
            damaged.append((str(store.path(layout.JobKeys(job_id).ref)), str(fault)))
    return found, damaged


def _find_damage(store: LocalStore, ref: JobRef) -> Iterator[tuple[str, str]]:
    for key, read in (
        (layout.JobKeys(ref.job_id).plan, Plan.read),
        (layout.JobKeys(ref.job_id).outcome, Outcome.read),
    ):
        try:
            read(store.get(key))
        except (NotFound, UnsupportedVersion):
            continue
        except (KineticError, TypeError, AttributeError) as fault:
            yield str(store.path(key)), str(fault)


def _jobs(store: LocalStore, refs: Sequence[JobRef], now: float) -> Iterator[LocalJob]:
    backend = registry.make(HERE, store)
    judged = has_many(store, [layout.JobKeys(ref.job_id).outcome for ref in refs])
    open_ = [ref for ref in refs if layout.JobKeys(ref.job_id).outcome not in judged]
    known = backend.status(open_) if open_ else {}
    for ref in refs:
        has_verdict = ref.job_id not in known
        has_ended = has_verdict or (
            known[ref.job_id].phase.ended and now - ref.created_at >= SETTLED_S
        )
        goes_on = _has_processes(backend, ref) or not has_ended
        left = () if goes_on else tuple(_find_leftovers(store, ref, now))
        yield LocalJob(ref.job_id, ref.created_at, has_verdict, goes_on, left)


def _has_processes(backend: Backend, ref: JobRef) -> bool:
    return isinstance(backend, Processes) and backend.processes(ref) is not None


def _find_leftovers(store: LocalStore, ref: JobRef, now: float) -> Iterator[str]:
    """Files of a running job that are still there."""
    local = store.path(f"{layout.JobKeys(ref.job_id).prefix}/local")
    return (str(local / name) for name in _OF_A_RUNNING_JOB if _is_old(local / name, now))


def _is_old(path: Path, now: float) -> bool:
    with contextlib.suppress(OSError):
        return now - path.lstat().st_mtime >= SETTLED_S
    return False


def _writes(store: LocalStore, now: float) -> Iterator[Scrap]:
    with contextlib.suppress(OSError):
        for entry in (Path(store.uri) / ".tmp").iterdir():
            yield Scrap(str(entry), now - entry.lstat().st_mtime, is_write=True)


def _find_unfinished(store: LocalStore, now: float) -> Iterator[Scrap]:
    """Folders of jobs whose submission was killed before it wrote their reference."""
    folders_there = set(store.parts(layout.JOBS))
    for job_id in sorted(folders_there.difference(index.ids(store))):
        folder = store.path(layout.JobKeys(job_id).prefix)
        with contextlib.suppress(OSError):
            if not locks.is_record_held(folder / "local" / "lock"):
                yield Scrap(str(folder), now - folder.lstat().st_mtime)


def _socket_folders(now: float) -> Iterator[Scrap]:
    """Folders that supervisors made because their job's path was too long for a socket, and in
    which no process listens."""
    for entry in Path(tempfile.gettempdir()).glob("kinetic-*"):
        with contextlib.suppress(OSError):
            facts = entry.lstat()
            mine = facts.st_uid == os.geteuid() and entry.is_dir() and not entry.is_symlink()
            if (
                mine
                and {p.name for p in entry.iterdir()} <= {"socket"}
                and not _listens(entry / "socket")
            ):
                yield Scrap(str(entry), now - facts.st_mtime)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # unknown: assume it does
        return True


def _job_of(environ: bytes) -> str:
    """Return the id of the job whose function started the program with this environment, or ""."""
    values = dict(each.split(b"=", 1) for each in environ.split(b"\0") if b"=" in each)
    return values.get(b"KINETIC_JOB_ID", b"").decode(errors="replace")


def _processes() -> Iterator[Process]:
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            command = processes.command_line(pid).replace(b"\0", b" ").decode(errors="replace")
            if processes.owner(pid) != os.geteuid():
                continue
            if title := _TITLE.match(command):
                role = title[1] if title[3] is None else f"{title[1]} {title[3]}"
                yield Process(pid, role, title[2], processes.age_s(pid))
            elif job_id := _job_of(processes.environ(pid)):
                yield Process(pid, "a program of the function", job_id, processes.age_s(pid))
