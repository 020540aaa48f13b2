"""Facts about this machine: processors and memory within a container's limits, its loopback
interface, its identity, and the file systems of folders."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_CONNECT_S = 5.0
"""Seconds to wait for a connection: the kernel answers at once, unless packets are dropped."""
_WITHOUT_LOOPBACK = (errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EPERM)
_SHARED = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "ceph",
    "lustre",
    "gpfs",
    "9p",
    "virtiofs",
    "afs",
    "gluster",
)
_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")


def usable_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of processors that this process may use, by its affinity and its
    container's quota."""
    count = cores()
    with contextlib.suppress(OSError, ValueError):
        used_us, period_us = map(int, quota.read_text().split())  # ValueError for "max": no quota
        return max(1, min(count, round(used_us / period_us)))
    return count


def cores() -> int:
    """Return the number of processors that this process may use, without regard to a quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hash_instructions() -> str:
    """Return a digest of the instruction set of this machine's processors, as far as it is known.
    Machine code for one set may crash with another."""
    import hashlib  # Few processes need it.

    text = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return hashlib.sha256(f"{os.uname().machine} {text}".encode()).hexdigest()[:16]


def available_memory_bytes() -> int | None:
    """Return the bytes of memory that new processes could get now; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
                return min(free, _read_group_headroom() or free)
    return None


def loopback_fault() -> str:
    """Return why programs on this machine cannot connect over 127.0.0.1; "" if they can."""
    import socket  # A list of running jobs does not need it.

    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.settimeout(_CONNECT_S)
            client.connect(server.getsockname())
    except TimeoutError:
        return "connections to it are not answered"
    except OSError as error:
        # Other errors, such as a lack of descriptors, do not mean that loopback fails.
        return os.strerror(error.errno) if error.errno in _WITHOUT_LOOPBACK else ""
    return ""


def boot_id() -> str:
    """Return an id of this boot of the machine, the same in all its containers; "" if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def container_id() -> str:
    """Return an id of this boot of the machine and of this process's PID namespace; "" if unknown.
    Processes with equal ids can see each other's process ids."""
    with contextlib.suppress(OSError):
        return f"{boot_id()}-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    return ""


def _read_group_headroom() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return max(0, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return None


def is_shared_folder(path: Path, mounts: Path = _MOUNTS) -> bool:
    """True if the path is on a network file system or FUSE, so that the kernel's locks may not keep
    out every writer. The path need not exist."""
    return _find_file_system(path, mounts).startswith(_SHARED)


def is_memory_folder(path: Path, mounts: Path = _MOUNTS) -> bool:
    """True if the path is on a file system in this machine's memory."""
    return _find_file_system(path, mounts) in _IN_MEMORY


def _find_file_system(path: Path, mounts: Path) -> str:
    """Return the type of a path's file system; "" if unknown."""
    real = os.path.realpath(path)
    kind, longest = "", -1
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in mounts.read_text().splitlines():
            fields = line.split()
            point = fields[4].encode().decode("unicode_escape")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:  # A later mount hides earlier ones.
                kind, longest = fields[fields.index("-") + 1], len(point)
    return kind
