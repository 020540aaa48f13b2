"""What the kernel says about a process's memory: its limit, and whether the out-of-memory killer
struck.

In: a process id, from the start of the process on. Out: a `MemoryVerdict`. The numbers come
from the control group that the process is in (v2, or the memory controller of v1), which counts its
victims; only where there is no control group, from the machine's counters.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from kinetic._core.values import dataclass

_UNLIMITED_BYTES = 1 << 60
"""A limit from here on means unlimited: v1 writes a huge number, v2 "max"."""


@dataclass(frozen=True)
class MemoryVerdict:
    """What is known when a process is gone.

    Attributes:
        struck: whether the out-of-memory killer struck meanwhile in the process's control group
            (else: on the machine).
        limit_bytes: what it could use at most; 0 if unknown.
    """

    struck: bool = False
    limit_bytes: int = 0


class Watch:
    """Remembers how often the killer had struck in each control group when the process was first
    seen there."""

    def __init__(self, pid: int, *, root: Path = Path("/")) -> None:
        self._pid = pid
        self._root = root
        self._before: dict[Path, int] = {}
        self.look()
        # Asked only where there is no group: it is a long list.
        self._machine_before = 0 if self._before else self._machine_kills()

    def look(self) -> None:
        """See in which group the process is: it may have been moved. Cheap enough for every
        heartbeat."""
        for folder in self._groups():
            if (kills := _read_kills(folder)) is not None:
                self._before.setdefault(folder, kills)
                return

    def verdict(self) -> MemoryVerdict:
        """Compare with the counters now."""
        limits = [self._number("proc/meminfo", "MemTotal:") * 1024]
        for folder in self._before:
            limits += [_limit(above) for above in (folder, *folder.parents)]
        struck = any((_read_kills(folder) or 0) > before for folder, before in self._before.items())
        if not self._before:
            struck = self._machine_kills() > self._machine_before
        return MemoryVerdict(
            struck, min((n for n in limits if 0 < n < _UNLIMITED_BYTES), default=0)
        )

    def _groups(self) -> list[Path]:
        """Where the process's control group may be; the first that counts is the one."""
        mount = self._root / "sys/fs/cgroup"
        places = []
        with contextlib.suppress(OSError):
            for line in (self._root / f"proc/{self._pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if not controllers:
                    places += [
                        mount / path.lstrip("/"),
                        mount / "unified" / path.lstrip("/"),
                        mount,
                    ]
                elif "memory" in controllers.split(","):
                    places += [mount / "memory" / path.lstrip("/"), mount / "memory"]
        return places

    def _machine_kills(self) -> int:
        return self._number("proc/vmstat", "oom_kill")

    def _number(self, file: str, field: str) -> int:
        return _field(self._root / file, field) or 0


def _read_kills(folder: Path) -> int | None:
    counts = (_field(folder / name, "oom_kill") for name in ("memory.events", "memory.oom_control"))
    return next((n for n in counts if n is not None), None)


def _limit(folder: Path) -> int:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" means unlimited.
            return int((folder / name).read_text())
    return 0


def _field(file: Path, field: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(file) as lines:
        for line in lines:
            if line.split()[:1] == [field]:
                return int(line.split()[1])
    return None
