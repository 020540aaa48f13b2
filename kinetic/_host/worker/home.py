"""A folder in memory for each simulated host, at a path that all hosts of the gang share.

In: where the folder lies, where it is to appear. Out: a mount namespace of this process's own;
nothing, where the machine does not allow that.

Programs keep local checkpoints at one path on all hosts. As in the ramdisk of GKE's multi-tier
checkpointing, a file in the folder says which process of JAX this host is: programs that keep
checkpoints there read it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic._host.worker.joining import World
from kinetic._store import files
from kinetic._system import memory_folder


@dataclass(frozen=True)
class Home:
    """Of one host.

    Attributes:
        folder: where its own folder lies.
        place: where it appears; the same for all hosts.
        host: its index.
        hosts: how many there are.
    """

    folder: str
    place: str
    host: int
    hosts: int

    @property
    def is_shared(self) -> bool:
        """Whether the machine is that of other hosts, too."""
        return self.hosts > 1

    def variables(self, *, moved_in: bool) -> dict[str, str]:
        """Return what the function is told."""
        return {"KINETIC_LOCAL_DIR": self.place if moved_in else self.folder}

    def tell(self, world: World) -> None:
        """Write this process's place in this attempt's world of JAX; what an earlier attempt wrote
        there is never seen.

        Raises:
            OSError: it cannot be written, for example because the memory is full.
        """
        file = Path(self.folder, memory_folder.JAX_INIT_INFO)
        file.unlink(missing_ok=True)
        file.write_text(f"{world.process}\n{world.coordinator}\n")

    def explain(self, error: OSError) -> str:
        """Say why it cannot be written, and what to do; in the same words on all hosts."""
        free = "free some, or " if error.errno in files.FULL else ""
        folder = Path(self.folder).parent if self.is_shared else self.folder
        return (
            f"The folder of local files {folder} cannot be written: {error.strerror or error}. To "
            f"do: {free}set KINETIC_LOCAL_DIR in env= to another folder."
        )


def enter(home: Home) -> bool:
    """Move this process, which has no threads, into the home of its host; return whether that is
    possible here."""
    from kinetic._host.worker import mounts  # a job of one host does without

    with contextlib.suppress(OSError):
        in_user_namespace = mounts.unshare()
        try:
            mounts.bind(home.folder, home.place)
        finally:
            if in_user_namespace:
                mounts.drop_capabilities()
        return True
    return False
