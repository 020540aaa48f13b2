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
from kinetic._store import checkpoint_layouts as layouts
from kinetic._store import lease
from kinetic._store.base import Store
from kinetic._store.checkpoint_layouts import UNFINISHED, Layout
from kinetic._store.local import LocalStore
from kinetic.errors import NotFound

_MARKER = "commit_success.txt"
_RECORD, _METRICS, _ABOUT = "kinetic/metadata", "metrics/metrics", "_CHECKPOINT_METADATA"
_BELOW = "checkpoints"
"""Where a job's checkpoints lie below its output folder."""
_TRAINING = "kinetic-training"
"""Beside the steps: what tells a training from one that was in this folder before."""


@dataclass(frozen=True)
class Step:
    """A checkpoint.

    Attributes:
        name: of its folder; "" where that is the folder that was asked for.
        step: of the training; -1 where it has no number.
        is_committed: whether it is whole; else a save is going on there, or was cut off.
        size_bytes: of all its files.
        saved_at: seconds since the epoch; None where that is not known.
        job_id: that has saved it; "" where that is not known.
        hosts: of that job; 0 where that is not known.
        metrics: that were saved with it.
        leaves: of the state, as `kinetic.Checkpointer` has described them; None for others'.
        positions: how many positions of iterators it has.
        layout: which program has written it, and what lies where.
        is_message: whether it is a file of flax.training.
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
    layout: Layout = Layout("")
    is_message: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        known = dict(vars(self))
        layout = known.pop("layout")
        known["program"] = layout.program or "kinetic"
        known["items"] = [*layout.trees, *layout.others]
        return known | {"leaves": None if self.leaves is None else list(self.leaves)}


class Checkpoints:
    """The checkpoints of a training.

    Args:
        where: a path or URI: of the checkpoints, or of the output folder that has them below.
    """

    def __init__(self, where: str) -> None:
        self.where = where.rstrip("/") or where
        self._look()
        below = f"{_BELOW}/"
        if not self._is_known and any(key.startswith(below) for key in self._keys):
            self.where = f"{self.where}/{_BELOW}"
            self._look()

    def _look(self) -> None:
        self._store = _open_existing(self.where)
        self._keys = list(self._store.list(""))
        self._files: dict[str, list[str]] = {}
        for key in self._keys:
            top, below, rest = key.partition("/")
            self._files.setdefault(top, []).extend([rest] if below else [])
        self._messages = {
            top
            for top, files in self._files.items()
            if not files and layouts.number_of(top) is not None and self._is_message(top)
        }
        self._names = [
            top
            for top, files in self._files.items()
            if top in self._messages or (files and self._is_step(top))
        ]
        if layouts.is_one(self._keys, has_steps=bool(self._names)):
            self._names = [""]

    def _is_message(self, name: str) -> bool:
        folder = self._store.as_folder()
        if folder is None:
            return layouts.is_message(name, b"\x80")  # It would have to be read whole.
        try:
            with (folder / name).open("rb") as file:
                return layouts.is_message(name, file.read(1))
        except OSError:
            return False

    def _is_step(self, name: str) -> bool:
        """Whether a folder is one of a step: by its number alone, or by what is in it, too."""
        if layouts.number_of(name) is None:
            return False
        return name[0].isdigit() or bool(layouts.layout_of(name, self._files[name]).trees)

    @property
    def _is_known(self) -> bool:
        """Whether this is a folder of checkpoints, for certain: others have folders with numbers,
        too, such as one of each host."""
        layouts_here = (layouts.layout_of(name, self._files[name]) for name in self._names if name)
        return (
            self.is_one
            or self.has_owner
            or bool(self._messages)
            or any(each.program != layouts.ANOTHER for each in layouts_here)
        )

    @property
    def is_one(self) -> bool:
        """Whether this is the folder of one checkpoint, not of many."""
        return self._names == [""]

    @property
    def program(self) -> str:
        """Whose checkpoints these are: the name of another program; "" for kinetic, and where there
        are none. A folder that a job has owned is kinetic's, until there is a step of another."""
        if self.is_one:
            return layouts.layout_of("", self._keys).program or "kinetic"
        if not self._names:
            other = layouts.other_program(self.where, self._keys)
            return other[0] if other and not self.has_owner else ""
        steps = [self._step(name) for name in self._names]
        if not all(each.layout.program for each in steps):
            return ""
        if not any(each.is_committed for each in steps) and self.has_owner:
            return ""
        return steps[-1].layout.program

    @property
    def has_owner(self) -> bool:
        """Whether kinetic has noted here who writes."""
        return any(key in (lease.RECORD, lease.KEY) for key in self._keys)

    def lines(self, step: Step | None = None) -> list[str]:
        """Return the lines of Python that read a step, or what another program has left."""
        if step is None:
            other = layouts.other_program(self.where, self._keys)
            return other[1] if other else []
        if step.layout.program == layouts.ANOTHER:
            return []
        return layouts.lines_for(self.path(step), step.layout, is_message=step.is_message)

    def names(self, step: Step) -> list[str]:
        """Return the names of the leaves that another program has saved with Orbax."""
        item = step.layout.item if step.layout.program and not step.is_message else None
        if item is None:
            return []
        parts = [each for each in (step.name, item, "_METADATA") if each]
        leaves = self._document("/".join(parts)).get("tree_metadata") or {}
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            return [
                ".".join(str(key["key"]) for key in each["key_metadata"])
                for each in leaves.values()
            ]
        return []

    def path(self, step: Step) -> str:
        """Return the path or URI of a step."""
        return f"{self.where}/{step.name}" if step.name else self.where

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
        found = [self._step(name) for name in self._names]
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
        """Remove steps; each is not committed any more before its files go. Without its newest one
        this is another training: what hosts have in their memory is of the one that was removed."""
        folder = self._store.as_folder()
        steps = list(steps)
        newest = max((each.step for each in self.steps() if each.is_committed), default=None)
        if any(each.is_committed and each.step == newest for each in steps):
            self._store.delete(_TRAINING)
        for each in steps:
            if folder is None:
                self._store.delete(f"{each.name}/{_MARKER}")
                self._store.delete(each.name)
                continue
            path = folder / each.name
            if each.is_message:
                path.unlink(missing_ok=True)
                continue
            if UNFINISHED not in each.name:
                away = path.with_name(f"{each.name}{UNFINISHED}-removed-{os.getpid()}")
                with contextlib.suppress(FileNotFoundError):
                    path.rename(away)
                path = away
            shutil.rmtree(path, ignore_errors=True)

    def _step(self, name: str) -> Step:
        number = layouts.number_of(name or os.path.basename(self.where))  # noqa: PTH119 - or a URI
        prefix = f"{name}/" if name else ""
        in_place = self._store.as_folder() is None
        committed = UNFINISHED not in name and (
            not in_place or name in self._messages or f"{prefix}{_MARKER}" in self._keys
        )
        entries = self._store.entries("" if name in self._messages else name)
        size = sum(
            each.size_bytes for each in entries if name not in self._messages or each.key == name
        )
        step = -1 if number is None else number
        layout = layouts.layout_of(name, self._files[name] if name else self._keys)
        if name in self._messages:
            return Step(name, step, True, size, layout=Layout(layouts.FLAX, ("",)), is_message=True)
        about = self._document(f"{prefix}{_ABOUT}")
        handlers = about.get("item_handlers")
        if isinstance(handlers, dict) and layouts.RECORD_ITEM in handlers:  # also without its files
            layout = Layout("", (layouts.STATE_ITEM,))
        if not committed:
            return Step(name, step, False, size, layout=layout)
        record = self._document(f"{prefix}{_RECORD}")
        nanoseconds = about.get("commit_timestamp_nsecs")
        leaves = record.get("leaves")
        return Step(
            name,
            step,
            True,
            size,
            nanoseconds / 1e9 if isinstance(nanoseconds, int) else record.get("saved_at"),
            str(record.get("job_id") or ""),
            int(record.get("hosts") or 0),
            self._document(f"{prefix}{_METRICS}") or None,
            None if leaves is None else tuple(leaves),
            len(record.get("data") or ()),
            layout,
        )

    def _document(self, key: str) -> dict[str, Any]:
        with contextlib.suppress(LookupError, ValueError):
            found = json.loads(self._store.get(key))
            return found if isinstance(found, dict) else {}
        return {}


def identify_training(where: str) -> str:
    """Return what tells this training from one whose folder was emptied or removed.

    Raises:
        OSError: it cannot be written.
    """
    store, made = _open_existing(where), os.urandom(8).hex()
    folder = store.as_folder()
    if folder is None:
        store.put(_TRAINING, made.encode(), if_absent=True)
        return store.get(_TRAINING).decode()
    with contextlib.suppress(FileExistsError), (folder / _TRAINING).open("x") as file:
        file.write(made)
    return (folder / _TRAINING).read_text()


def _open_existing(where: str) -> Store:
    where = where.removeprefix("file://")
    if "://" not in where:
        return LocalStore(Path(where), existing=True)
    from kinetic._store.open import open_store

    return open_store(where)
