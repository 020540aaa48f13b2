"""The local tier: each host's parts of the state, in a folder in its own memory.

A step is `STEP/index.json` and `STEP/data`, and is either complete or absent: it is copied from the
devices into the mapped file `writing/data`, and the folder is then renamed. The previous step stays
until all hosts have committed the new one; then its file is reused for the next step, because
allocating memory costs more than filling it. So a host holds at most two steps. The content
survives the process: the kernel keeps mapped files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

from kinetic._core.checkpoint_size import in_gigabytes, quantity, room_for
from kinetic._in_job.checkpoint import digests
from kinetic._in_job.checkpoint.digests import Digesting
from kinetic._in_job.checkpoint.pieces import CompleteStep, Local, Piece
from kinetic._in_job.checkpoint.tree import ArrayPart, TreeState, list_parts
from kinetic._system import machine
from kinetic.errors import CheckpointError, CorruptRecord

_INDEX = "index.json"
_DATA = "data"
_WRITING, _REMOVING = "writing", "removing"
_ALIGNED_TO = 64
_AT_ONCE_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class LocalSaveFailed(CheckpointError):
    """A local save failed: no room was left, or the folder was removed. A later one may succeed."""


def measure_size(state: TreeState) -> int:
    """Return the size in bytes of the file with this process's parts of a state."""
    return _lay_out_parts(state)[2]


