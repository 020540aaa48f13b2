"""The local tier: each host's parts of the state, in a folder in its own memory.

In: a state, a folder. Out: `STEP/index.json` and `STEP/data`, complete or not there.

A step is written to `writing`, which is then renamed. The step before it stays until all hosts have
committed; after that its file is written over for the next one, because fresh memory is what
writing costs most. So two steps are there at most.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from kinetic._in_job.checkpoint.pieces import Local, Piece, Whole
from kinetic._in_job.checkpoint.tree import State, parts_here
from kinetic.errors import CheckpointError, CorruptRecord

_INDEX = "index.json"
_DATA = "data"
_WRITING = "writing"
_ALIGNED_TO = 64
_AT_ONCE_BYTES = 1 << 26
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Staged(NamedTuple):
    """A state as it is in this process's memory, to be written."""

    local: Local
    size_bytes: int


class LocalTier:
    """One host's local checkpoints.

    Args:
        folder: of this host alone; created when it is first written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._buffer: Any = None

    @property
    def folder(self) -> Path:
        """Where the steps lie."""
        return self._folder

    def clean(self) -> None:
        """Remove what a process that was killed has left."""
        shutil.rmtree(self._folder / _WRITING, ignore_errors=True)

    def found(self) -> list[Local]:
        """Return what is committed; what is damaged is left out."""
        there = []
        for path in self._steps():
            try:
                local = Local.from_json(json.loads((path / _INDEX).read_text()))
                size = (path / _DATA).stat().st_size
            except (OSError, ValueError, CorruptRecord):
                continue
            ends = [piece.offset + piece.size_bytes for piece in local.pieces]
            if path.name == str(local.step) and size >= max(ends, default=0):
                there.append(local)
        return there

    def _steps(self) -> list[Path]:
        try:
            entries = list(self._folder.iterdir())
        except OSError:
            return []
        return sorted((each for each in entries if each.name.isdigit()), key=lambda p: int(p.name))

    def stage(self, step: int, writer: str, hosts: int, state: State) -> Staged:
        """Copy this host's parts out of the devices; afterwards the state may change."""
        import numpy as np

        parts = [(number, part) for number, value in state.arrays() for part in parts_here(value)]
        for _, part in parts:
            if hasattr(part.data, "copy_to_host_async"):
                part.data.copy_to_host_async()
        pieces, end = [], 0
        for number, part in parts:
            size = int(part.data.nbytes)
            pieces.append(Piece(number, part.start, part.shape, end, size))
            end += -(-size // _ALIGNED_TO) * _ALIGNED_TO
        if self._buffer is None or self._buffer.size < end:
            self._buffer = np.empty(end, np.uint8)
        for piece, (_, part) in zip(pieces, parts, strict=True):
            content = np.ascontiguousarray(np.asarray(part.data))
            raw = content.reshape(-1).view(np.uint8)
            self._buffer[piece.offset : piece.offset + piece.size_bytes] = raw
        return Staged(Local(step, writer, hosts, tuple(state.leaves), tuple(pieces)), end)

    def write(self, staged: Staged) -> None:
        """Commit a step on this host; the one that it replaces stays.

        Raises:
            CheckpointError: there is no room, or the folder cannot be written to.
        """
        local, target = staged.local, self._folder / str(staged.local.step)
        writing = self._folder / _WRITING
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            writing.mkdir(exist_ok=True, mode=0o700)
            (writing / _INDEX).unlink(missing_ok=True)
            fd = os.open(writing / _DATA, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._fill(fd, staged.size_bytes)
            finally:
                os.close(fd)
            (writing / _INDEX).write_text(json.dumps(local.to_json()))
            if target.exists():  # of a run that was rewound
                shutil.rmtree(target)
            writing.rename(target)
        except OSError as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise _explained(error, local.step, self._folder, staged.size_bytes) from error

    def _fill(self, fd: int, size_bytes: int) -> None:
        view = memoryview(self._buffer)
        done = 0
        while done < size_bytes:
            done += os.write(fd, view[done : done + _AT_ONCE_BYTES])
        os.ftruncate(fd, size_bytes)

    def retire(self, newest: int) -> None:
        """Give up all steps but this one, which all hosts have committed."""
        for path in self._steps():
            if path.name == str(newest):
                continue
            # The next step is written over it.
            if (self._folder / _WRITING).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(self._folder / _WRITING)

    def keep_only(self, whole: Whole | None) -> None:
        """Remove every step but this one, for good: what a later run writes must not be mixed with
        what an earlier one had written."""
        kept = {
            str(local.step)
            for local in self.found()
            if whole is not None and (local.step, local.writer) == (whole.step, whole.writer)
        }
        for path in self._steps():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def read(self, local: Local, piece: Piece) -> Any:
        """Return the bytes of a piece.

        Raises:
            CheckpointError: it is not there any more.
        """
        import numpy as np

        try:
            with open(self._folder / str(local.step) / _DATA, "rb", buffering=0) as file:
                content: Any = np.empty(piece.size_bytes, np.uint8)
                file.seek(piece.offset)
                view, done = memoryview(content), 0
                while done < piece.size_bytes:
                    if not (count := file.readinto(view[done:])):
                        raise OSError(errno.EIO, "it is shorter than its index says")
                    done += count
                return content
        except OSError as error:
            raise CheckpointError(
                f"The local checkpoint of step {local.step} in {self._folder} cannot be read: "
                f"{error.strerror or error}.",
                step=local.step,
            ) from error


def _explained(error: OSError, step: int, folder: Path, size_bytes: int) -> CheckpointError:
    what = f"The local checkpoint of step {step} could not be written to {folder}"
    if error.errno in _FULL:
        return CheckpointError(
            f"{what}: no space is left for {size_bytes / 1e9:.3g} GB. The local tier needs twice "
            "that on each host: give it more memory (`kinetic checkpoint size` tells how much), or "
            "say local_every=None.",
            step=step,
        )
    return CheckpointError(f"{what}: {error.strerror or error}.", step=step)
