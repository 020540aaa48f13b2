"""Checkpoints in a folder or bucket, read without Orbax: kinetic's own, and those that other
programs wrote with Orbax. Checkpoints in other formats are recognized, but never changed.

In a folder, a step gets its final name when it is complete. In a bucket, or if Orbax is configured
so, a step is written in place, and is complete once it has its commit marker.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from kinetic._core.values import dataclass
from kinetic._store import lease
from kinetic._store.base import Store, folder_of, is_near
from kinetic._store.local import LocalStore
from kinetic.errors import CheckpointError, NotFound, StoreError

_MARKER = "commit_success.txt"
_RECORD, _METRICS, _ABOUT = "kinetic/metadata", "metrics/metrics", "_CHECKPOINT_METADATA"
_BELOW = "checkpoints"
"""Name of the folder in a job's output folder that holds its checkpoints."""
_TRAINING = "kinetic-training"
"""A file next to the steps, with a random token that identifies the training run."""


ORBAX, ANOTHER = "Orbax", "another program"
UNFINISHED = ".orbax-checkpoint-tmp"
_RECORD_ITEM, _STATE_ITEM = "kinetic", "state"
"""Items of kinetic's own checkpoints."""
_TREE_FILES = ("_METADATA", "manifest.ocdbt")
"""Files of which Orbax writes at least one into the folder of a pytree."""
_PROCESS_PREFIX = "ocdbt.process_"
_NUMBERED = re.compile(r"(?:[A-Za-z][A-Za-z0-9_.-]*[_-])?(\d+)", re.ASCII)
_FLAX_MESSAGE = re.compile(r"checkpoint_\d+", re.ASCII)
_OTHER_FORMATS = {
    ".distcp": "torch.distributed.checkpoint",
    ".safetensors": "safetensors",
    ".keras": "Keras",
    ".weights.h5": "Keras",
    ".eqx": "Equinox",
    ".pt": "PyTorch",
    ".pth": "PyTorch",
    ".ckpt": "PyTorch",
    "pytorch_model.bin": "PyTorch",
}
"""Programs that write checkpoints without Orbax, by the endings of their files."""


@dataclass(frozen=True)
class Layout:
    """The items of a checkpoint.

    Attributes:
        program: the program that wrote it; "" for kinetic.
        trees: the items that are pytrees; "" stands for the folder itself.
        others: the other items: iterators, documents, metrics.
    """

    program: str
    trees: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def item(self) -> str | None:
        """The item with the state: the checkpoint's only pytree; None unless it has exactly one."""
        if not self.program:
            return _STATE_ITEM
        return self.trees[0] if len(self.trees) == 1 else None


