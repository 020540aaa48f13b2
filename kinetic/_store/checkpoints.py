"""What lies in a folder of checkpoints, or in one of a bucket: read without Orbax.

In: a path or URI. Out: steps, committed or not; what is known of a step; fewer steps.

In a folder a step has its name when it is whole; in a bucket it is written in place, and whole once
it has the marker of its commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic.errors import NotFound

_MARKER = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"
_RECORD, _METRICS, _ABOUT = "kinetic/metadata", "metrics/metrics", "_CHECKPOINT_METADATA"
_BELOW = "checkpoints"
"""Where a job's checkpoints lie below its output folder."""


@dataclass(frozen=True)
class Step:
    """A checkpoint.

    Attributes:
        name: of its folder.
        step: of the training.
        is_committed: whether it is whole; else a save is going on there, or was cut off.
        size_bytes: of all its files.
        saved_at: seconds since the epoch; None where that is not known.
        job_id: that has saved it; "" where that is not known.
        hosts: of that job; 0 where that is not known.
        metrics: that were saved with it.
        leaves: of the state, as `kinetic.Checkpointer` has described them; None for others'.
        positions: how many positions of iterators it has.
    """

    name: str
    step: int
    is_committed: bool
    size_bytes: int
    saved_at: float | None = None
    job_id: str = ""
    hosts: int = 0
    metrics: dict[str, float] | None = None
    leaves: tuple[dict[str, Any], ...] | None = None
    positions: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        known = dict(vars(self))
        return known | {"leaves": None if self.leaves is None else list(self.leaves)}


class Checkpoints:
    """The checkpoints of a training.

    Args:
        where: a path or URI: of the checkpoints, or of the output folder that has them below.
    """

    def __init__(self, where: str) -> None:
        self.where = where.rstrip("/") or where
        self._store = _opened(self.where)
        self._keys = self._listed()
        below = f"{_BELOW}/"
        if not self._names() and any(key.startswith(below) for key in self._keys):
            self.where = f"{self.where}/{_BELOW}"
            self._store = _opened(self.where)
            self._keys = self._listed()

    def _listed(self) -> list[str]:
        return list(self._store.list(""))

    def steps(self) -> list[Step]:
        """Return them all, oldest step first.

        Raises:
            NotFound: there is no such folder.
        """
        folder = self._store.as_folder()
        if not self._keys and (folder is None or not folder.is_dir()):
            raise NotFound(
                f"There is nothing at {self.where}. Name the folder that `kinetic.Checkpointer` "
                "wrote to, or the output folder of its job (`kinetic jobs status` shows it)."
            )
        found = [self._step(name) for name in self._names()]
        return sorted(found, key=lambda each: (each.step, each.name))

    def step(self, number: int | None) -> Step:
        """Return a committed step; without a number, the newest one.

        Raises:
            NotFound: there is none.
        """
        there = [each for each in self.steps() if each.is_committed]
        wanted = [each for each in there if number in (None, each.step)]
        if not wanted:
            steps = ", ".join(str(each.step) for each in there) or "none"
            what = "no committed checkpoint" if number is None else f"no checkpoint {number}"
            raise NotFound(f"There is {what} at {self.where}; committed steps: {steps}.")
        return wanted[-1]

    def remove(self, steps: Iterable[Step]) -> None:
        """Remove steps; each is not committed any more before its files go."""
        folder = self._store.as_folder()
        for each in steps:
            if folder is None:
                self._store.delete(f"{each.name}/{_MARKER}")
                self._store.delete(each.name)
                continue
            path = folder / each.name
            if _UNFINISHED not in each.name:
                away = path.with_name(f"{each.name}{_UNFINISHED}-removed-{os.getpid()}")
                with contextlib.suppress(FileNotFoundError):
                    path.rename(away)
                path = away
            shutil.rmtree(path, ignore_errors=True)

    def _names(self) -> list[str]:
        tops = dict.fromkeys(key.partition("/")[0] for key in self._keys if "/" in key)
        return [name for name in tops if _number(name) is not None]

    def _step(self, name: str) -> Step:
        number = _number(name)
        assert number is not None  # of its name
        in_place = self._store.as_folder() is None
        committed = _UNFINISHED not in name and (not in_place or f"{name}/{_MARKER}" in self._keys)
        size = sum(entry.size_bytes for entry in self._store.entries(name))
        if not committed:
            return Step(name, number, False, size)
        record, about = self._document(f"{name}/{_RECORD}"), self._document(f"{name}/{_ABOUT}")
        nanoseconds = about.get("commit_timestamp_nsecs")
        leaves = record.get("leaves")
        return Step(
            name,
            number,
            True,
            size,
            nanoseconds / 1e9 if isinstance(nanoseconds, int) else record.get("saved_at"),
            str(record.get("job_id") or ""),
            int(record.get("hosts") or 0),
            self._document(f"{name}/{_METRICS}") or None,
            None if leaves is None else tuple(leaves),
            len(record.get("data") or ()),
        )

    def _document(self, key: str) -> dict[str, Any]:
        with contextlib.suppress(LookupError, ValueError):
            found = json.loads(self._store.get(key))
            return found if isinstance(found, dict) else {}
        return {}


def _number(name: str) -> int | None:
    digits = name.partition(_UNFINISHED)[0]
    return int(digits) if digits.isdigit() and digits.isascii() else None


def _opened(where: str) -> Store:
    if "://" not in where:
        return LocalStore(Path(where), existing=True)
    from kinetic._store.open import open_store

    return open_store(where)
