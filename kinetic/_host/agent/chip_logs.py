"""Logs that TPU chips leave on a host: stored beside the report of a host that failed.

libtpu writes its logs below TPU_LOG_DIR, by default /tmp/tpu_logs, and locks /tmp/libtpu_lockfile
while a process uses the chips. Both are gone with a pod. Storing them is bounded in size and time,
and never changes how a host is judged.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from kinetic._store.base import Store
from kinetic._system import locks, processes
from kinetic.errors import KineticError

VARIABLE, FOLDER, LOCK = "TPU_LOG_DIR", "/tmp/tpu_logs", Path("/tmp/libtpu_lockfile")
MOST_BYTES = 10 << 20
"""Limit for all hosts of an attempt."""
_MOST_FILES = 20
_LIMIT_S = 3.0


def store_chip_logs(store: Store, prefix: str, folder: str, *, since: float, hosts: int) -> None:
    """Store the ends of the newest logs of chips, waiting for at most `_LIMIT_S` seconds.

    Args:
        store: store of the job.
        prefix: prefix of the keys.
        folder: folder of the logs.
        since: leave out logs that were last written before this time, in seconds since the epoch.
        hosts: number of hosts that share `MOST_BYTES`.
    """

    def put_all() -> None:
        for name, data in _read_logs(Path(folder), since, MOST_BYTES // hosts):
            with contextlib.suppress(KineticError, ValueError):  # The name is no valid key.
                store.put(f"{prefix}/{name}", data)

    thread = threading.Thread(target=put_all, name="kinetic-chip-logs", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)


def _read_logs(folder: Path, since: float, left_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Yield name and end of each log, newest first, then a text about libtpu's lock file."""
    with contextlib.suppress(OSError):
        if LOCK.stat().st_mtime:
            holder = locks.record_holder(LOCK)
            words = b"its holder is unknown"
            if holder:
                words = b"process %d holds it: %s" % (holder, processes.command_line(holder)[:1000])
            yield "libtpu_lockfile.txt", words.replace(b"\0", b" ")
    files = list[tuple[float, Path]]()
    with contextlib.suppress(OSError):
        files = [
            (info.st_mtime, path)
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink() and (info := path.stat()).st_mtime >= since
        ]
    for _, path in sorted(files, reverse=True)[:_MOST_FILES]:
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(path.stat().st_size - left_bytes, 0))
            data = file.read(left_bytes)
            left_bytes -= len(data)
            yield str(path.relative_to(folder)), data
