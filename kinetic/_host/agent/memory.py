"""The memory limit of a process, and the victims of the kernel's out-of-memory killer.

The numbers come from the process's control group (v2, or the memory controller of v1), which counts
its victims; without a control group, from the counters of the machine.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from kinetic._core.values import dataclass

_UNLIMITED_BYTES = 1 << 60
"""A limit from here on means unlimited: v1 writes a huge number, v2 "max"."""


@dataclass(frozen=True)
class MemoryVerdict:
    """The kernel's counters compared with those from the start of a process.

    Attributes:
        struck: the out-of-memory killer has struck in the process's control group since, or on the
            machine if there is no group.
        limit_bytes: memory that the process could use at most; 0 if unknown.
    """

    struck: bool = False
    limit_bytes: int = 0


class Watch:
    """Watches a process from its start on, and counts the killer's victims in each control group
    that the process has been in."""

    def __init__(self, pid: int, *, root: Path = Path("/")) -> None:
        self._pid = pid
        self._root = root
        self._before: dict[Path, int] = {}
        self.read_group()
        # Read only without a group: it is a long file.
        self._machine_before = 0 if self._before else self._machine_kills()

    def read_group(self) -> None:
        """Read the process's control group, which may have changed, and remember the count of a new
        one. Cheap enough for every heartbeat."""
        for folder in self._groups():
            if (kills := _read_kills(folder)) is not None:
                self._before.setdefault(folder, kills)
                return

    def verdict(self) -> MemoryVerdict:
        """Compare the counters now with those at the start."""
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
        """List the folders that may be the control group's; the first with a counter is right."""
        mount = self._root / "sys/fs/cgroup"
        folders = []
        with contextlib.suppress(OSError):
            for line in (self._root / f"proc/{self._pid}/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if not controllers:
                    folders += [
                        mount / path.lstrip("/"),
                        mount / "unified" / path.lstrip("/"),
                        mount,
                    ]
                elif "memory" in controllers.split(","):
                    folders += [mount / "memory" / path.lstrip("/"), mount / "memory"]
        return folders

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