@dataclass(frozen=True)
class Step:
    """A checkpoint.

    Attributes:
        name: the folder's name; "" if the opened folder is itself the checkpoint.
        step: the training step; -1 if its name has no number.
        is_committed: true if it is complete; otherwise a save is under way or was cut off.
        size_bytes: the size of all its files.
        saved_at: seconds since the epoch; None if unknown.
        job_id: the job that saved it; "" if unknown.
        hosts: how many hosts that job had; 0 if unknown.
        metrics: the metrics saved with it.
        leaves: the leaves of the state, as `kinetic.Checkpointer` describes them; None for
            checkpoints of other programs.
        positions: how many positions of iterators it has.
        layout: the library that wrote it, and the names of its items.
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

    def to_json(self) -> dict[str, Any]:
        """Return the step as a JSON object."""
        document = dict(vars(self))
        layout = document.pop("layout")
        document["program"] = layout.program or "kinetic"
        document["items"] = [*layout.trees, *layout.others]
        return document | {"leaves": None if self.leaves is None else list(self.leaves)}


class Checkpoints:
    """The checkpoints of a training run.

    Args:
        where: the path or URI of the checkpoints, or of the output folder that contains them.
    """

    def __init__(self, where: str) -> None:
        self.where = where.rstrip("/") or where
        self._list_files()
        below = f"{_BELOW}/"
        if not self._is_certain and any(key.startswith(below) for key in self._keys):
            self.where = f"{self.where}/{_BELOW}"
            self._list_files()

    def _list_files(self) -> None:
        self._store = _open_existing(self.where)
        with _explain_errors(self.where):
            self._keys = list(self._store.list(""))
        self._files: dict[str, list[str]] = {}
        for key in self._keys:
            top, below, rest = key.partition("/")
            self._files.setdefault(top, []).extend([rest] if below else [])
        self._names = [top for top, files in self._files.items() if files and self._is_step(top)]
        if _is_one(self._keys, has_steps=bool(self._names)):
            self._names = [""]

    def _is_step(self, name: str) -> bool:
        """True if a folder's name is a number, or ends with one and the folder has pytrees."""
        if number_of(name) is None:
            return False
        return name[0].isdigit() or bool(layout_of(name, self._files[name]).trees)

    @property
    def _is_certain(self) -> bool:
        """True if this is certainly a folder of checkpoints. Subfolders with numbers are no proof:
        other programs, too, make such folders, for example one per host."""
        layouts = (layout_of(name, self._files[name]) for name in self._names if name)
        return self.is_one or self.has_owner or any(layout.program != ANOTHER for layout in layouts)

    @property
    def is_one(self) -> bool:
        """True if this is the folder of a single checkpoint."""
        return self._names == [""]

    @property
    def program(self) -> str:
        """The program that wrote the checkpoints; "" for kinetic, or if there are none. A folder on
        which a job had a lease is kinetic's until it has a step of another program."""
        if self.is_one:
            return layout_of("", self._keys).program or "kinetic"
        if not self._names:
            return "" if self.has_owner else _name_other(self._keys)
        steps = [self._step(name) for name in self._names]
        if not all(step.layout.program for step in steps):
            return ""
        if not any(step.is_committed for step in steps) and self.has_owner:
            return ""
        return steps[-1].layout.program

    @property
    def has_owner(self) -> bool:
        """True if the folder has the record of a lease."""
        return any(key in (lease.RECORD, lease.KEY) for key in self._keys)

    def names(self, step: Step) -> list[str]:
        """Return the names of the leaves that another program saved with Orbax."""
        item = step.layout.item if step.layout.program else None
        if item is None:
            return []
        parts = [leaf for leaf in (step.name, item, "_METADATA") if leaf]
        leaves = self._document("/".join(parts)).get("tree_metadata") or {}
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            return [
                ".".join(str(key["key"]) for key in leaf["key_metadata"])
                for leaf in leaves.values()
            ]
        return []

    def path(self, step: Step) -> str:
        """Return the path or URI of a step."""
        return f"{self.where}/{step.name}" if step.name else self.where

    def steps(self) -> list[Step]:
        """Return all checkpoints, the oldest step first.

        Raises:
            NotFound: there is no such folder.
        """
        folder = folder_of(self._store)
        if not self._keys and (folder is None or not folder.is_dir()):
            raise NotFound(
                f"There is nothing at {self.where}. Name the folder that `kinetic.Checkpointer` "
                "writes to, or the output folder of its job (see `kinetic jobs status`)."
            )
        steps = [self._step(name) for name in self._names]
        return sorted(steps, key=lambda step: (step.step, step.name))

    def step(self, number: int | None) -> Step:
        """Return the committed checkpoint of a step; without a number, the newest one.

        Raises:
            NotFound: there is no such committed checkpoint.
        """
        committed = [step for step in self.steps() if step.is_committed]
        wanted = [step for step in committed if number in (None, step.step)]
        if not wanted:
            steps = ", ".join(str(step.step) for step in committed) or "none"
            what = "no committed checkpoint" if number is None else f"no checkpoint {number}"
            raise NotFound(f"There is {what} at {self.where}; committed steps: {steps}.")
        return wanted[-1]

    def remove(self, steps: Iterable[Step]) -> None:
        """Remove steps. Each step is first marked as incomplete, then its files are removed. If the
        newest step is removed, the training run gets a new identity, so that hosts do not restore
        their local checkpoints."""
        folder = folder_of(self._store)
        steps = list(steps)
        newest = max((step.step for step in self.steps() if step.is_committed), default=None)
        if any(step.is_committed and step.step == newest for step in steps):
            self._store.delete(_TRAINING)
        for step in steps:
            if folder is None:
                self._store.delete(f"{step.name}/{_MARKER}")
                self._store.delete(step.name)
                continue
            path = folder / step.name
            if UNFINISHED not in step.name:
                hidden = path.with_name(f"{step.name}{UNFINISHED}-removed-{os.getpid()}")
                with contextlib.suppress(FileNotFoundError):
                    path.rename(hidden)
                path = hidden
            shutil.rmtree(path, ignore_errors=True)

    def _step(self, name: str) -> Step:
        number = number_of(name or os.path.basename(self.where))  # noqa: PTH119 - or a URI
        prefix = f"{name}/" if name else ""
        is_marked = f"{prefix}{_MARKER}" in self._keys
        size = sum(entry.size_bytes for entry in self._store.entries(name))
        step = -1 if number is None else number
        layout = layout_of(name, self._files[name] if name else self._keys)
        about = self._document(f"{prefix}{_ABOUT}")
        handlers = about.get("item_handlers")
        if isinstance(handlers, dict) and _RECORD_ITEM in handlers:  # even if its files are missing
            layout = Layout("", (_STATE_ITEM,))
        committed = UNFINISHED not in name and (
            is_marked
            or (is_near(self._store) and (not layout.program or self._was_renamed(step, about)))
        )
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

    def _was_renamed(self, step: int, about: dict[str, Any]) -> bool:
        """True if a step without a marker is complete, because Orbax before 0.12.3 wrote it: that
        renamed complete steps instead of marking them. Otherwise the save was cut off."""
        if "init_timestamp_nsecs" in about and about.get("commit_timestamp_nsecs") is None:
            return False
        marked = [name for name in self._names if _MARKER in self._files.get(name, ())]
        return not any((number_of(name) or 0) < step for name in marked)

    def _document(self, key: str) -> dict[str, Any]:
        with contextlib.suppress(LookupError, ValueError), _explain_errors(self.where):
            document = json.loads(self._store.get(key))
            return document if isinstance(document, dict) else {}
        return {}