def _lay_out_parts(state: TreeState) -> tuple[list[ArrayPart], tuple[Piece, ...], int]:
    """Return this process's parts of a state, their pieces in the file, and its size in bytes."""
    parts, pieces, end = [], [], 0
    for number, value in state.arrays():
        for part in list_parts(value):
            size = int(part.data.nbytes)
            parts.append(part)
            pieces.append(Piece(number, part.start, part.shape, end, size))
            end += -(-size // _ALIGNED_TO) * _ALIGNED_TO
    return parts, tuple(pieces), end


class LocalTier:
    """The local checkpoints of one host. One thread at a time may use it.

    Args:
        folder: Folder of this host alone; created on the first write.
        verify: Store a digest of every piece, and check it when the piece is read.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self._folder = folder
        self._verify = verify
        self._mapped: dict[tuple[int, int], Any] = {}

    @property
    def folder(self) -> Path:
        """Folder of the steps."""
        return self._folder

    def open(self) -> None:
        """Create the folder, and remove incomplete steps of a killed process.

        Raises:
            CheckpointError: The folder cannot be used.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CheckpointError(
                f"The folder for local checkpoints {self._folder} cannot be used: "
                f"{error.strerror or error}. Set local_directory= to a folder that this host may "
                "write to, or set local_every=None."
            ) from error
        for name in (_WRITING, _REMOVING):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def list_committed(self) -> list[Local]:
        """Return the committed steps, without damaged ones."""
        return self.read_steps()[0]

    def read_steps(self) -> tuple[list[Local], dict[int, str]]:
        """Return the committed steps, and the reasons why damaged ones cannot be read, by step."""
        committed, faults = [], {}
        for path in self._steps():
            try:
                committed.append(_read_committed(path))
            except (OSError, ValueError, CorruptRecord) as error:
                why = str(error) if isinstance(error, CorruptRecord) else "its index is not JSON"
                if isinstance(error, OSError):
                    why = error.strerror or why
                faults[int(path.name)] = f"the local checkpoint {path} is damaged: {why}"
        return committed, faults

    def _steps(self) -> list[Path]:
        try:
            entries = list(self._folder.iterdir())
        except OSError:
            return []
        return sorted((path for path in entries if path.name.isdigit()), key=lambda p: int(p.name))

    def prepare(self, size_bytes: int) -> None:
        """Allocate the memory for the next step, which takes longer than filling it.

        Raises:
            LocalSaveFailed: No room is left, or the folder was removed.
            CheckpointError: The folder cannot be written to.
        """
        try:
            self._allocate(size_bytes)
        except OSError as error:
            raise _explain_error(error, None, self._folder, size_bytes) from error

    def stage(self, step: int, writer: str, hosts: int, state: TreeState) -> Local:
        """Copy this host's parts out of the devices; afterwards the state may change.

        Raises:
            LocalSaveFailed: No room is left, or the folder was removed.
            CheckpointError: The folder cannot be written to.
        """
        import numpy as np

        parts, pieces, size_bytes = _lay_out_parts(state)
        for part in parts:
            if hasattr(part.data, "copy_to_host_async"):
                part.data.copy_to_host_async()
        try:
            space = self._allocate(size_bytes)
        except OSError as error:
            raise _explain_error(error, step, self._folder, size_bytes) from error
        with Digesting() if self._verify else contextlib.nullcontext() as digesting:
            for piece, part in zip(pieces, parts, strict=True):
                content = np.asarray(part.data)
                content = np.ascontiguousarray(content, content.dtype.newbyteorder("="))
                raw = content.reshape(-1).view(np.uint8)
                if digesting is not None:
                    digesting.add(raw)
                space[piece.offset : piece.offset + piece.size_bytes] = raw
            if digesting is not None:
                digested = zip(pieces, digesting.finish(), strict=True)
                pieces = tuple(piece._replace(digest=digest) for piece, digest in digested)
        return Local(step, writer, hosts, tuple(state.leaves), pieces)

    def _allocate(self, size_bytes: int) -> Any:
        """Map `writing/data` with this size. Every page is written first: a later write to mapped
        memory without room in the file system would kill the process."""
        import numpy as np

        writing = self._folder / _WRITING
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        writing.mkdir(exist_ok=True, mode=0o700)
        fd = os.open(writing / _DATA, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            about = os.fstat(fd)
            name = (about.st_dev, about.st_ino)
            mapped = self._mapped.get(name)
            if mapped is not None and mapped.size == size_bytes == about.st_size:
                return mapped
            os.ftruncate(fd, 0)
            space = np.empty(0, np.uint8)
            if size_bytes:
                if machine.is_memory_folder(self._folder):
                    available = machine.available_memory_bytes()
                    if available is not None and available < size_bytes:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                zeros, rest = memoryview(bytes(min(size_bytes, _AT_ONCE_BYTES))), size_bytes
                while rest:
                    rest -= os.write(fd, zeros[:rest])
                space = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
                space[:: mmap.PAGESIZE] = 0
            self._mapped.pop(name, None)
            self._mapped = dict([*self._mapped.items()][-1:]) | {name: space}
            return space
        except OSError:
            os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)

    def commit(self, local: Local) -> None:
        """Commit the staged step on this host. The previous step stays.

        Raises:
            LocalSaveFailed: No room is left, or the folder was removed.
            CheckpointError: The folder cannot be written to.
        """
        target, writing = self._folder / str(local.step), self._folder / _WRITING
        try:
            (writing / _INDEX).write_text(json.dumps(digests.sign(local.to_json())))
            if target.exists():  # Saved before training went back to an earlier step.
                self._remove(target)
            writing.rename(target)
        except OSError as error:
            size = sum(piece.size_bytes for piece in local.pieces)
            raise _explain_error(error, local.step, self._folder, size) from error

    def retire(self, newest: int) -> None:
        """Drop all steps but this one, which all hosts have committed."""
        for path in self._steps():
            if path.name != str(newest):
                self._recycle(path)

    def withdraw(self, step: int) -> None:
        """Drop this step because another host could not commit it; the previous step stays."""
        self._recycle(self._folder / str(step))

    def _recycle(self, path: Path) -> None:
        """Keep the file of a dropped step, so that the next save reuses its memory."""
        try:
            path.rename(self._folder / _WRITING)
        except OSError:  # `writing` exists already.
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a step. Rename it first: a killed process must not leave half a step."""
        shutil.rmtree(self._folder / _REMOVING, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.rename(self._folder / _REMOVING)
        shutil.rmtree(self._folder / _REMOVING, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all steps and the folder."""
        self._mapped.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep_only(self, whole: CompleteStep | None) -> None:
        """Remove all steps but the restored one; if that is None, all steps. Steps of an earlier
        run must not be mixed with those of this run."""
        names = {
            str(local.step)
            for local in self.list_committed()
            if whole is not None and (local.step, local.writer) == (whole.step, whole.writer)
        }
        for path in self._steps():
            if path.name not in names:
                self._remove(path)

    def read(self, local: Local, piece: Piece) -> Any:
        """Return the bytes of a piece.

        Raises:
            CheckpointError: The piece was removed or is damaged.
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
        except OSError as error:
            raise CheckpointError(
                f"The local checkpoint of step {local.step} in {self._folder} cannot be read: "
                f"{error.strerror or error}.",
                step=local.step,
            ) from error
        if not self.is_copy(piece, content):
            raise CheckpointError(
                f"The local checkpoint of step {local.step} in {self._folder} is damaged: its "
                "content differs from what was saved.",
                step=local.step,
            )
        return content

    def is_copy(self, piece: Piece, content: Any) -> bool:
        """True if the content matches the piece's digest, or if digests are not checked."""
        return not self._verify or piece.is_copy(content)


def _read_committed(path: Path) -> Local:
    """Read the index of a committed step.

    Raises:
        OSError, ValueError, CorruptRecord: The index or the data are damaged.
    """
    local = Local.from_json(digests.check_signed(json.loads((path / _INDEX).read_text())))
    size = (path / _DATA).stat().st_size
    if path.name != str(local.step):
        raise CorruptRecord(f"its index is that of another step ({local.step})")
    if size < max((piece.offset + piece.size_bytes for piece in local.pieces), default=0):
        raise CorruptRecord("the file with its data is shorter than its index says")
    return local


def _explain_error(
    error: OSError, step: int | None, folder: Path, size_bytes: int
) -> CheckpointError:
    what = "next local checkpoint" if step is None else f"local checkpoint of step {step}"
    failure = f"The {what} could not be written to {folder}"
    if error.errno in _FULL:
        return LocalSaveFailed(
            f"{failure}: no space is left for {in_gigabytes(size_bytes)}. Local checkpoints need "
            f"twice that on each host: request at least {in_gigabytes(room_for(size_bytes))} of "
            f'memory (on a cluster: local_storage="{quantity(room_for(size_bytes))}"), or set '
            "local_every=None.",
            step=step,
        )
    kind = LocalSaveFailed if error.errno == errno.ENOENT else CheckpointError
    return kind(f"{failure}: {error.strerror or error}.", step=step)
