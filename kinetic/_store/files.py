"""Local files: read regular files only, write atomically.

Opening anything but a regular file fails at once: a FIFO, for example, could block a reader
forever.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from kinetic.errors import CorruptRecord, StoreError, StoreFull

_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.EOPNOTSUPP, errno.ELOOP)
"""Errors of opening a socket, a missing device, or a loop of symlinks."""
FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
CHUNK_BYTES = 1 << 20
_FEW_INODES = 8
"""A disk with fewer free inodes counts as out of inodes, because the write that failed may have
needed several."""


def make_below(folder: Path, base: Path) -> None:
    """Create a folder and its parents below a base, private to their owner. The base itself is
    never created: a store that was removed while in use must stay removed.

    Raises:
        FileNotFoundError: the base does not exist.
    """
    if folder == base:
        return
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
    except FileNotFoundError:
        if folder.parent == base:
            raise
        make_below(folder.parent, base)
        folder.mkdir(exist_ok=True, mode=0o700)


def open_regular(path: str | Path) -> FileIO:
    """Open a regular file for reading.

    Raises:
        IsADirectoryError: the path is not a regular file.
    """
    try:
        file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _not_a_file(path) from error
        raise
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise _not_a_file(path)


def is_file(entry: os.DirEntry[str]) -> bool:
    """True if a folder's entry is a regular file or a link to one; False for a loop of links."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def content(path: str | Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        IsADirectoryError: the path is not a regular file.
    """
    with open_regular(path) as file:
        return file.readall()


def chunks(file: FileIO, most_bytes: int = sys.maxsize) -> Iterator[bytes]:
    """Yield the content of an open file in pieces, `most_bytes` at most."""
    while most_bytes > 0 and (chunk := file.read(min(most_bytes, CHUNK_BYTES))):
        most_bytes -= len(chunk)
        yield chunk


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of the data, in several calls if the kernel takes only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Sink:
    """The open file of `write_atomically`, still under its temporary name."""

    def __init__(self, descriptor: int, path: Path) -> None:
        import hashlib  # needed only to fetch

        self._new_digest = hashlib.sha256
        self._descriptor = descriptor
        self._path = path
        self.digest = self._new_digest()

    def write(self, part: bytes) -> int:
        """Append a part; return its length.

        Raises:
            StoreFull: the disk is full.
            StoreError: the part cannot be written.
        """
        self.digest.update(part)
        try:
            write_all(self._descriptor, part)
        except OSError as error:
            raise _unwritable(self._path, error) from error
        return len(part)

    def restart(self) -> None:
        """Discard everything written so far."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        self.digest = self._new_digest()


@contextmanager
def write_atomically(path: Path, *, sha256: str = "") -> Iterator[Sink]:
    """Write a file atomically, readable by its owner only. The file gets its name when the `with`
    block ends without an exception.

    Raises:
        CorruptRecord: the content has another digest than `sha256`.
        StoreFull: the disk is full.
        StoreError: the file cannot be written.
    """
    temporary = path.with_name(f".{os.getpid()}-{os.urandom(8).hex()}")
    try:
        with _create_file(path, temporary) as file:
            sink = Sink(file.fileno(), path)
            yield sink
        if sha256 and (digest := sink.digest.hexdigest()) != sha256:
            raise CorruptRecord(
                f"The content of {path.name!r} in the store is not what was sent: its SHA-256 is "
                f"{digest}, not {sha256}. Submit the job again."
            )
        try:
            temporary.replace(path)
        except OSError as error:
            raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def save(path: Path, parts: Iterable[bytes], *, sha256: str = "") -> None:
    """Write the parts, one after the other, to a file that appears once it is complete. Raises what
    `write_atomically` raises, and leaves no file if the content has another digest than `sha256`.
    """
    with write_atomically(path, sha256=sha256) as sink:
        for part in parts:
            sink.write(part)


def _create_file(path: Path, temporary: Path) -> FileIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return FileIO(os.open(temporary, flags, 0o600), "wb")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> StoreError:
    if error.errno in FULL:
        return StoreFull(f"Could not write {path}: {shortage(path.parent)}. Free some space.")
    return StoreError(f"Could not write {path}: {error.strerror or error}.")


def shortage(folder: str | Path) -> str:
    """Explain whether a full disk lacks space or inodes, as a clause for an error message."""
    with suppress(OSError):
        disk = os.statvfs(folder)
        if disk.f_files and disk.f_favail < _FEW_INODES and disk.f_bavail:
            return "no inodes are left on the disk, so it takes no more files (see `df -i`)"
    return "no space is left on the disk"


def _not_a_file(path: str | Path) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, "It is not a regular file", str(path))
