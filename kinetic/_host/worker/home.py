"""What makes a simulated host look like a machine of its own: a hostname, and a folder in memory at
a path that all hosts of the gang share.

In: where the folder lies, where it is to appear. Out: namespaces of this process's own; nothing,
where the machine does not allow that.

Programs name files after the host (profiles, event files), which collide where all have one name;
and they keep local checkpoints at one path on all hosts. The name resolves to this machine, because
gloo and others look themselves up. As in the ramdisk of GKE's multi-tier checkpointing, a file in
the folder says which process of JAX this host is: programs that keep checkpoints there read it.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from kinetic._core.values import dataclass
from kinetic._host.worker.joining import World
from kinetic._store import files
from kinetic._system import memory_folder

HOSTS_FILE = Path("/etc/hosts")
_MOST_LETTERS = 50
"""Of a machine's name; the kernel takes 64."""


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


def enter(home: Home, scratch: str) -> bool:
    """Move this process, which has no threads, into the home of its host; return whether that is
    possible here. `scratch` is a folder of the host's own."""
    from kinetic._host.worker import mounts  # a job of one host does without

    with contextlib.suppress(OSError):
        in_user_namespace = mounts.unshare(mounts.CLONE_NEWUTS)
        try:
            mounts.bind(home.folder, home.place)
            _take_name(home, scratch)
        finally:
            if in_user_namespace:
                mounts.drop_capabilities()
        return True
    return False


def _take_name(home: Home, scratch: str) -> None:
    """Take a name for each host, but none that does not resolve."""
    machine = socket.gethostname().partition(".")[0][:_MOST_LETTERS]
    names = [f"{machine}-{host}" for host in range(home.hosts)]
    with contextlib.suppress(OSError):
        _resolve_names(names, scratch)
        socket.sethostname(names[home.host])


def _resolve_names(names: list[str], scratch: str) -> None:
    """Have the names of all hosts resolve to this machine."""
    from kinetic._host.worker import mounts

    known = HOSTS_FILE.read_text(errors="surrogateescape")
    extended = Path(scratch) / "hosts"
    lines = "".join(f"127.0.0.1 {name}\n" for name in names)
    extended.write_text(f"{known.rstrip()}\n{lines}", errors="surrogateescape")
    os.chmod(extended, 0o644)  # noqa: PTH101
    mounts.bind(str(extended), str(HOSTS_FILE))
