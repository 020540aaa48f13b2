"""Whether the local tier has room for two copies of the state, before the first step.

In: each host's folder, its part of the state. Out: nothing, or an error that says how much memory
to ask for.

Hosts may share a file system, as simulated ones share this machine's memory: then it has to hold
the copies of all of them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kinetic._core.checkpoint_size import COPIES, in_gigabytes, quantity, room_for
from kinetic._core.values import dataclass
from kinetic._system import filesystems, machine
from kinetic.errors import CheckpointError


@dataclass(frozen=True)
class Room:
    """What one host has for local checkpoints.

    Attributes:
        folder: for them.
        file_system: equal for hosts that share it.
        part_bytes: of the state, on this host.
        free_bytes: of the file system.
        used_bytes: by earlier checkpoints in the folder, which make way.
    """

    folder: str
    file_system: str
    part_bytes: int
    free_bytes: int
    used_bytes: int


def measure_room(folder: Path, part_bytes: int) -> Room:
    """Return what this host has.

    Raises:
        CheckpointError: the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        usage = os.statvfs(folder)
        device = folder.stat().st_dev
    except OSError as error:
        raise CheckpointError(
            f"The folder for local checkpoints {folder} cannot be used: {error.strerror or error}. "
            "Give local_directory= a folder that this host may write to, or say local_every=None."
        ) from error
    free = usage.f_bavail * usage.f_frsize
    if filesystems.is_in_memory(folder):
        available = machine.available_memory_bytes() or free
        free = min(free, available) if usage.f_blocks else available  # ramfs counts nothing
    return Room(
        str(folder), f"{machine.boot_id()}/{device}", part_bytes, free, _count_used_bytes(folder)
    )


def _count_used_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_blocks * 512
    return total


def check(rooms: Sequence[Room]) -> None:
    """Check that two copies of each host's part fit; `rooms`: of all hosts, in their order.

    Raises:
        CheckpointError: they do not; the same on all hosts.
    """
    for name in dict.fromkeys(room.file_system for room in rooms):
        hosts = [host for host, room in enumerate(rooms) if room.file_system == name]
        sharing = [rooms[host] for host in hosts]
        part = sum(room.part_bytes for room in sharing)
        has = min(room.free_bytes for room in sharing) + sum(room.used_bytes for room in sharing)
        if has < part * COPIES:
            one = len(hosts) == 1
            whose = f"host {hosts[0]}'s part" if one else f"the parts of {len(hosts)} hosts"
            each = quantity(room_for(max(room.part_bytes for room in sharing)))
            raise CheckpointError(
                f"The local tier does not fit: {whose} of the state {'has' if one else 'have'} "
                f"{in_gigabytes(part)}, two copies of {'it' if one else 'them'} need "
                f"{in_gigabytes(part * COPIES)}, and {sharing[0].folder} has {in_gigabytes(has)}. "
                f"Ask for at least {in_gigabytes(room_for(part))} of memory there (on a cluster: "
                f'local_storage="{each}"), or say local_every=None.'
            )
