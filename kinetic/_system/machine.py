"""What this machine has room for: its processors and memory, as far as a container's limits leave
them; whether its programs can talk to each other, and what file system a folder is on.

In: /proc, the limits of the control group, a connection, a path. Out: numbers; what the system
says.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_CONNECT_S = 5.0
"""The kernel answers at once, unless packets are dropped."""
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
    """Return how many processors this process may use: those of its affinity, as far as a
    container's quota leaves them."""
    count = cores()
    with contextlib.suppress(OSError, ValueError):
        used_us, period_us = map(int, quota.read_text().split())  # "max" when there is no quota
        return max(1, min(count, round(used_us / period_us)))
    return count


def cores() -> int:
    """Return how many processors this process may use, whatever its quota."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_bytes() -> int | None:
    """Memory that new processes could get now; None if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
                return min(free, _group_headroom_bytes() or free)
    return None


def loopback_fault() -> str:
    """Why programs here cannot talk to each other over 127.0.0.1; "" if they can."""
    import socket  # not needed for a list of running jobs

    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.settimeout(_CONNECT_S)
            client.connect(server.getsockname())
    except TimeoutError:
        return "connections to it are not answered"
    except OSError as error:
        # Other errors (no descriptors left) say nothing about it.
        return os.strerror(error.errno) if error.errno in _WITHOUT_LOOPBACK else ""
    return ""


def boot_id() -> str:
    """Return what names this machine since its last start, in containers and namespaces, too; ""
    if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def container_id() -> str:
    """Return what names this machine since its last start, and the container: processes for which
    it is equal see each other's ids; "" if unknown."""
    with contextlib.suppress(OSError):
        return f"{boot_id()}-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    return ""


def _group_headroom_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        return max(0, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return None


def is_shared_folder(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether locks of this kernel may not keep out all who can write there: the path, or the
    nearest folder above that exists, is on a file system of a network or of a program."""
    return _kind(path, mounts).startswith(_SHARED)


def is_memory_folder(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether what is written there takes memory of this machine."""
    return _kind(path, mounts) in _IN_MEMORY


def _kind(path: Path, mounts: Path) -> str:
    """The type of the file system; "" if unknown."""
    place = os.path.realpath(path)
    kind, longest = "", -1
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in mounts.read_text().splitlines():
            fields = line.split()
            point = fields[4].encode().decode("unicode_escape")
            inside = place == point or place.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= longest:  # the last of equal ones hides the others
                kind, longest = fields[fields.index("-") + 1], len(point)
    return kind
