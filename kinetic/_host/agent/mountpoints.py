"""Empty folders for mounts to hang on, where the function may want to create files beside them;
gone when the last job is.

In: the paths of a job's volumes. Out: folders (or empty files) that are kept, later removed.

Most missing paths are made in the worker's memory only (see `mounts`). That would lose what a
function writes beside the mount, so where it could write there is a real folder meanwhile. One of
ours is told from one of the user's by being empty and by its time stamp, an impossible one: any use
by others changes it, and it is never removed then. Who uses one holds a lock on it, because
removing it would take the mount away from other jobs.
"""

# ruff: noqa: PTH102, PTH106, PTH108, PTH120

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kinetic._core.plan import Dataset
from kinetic._datasets import cached_copy

_MARK_NS = 1_000_000_000
"""Time of the last change of what we made: one second into 1970."""


class Mountpoints:
    """The mount points that a host keeps. `root` is the folder whose lock all hosts of this machine
    share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: list[int] = []

    def keep(self, data: Sequence[Dataset]) -> None:
        """Make and keep what is missing and can be made.

        Raises:
            OSError: the disk does not take it.
        """
        volumes = [each for each in data if each.mount]
        if volumes:
            with cached_copy.locked(self._root):
                for each in volumes:
                    self._keep(os.path.realpath(each.mount), each.is_dir)

    def _keep(self, path: str, is_dir: bool) -> None:
        if not os.path.lexists(path):
            _make(path, is_dir)
        if _is_ours(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            self._held.append(descriptor)

    def release(self, data: Sequence[Dataset]) -> None:
        """Give up what was kept; remove what no other job keeps. What cannot be removed stays."""
        volumes = [os.path.realpath(each.mount) for each in data if each.mount]
        if not volumes:
            return
        with suppress(OSError), cached_copy.locked(self._root):
            while self._held:
                os.close(self._held.pop())
            for path in volumes:
                with suppress(OSError):
                    _remove(path)


def _make(path: str, is_dir: bool) -> None:
    """Make the path and the folders above it, unless that is better done in memory."""
    missing, above = [path], os.path.dirname(path)
    while not os.path.lexists(above):
        missing.append(above)
        above = os.path.dirname(above)
    if above == "/" or not os.access(above, os.W_OK | os.X_OK):
        return
    ours = [*missing, *([above] if _is_ours(above) else [])]
    for folder in reversed(missing[1:]):
        os.mkdir(folder, 0o755)
    if is_dir:
        os.mkdir(path, 0o755)
    else:
        Path(path).touch(0o644, exist_ok=False)
    for each in ours:
        _mark(each)


def _mark(path: str) -> None:
    os.utime(path, ns=(_MARK_NS, _MARK_NS))


def _is_ours(path: str) -> bool:
    try:
        info = os.lstat(path)
    except OSError:
        return False
    return info.st_mtime_ns == _MARK_NS and (
        stat.S_ISDIR(info.st_mode) or (stat.S_ISREG(info.st_mode) and info.st_size == 0)
    )


def _remove(path: str) -> None:
    """Remove one of ours that nobody keeps, and those above it that hold nothing else."""
    if not _is_ours(path):
        return
    above = os.path.dirname(path)
    ours_above = _is_ours(above)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
    finally:
        os.close(descriptor)
    if ours_above:
        _mark(above)
        _remove(above)
