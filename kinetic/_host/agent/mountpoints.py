"""Empty folders to mount on, where the function may want to create files beside the mount; removed
with the last job that uses them.

In: the paths of a job's volumes. Out: folders (or empty files) that are kept, later removed.

Most missing paths are created in the worker's memory only (see `mounts`). That would lose what a
function writes beside the mount, so where it may write, a real folder is created. It is recorded
beside the data of this machine, with its inode and the time of its last change: if another program
has used or replaced it since, it is dropped from the record and never removed. A job that uses a
mount point holds a lock on it, because removing it would remove the mount, too. Leftovers of a
killed job are removed by the next job with volumes.
"""

# ruff: noqa: PTH102, PTH106, PTH108, PTH120

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kinetic._core.plan import Dataset
from kinetic._datasets import cached_copy
from kinetic._store import files
from kinetic._system import locks
from kinetic.errors import StoreError

RECORD = "mountpoints.json"
"""In the root folder: the stamp of each path that was created."""


_NEW = "made after "
"""Before the time, in nanoseconds, when a path was about to be made."""
_MAKING_NS = 5 * 10**9
"""How long that may take: what appears later is somebody else's."""


class Mountpoints:
    """The mount points that a host keeps. `root` is the folder whose lock all hosts of this machine
    share."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: list[int] = []

    def keep(self, data: Sequence[Dataset]) -> None:
        """Create and keep the missing paths that can be created.

        Raises:
            OSError, StoreError: the disk is full.
        """
        volumes = [each for each in data if each.mount]
        if not volumes:
            return
        with cached_copy.hold_lock(self._root):
            made = self._sweep_unused()
            try:
                for each in volumes:
                    path = os.path.realpath(each.mount)
                    if not os.path.lexists(path):
                        self._make(path, each.is_dir, made)
                    if _is_ours(path, made):
                        descriptor = _open_nofollow(path)
                        self._held.append(descriptor)
                        locks.hold(descriptor, shared=True)
            finally:
                self._write(made)

    def release(self, data: Sequence[Dataset]) -> None:
        """Release the paths; remove those that no other job uses, if possible."""
        if not any(each.mount for each in data):
            return
        with suppress(OSError, StoreError), cached_copy.hold_lock(self._root):
            while self._held:
                os.close(self._held.pop())
            self._write(self._sweep_unused())

    def _sweep_unused(self) -> dict[str, str]:
        """Remove what no job uses, and return the remaining records. The caller holds the lock."""
        made = self._read()
        left = {path: stamp for path, stamp in made.items() if _is_ours(path, made)}
        for path in sorted(left, reverse=True):  # what lies in a folder before the folder
            with suppress(OSError):  # something is in it
                descriptor = _open_nofollow(path)
                try:
                    if locks.try_hold(descriptor):  # else another job keeps it
                        self._remove(path, left)
                finally:
                    os.close(descriptor)
        return left

    def _remove(self, path: str, left: dict[str, str]) -> None:
        """Remove a path from the file system and the records. That changes the folder above it: who
        is killed meanwhile leaves a record of that in which any change is ours."""
        above, stamp = os.path.dirname(path), None
        if _is_ours(above, left):
            stamp = left[above]
            left[above] = _any_change_of(stamp)
            self._write(left)
        try:
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
            del left[path]
            stamp = stamp and _stamp(above)
        finally:
            left |= {above: stamp} if stamp else {}

    def _make(self, path: str, is_dir: bool, made: dict[str, str]) -> None:
        """Create the path and the folders above it, unless that is better done in memory. They are
        in the record before: who is killed meanwhile leaves them to the next job."""
        missing, above = [path], os.path.dirname(path)
        while not os.path.lexists(above):
            missing.append(above)
            above = os.path.dirname(above)
        if above == "/" or not os.access(above, os.W_OK | os.X_OK):
            return
        ours = [*missing, *([above] if _is_ours(above, made) else [])]
        self._write(made | {each: _any_change_of(made.get(each, "")) for each in ours})
        try:
            for folder in reversed(missing[1:]):
                os.mkdir(folder, 0o755)
            if is_dir:
                os.mkdir(path, 0o755)
            else:
                Path(path).touch(0o644, exist_ok=False)
        finally:
            made |= {each: stamp for each in ours if (stamp := _stamp(each))}

    def _read(self) -> dict[str, str]:
        try:
            made = json.loads((self._root / RECORD).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return made if isinstance(made, dict) else {}

    def _write(self, made: dict[str, str]) -> None:
        record = self._root / RECORD
        if made:
            files.save(record, [json.dumps(made, indent=1).encode()])
        else:
            record.unlink(missing_ok=True)


def _stamp(path: str) -> str:
    """Changes with any use of the path; "" for anything but a folder or an empty file."""
    try:
        info = os.lstat(path)
    except OSError:
        return ""
    if stat.S_ISDIR(info.st_mode) or (stat.S_ISREG(info.st_mode) and info.st_size == 0):
        return f"{info.st_dev}:{info.st_ino}:{info.st_ctime_ns}"
    return ""


def _is_ours(path: str, made: dict[str, str]) -> bool:
    recorded, stamp = str(made.get(path, "")), _stamp(path)
    if recorded.startswith(_NEW):  # Who was to make it was killed, perhaps afterwards.
        since, changed = recorded.removeprefix(_NEW), stamp.rpartition(":")[2]
        return bool(stamp) and since.isdigit() and abs(int(changed) - int(since)) < _MAKING_NS
    if recorded.endswith(":"):  # Who was to change something in it was killed.
        return stamp.startswith(recorded)
    return path in made and recorded == stamp


def _any_change_of(stamp: str) -> str:
    """Return what is recorded of a path that is about to change, or to be made."""
    return f"{stamp.rpartition(':')[0]}:" if stamp else f"{_NEW}{time.time_ns()}"


def _open_nofollow(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
