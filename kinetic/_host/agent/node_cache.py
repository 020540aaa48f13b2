"""The folder that the pods of a node share: data that one job has fetched is there for the next.

In: the name of the content. Out: a folder for its copies, which no pod sweeps while this process
lives; or its content, in there.

What is in the folder, and how long it stays, is up to the bootstrap (`_host.bootstrap`): its size
is limited, and content from before the node's last start is not trusted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kinetic._host.identity import Identity
from kinetic.errors import StoreFull

_NAME_DIGITS = 24
_MOST_GB = 20.0


def provide_copy(
    identity: Identity, name: str, what: str, aside: Path, provide: Callable[[Path], Path]
) -> Path:
    """Return what `provide` makes of a folder of copies: the node's if its pods share one, else the
    host's own.

    Args:
        identity: the host.
        name: of the content or of its source, in hex digits.
        what: the same for people.
        aside: the host's own folder of copies.
        provide: fetches what the folder lacks.
    """
    if not identity.cache:
        return provide(aside)
    from kinetic._host import bootstrap  # only pods need it

    try:
        folder = _hold_folder(f"{identity.cache}/data-{name[:_NAME_DIGITS]}", what)
        before = set(os.listdir(folder))
    except OSError:  # read-only, or another user's
        return provide(aside)
    try:
        made = provide(folder)
    except StoreFull:
        if not bootstrap.sweep(0):
            raise
        made = provide(folder)
    if before != set(os.listdir(folder)):
        with suppress(OSError):  # another pod sweeps, too
            bootstrap.sweep(_most_bytes(bootstrap.ENV.get("KINETIC_POD_CACHE_GB", "")))
    return made


def _hold_folder(folder: str, what: str) -> Path:
    """Create the folder if needed, and lock it for as long as this process lives."""
    from kinetic._host import bootstrap

    while True:
        lock = bootstrap.lock_folder(folder, fcntl.LOCK_SH, what)
        if bootstrap.is_complete(folder):
            os.utime(f"{folder}/complete")
            return Path(folder)
        os.close(lock)
        lock = bootstrap.lock_folder(folder, fcntl.LOCK_EX, what)
        if not bootstrap.is_complete(folder):
            bootstrap.complete(folder, os.makedirs)
        os.close(lock)


def _most_bytes(limit_gb: str) -> float:
    with suppress(ValueError):
        return float(limit_gb) * 1e9
    return _MOST_GB * 1e9
