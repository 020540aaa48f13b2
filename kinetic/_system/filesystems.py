"""On which file system a path lies.

In: a path. Out: whether other machines may have it mounted, too; whether it is in memory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

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


def is_shared(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether locks of this kernel may not keep out all who can write there: the path, or the
    nearest folder above that exists, is on a file system of a network or of a program."""
    return _kind(path, mounts).startswith(_SHARED)


def is_in_memory(path: Path, mounts: Path = _MOUNTS) -> bool:
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