@contextlib.contextmanager
def _explain_errors(where: str) -> Iterator[None]:
    try:
        yield
    except StoreError as error:  # Omit the advice, which is about kinetic's own store.
        why = getattr(error.__context__, "strerror", None) or str(error)
        raise CheckpointError(f"The folder {where} cannot be read: {why}.") from error


def layout_of(name: str, files: Collection[str]) -> Layout:
    """Return the program and the items of a checkpoint.

    Args:
        name: the name of the checkpoint's folder.
        files: the paths of its files, relative to the folder.
    """
    tops = sorted({top for top, below, _ in (file.partition("/") for file in files) if below})
    if _RECORD_ITEM in tops:
        return Layout("", (_STATE_ITEM,), tuple(top for top in tops if top != _STATE_ITEM))
    if any(file in files for file in _TREE_FILES):
        return Layout(ORBAX, ("",))
    trees = [top for top in tops if any(f"{top}/{file}" in files for file in _TREE_FILES)]
    others = [top for top in tops if top not in trees]
    return Layout(ORBAX if trees or _ABOUT in files else ANOTHER, tuple(trees), tuple(others))


def _is_one(files: Collection[str], *, has_steps: bool) -> bool:
    """True if these are the files of a single checkpoint. `has_steps`: some of their folders are
    named like steps."""
    if any(file in files for file in (*_TREE_FILES, _ABOUT)):
        return True
    whole = layout_of("", files)
    return not has_steps and (bool(whole.trees) or not whole.program)


def number_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's folder: 100 for 100, model_00000100 and
    checkpoint_100; None for other names."""
    if name.startswith(_PROCESS_PREFIX):  # a part of a pytree
        return None
    matched = _NUMBERED.fullmatch(name.partition(UNFINISHED)[0])
    return None if matched is None else int(matched[1])


def _name_other(files: Collection[str]) -> str:
    """Return the program that wrote these checkpoints without Orbax, judging by the files' names;
    "" if unknown."""
    names = [file for file in files if file.count("/") < 2]
    if any(_FLAX_MESSAGE.fullmatch(name) for name in names):
        return "flax.training"
    if any(".data-00000-of-" in name for name in names):
        return "TensorFlow"
    programs = (p for ending, p in _OTHER_FORMATS.items() if any(n.endswith(ending) for n in names))
    return next(programs, "")


def identify_training(where: str) -> str:
    """Return the token of a training run; write one if its folder has none. A folder that was
    emptied or removed gets another token.

    Raises:
        OSError: the token cannot be written.
    """
    store, token = _open_existing(where), os.urandom(8).hex()
    folder = folder_of(store)
    if folder is None:
        store.put(_TRAINING, token.encode(), if_absent=True)
        return store.get(_TRAINING).decode()
    with contextlib.suppress(FileExistsError), (folder / _TRAINING).open("x") as file:
        file.write(token)
    return (folder / _TRAINING).read_text()


def _open_existing(where: str) -> Store:
    where = where.removeprefix("file://")
    if "://" not in where:
        return LocalStore(Path(where), existing=True)
    from kinetic._store.open import open_store

    return open_store(where)
