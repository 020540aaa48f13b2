"""The folders of jobs whose hosts are programs: the programs' credentials, process ids and output.

In: the folder of all. Out: whether a job's folder is in use; the folders that are not. They stay
until a job is looked at or cleaned up, which may be never.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kinetic._config import settings
from kinetic._system import locks

LOCK = "alive"
"""The file whose lock all processes of a job inherit."""
SETTLED_S = 60.0
"""A folder is created before its lock is held."""


def root() -> Path:
    """Return the folder that contains them all."""
    return settings.load().cache_dir / "programs"


def is_used(folder: Path) -> bool:
    """Whether any host's process is left."""
    return locks.is_held(folder / LOCK)


def was_begun(folder: Path) -> bool:
    """Whether the lock has ever been held."""
    try:
        return (folder / LOCK).stat().st_size > 0
    except OSError:
        return False


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[int]:
    """A descriptor with a lock that is free once all processes that inherited it have closed it."""
    fd = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.hold(fd)
        os.write(fd, b"held\n")  # An empty file means that nothing was started yet.
        yield fd
    finally:
        os.close(fd)


def find_unused(of_all: Path, *, before: float) -> Iterator[tuple[Path, float]]:
    """Yield the folders that no process uses and that have not changed since `before` (seconds
    since the epoch), and when each changed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for folder in sorted(of_all.iterdir()):
            with contextlib.suppress(OSError):
                changed_at = folder.lstat().st_mtime
                if changed_at < before and not is_used(folder):
                    yield folder, changed_at
