"""The local folder of a host: for simulated hosts a folder in memory, which appears at the same
path on all hosts of the gang if the machine allows mounts.

Programs keep local checkpoints at one path on all hosts. A file in the folder contains the host's
index among JAX's processes, as in the ramdisk of GKE's multi-tier checkpointing.
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
    """The local folder of one host.

    Attributes:
        folder: path of the host's own folder.
        place: path at which it appears, the same for all hosts.
        host: index of the host.
        hosts: number of hosts on the machine.
    """

    folder: str
    place: str
    host: int
    hosts: int

    @property
    def is_shared(self) -> bool:
        """True if other hosts run on the same machine."""
        return self.hosts > 1

    def variables(self, *, moved_in: bool) -> dict[str, str]:
        """Return the variable that names the folder for the function. `moved_in`: the folder
        appears at `place`."""
        return {"KINETIC_LOCAL_DIR": self.place if moved_in else self.folder}

    def write_rank(self, world: World) -> None:
        """Write this process's rank in this attempt's world of JAX. First remove the rank of an
        earlier attempt.

        Raises:
            OSError: the file cannot be written, for example because the memory is full.
        """
        file = Path(self.folder, memory_folder.JAX_INIT_INFO)
        file.unlink(missing_ok=True)
        file.write_text(f"{world.process}\n{world.coordinator}\n")

    def explain(self, error: OSError) -> str:
        """Return a message about a folder that cannot be written. It is the same on all hosts."""
        free = "Free some space, or set" if error.errno in files.FULL else "Set"
        folder = Path(self.folder).parent if self.is_shared else self.folder
        return (
            f"The folder of local files {folder} cannot be written: {error.strerror or error}. "
            f"{free} KINETIC_LOCAL_DIR in env= to another folder."
        )


def enter(home: Home) -> bool:
    """Bind the host's folder to its shared path, for this process alone, which must have no
    threads. Return False if the machine does not allow it."""
    from kinetic._host.worker import mounts  # A job of one host does not need it.

    with contextlib.suppress(OSError):
        in_user_namespace = mounts.unshare()
        try:
            mounts.bind(home.folder, home.place)
        finally:
            if in_user_namespace:
                mounts.drop_capabilities()
        return True
    return False
