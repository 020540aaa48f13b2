"""A store in a folder of this machine.

Everything below the root is private to its owner (folders 0700, files 0600). Writes are atomic:
they go to a private file in `.tmp` below the root, which is then renamed, or linked if the name
must not exist yet.
"""

# Strings, because a Path per object would cost as much as the calls themselves.
# ruff: noqa: PTH102, PTH103, PTH104, PTH105, PTH106, PTH108, PTH114, PTH116, PTH120

from __future__ import annotations

import copy
import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Self

from kinetic._core import layout
from kinetic._store import files, privacy
from kinetic._store.base import Entry, check_key
from kinetic.errors import NotFound, StoreError, StoreFull, UsageError

_TEMPORARY = ".tmp"
_TEMPORARY_LIFE_S = 24 * 3600.0
_REMEDY = (
    "Set KINETIC_HOME, or only KINETIC_STORE, to a folder that you own, with nothing else in it."
)
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LocalStore:
    """A `Store` in a folder. The folder is created by the first write.

    Args:
        root: the folder.
        existing: never create the folder, or a job's folder in it: a running job must not create
            a removed store, or its own removed folder, anew.
        sweeps: remove temporary files of killed writers at the first write.
    """

    calls_at_once = 1
    """One, because calls take microseconds, and threads would only wait for each other."""

    def __init__(self, root: Path, *, existing: bool = False, sweeps: bool = True) -> None:
        self._existing = existing
        self._sweeps = sweeps
        self._root = Path(root).absolute()
        self._text = str(self._root)
        self._swept = False

    def __repr__(self) -> str:
        return f"LocalStore({self._text!r})"

    def check(self) -> None:
        """Refuse a folder that others own or can write to; warn about one that others can read.

        Raises:
            StoreError: the folder must not be used; the message says how to fix it.
        """
        privacy.check(self._text)

    @property
    def uri(self) -> str:
        """The path of the folder, as `open_store` takes it."""
        return self._text

    def as_existing(self) -> Self:
        """Return a view of this store that creates neither its folder nor a job's."""
        same = copy.copy(self)
        same._existing = True
        return same

    def remove_if_empty(self) -> None:
        """Remove the store's own folders if nothing is left in them."""
        for name in (layout.JOBS, _TEMPORARY, ""):
            with suppress(OSError):
                os.rmdir(f"{self._text}/{name}")

    def folder(self) -> Path:
        """Return the store's folder, whether it exists or not."""
        return self._root

    def path(self, key: str) -> Path:
        """Return the path of the key's content, whether it exists or not."""
        return Path(self._locate(key))

    def get(self, key: str) -> bytes:
        """Return the content of the key."""
        with self._open_file(key) as file, _translate_errors(f"read {key!r}", self._text):
            return file.readall()

    def fetch(self, key: str, path: Path, *, sha256: str = "") -> None:
        """Write the content of the key to a local file, atomically."""
        with self._open_file(key) as file, _translate_errors(f"read {key!r}", self._text):
            files.save(path, files.chunks(file), sha256=sha256)

    def _open_file(self, key: str) -> FileIO:
        path = self._locate(key)
        try:
            with _translate_errors(f"read {key!r}", self._text):
                return files.open_regular(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFound(
                f"{key!r} is missing from the store {self._text}: it was removed, or never written."
            ) from error

    def put(
        self, key: str, data: bytes | Path | Iterator[bytes], *, if_absent: bool = False
    ) -> bool:
        """Write bytes, the content of a local file, or parts from an iterator; return whether this
        call wrote."""
        target = self._locate(key)
        if if_absent and os.path.lexists(target):
            return False
        with _translate_errors(f"write {key!r}", self._text, writes=True):
            self._sweep_once()
            temporary = f"{self._text}/{_TEMPORARY}/{os.getpid()}-{os.urandom(8).hex()}"
            moved = False
            try:
                try:
                    _fill(temporary, data)
                except FileNotFoundError:  # This is the first write, or the store was removed.
                    self._make_temporary()
                    _fill(temporary, data)
                written = self._publish(temporary, key, if_absent)
                moved = not if_absent
                return written
            finally:
                if not moved:
                    with suppress(FileNotFoundError):
                        os.unlink(temporary)

    def has(self, key: str) -> bool:
        """True if the key exists."""
        path = self._locate(key)
        try:
            with _translate_errors(f"look for {key!r}", self._text):
                return _is_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys below the prefix, sorted; "" is the whole store."""
        top = self._locate(prefix) if prefix else self._text
        return self._walk(top, f"{prefix}/" if prefix else "")

    def delete(self, prefix: str) -> int:
        """Delete the key and everything below it; return how many objects were deleted."""
        path = self._locate(prefix)
        with _translate_errors(f"delete {prefix!r}", self._text):
            return _remove(self._hide(path))

    def renew(self, key: str) -> bool:
        """Return True if the key exists. Renew nothing: submissions lock the folder instead."""
        return self.has(key)

    def parts(self, prefix: str) -> Iterator[str]:
        """Yield the names of the folders directly below the prefix, sorted, also empty ones."""
        folder = self._locate(prefix)
        try:
            with _translate_errors(f"list {prefix!r}", self._text), os.scandir(folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from sorted(names)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the keys below the prefix like `list`, with sizes and times."""
        for key in self.list(prefix):
            with suppress(FileNotFoundError):  # The object was removed since it was listed.
                info = os.stat(self._locate(key))
                yield Entry(key, info.st_size, info.st_mtime)

    def _hide(self, path: str) -> str:
        """Move a folder to `.tmp`, so that no reader sees it half deleted; return its new path."""
        if not os.path.isdir(path) or os.path.islink(path):
            return path
        self._make_temporary()
        hidden = f"{self._text}/{_TEMPORARY}/{os.getpid()}-{os.urandom(8).hex()}"
        try:
            os.rename(path, hidden)
        except OSError:  # The folder was removed meanwhile, or is a mount point.
            return path
        return hidden

    def _locate(self, key: str) -> str:
        parts = check_key(key)
        if parts[0] == _TEMPORARY:
            raise UsageError(
                f"{key!r} is not a valid key of the store: {_TEMPORARY!r} is for unfinished "
                "writes. Choose another name."
            )
        return f"{self._text}/{key}"

    def _make(self, folder: str) -> None:
        _make_private(folder, self._text, makes_root=not self._existing)

    def _make_folder_of(self, key: str) -> None:
        folder = f"{self._text}/{key.rpartition('/')[0]}".rstrip("/")
        job_id = layout.job_of(key) if self._existing else ""
        if not job_id:
            self._make(folder)
            return
        try:
            _make_private(folder, f"{self._text}/{layout.JobKeys(job_id).prefix}", makes_root=False)
        except StoreError:
            raise StoreError(f"The job {job_id} was removed from the store {self._text}.") from None

    def _make_temporary(self) -> None:
        self._make(f"{self._text}/{_TEMPORARY}")
        self.check()  # Another user may have been faster to create it.

    def _sweep_once(self) -> None:
        if not self._swept and privacy.check(self._text):
            self._swept = True
            if self._sweeps:
                _sweep(f"{self._text}/{_TEMPORARY}", time.time() - _TEMPORARY_LIFE_S)

    def _publish(self, temporary: str, key: str, if_absent: bool) -> bool:
        target = self._locate(key)
        # The folder may be deleted between its creation and its use.
        for _ in range(100):
            try:
                return _give_name(temporary, target, if_absent)
            except FileNotFoundError:
                self._make_folder_of(key)
        raise StoreError(f"Could not write {target}: another process keeps deleting its folder.")

    def _walk(self, folder: str, prefix: str) -> Iterator[str]:
        try:
            with _translate_errors(f"list {prefix!r}", self._text), os.scandir(folder) as entries:
                children = [
                    (e.name, e.is_dir(follow_symlinks=False), files.is_file(e)) for e in entries
                ]
        except (FileNotFoundError, NotADirectoryError):
            if os.path.lexists(self._text) and not os.path.isdir(self._text):
                raise StoreError(f"The store {self._text} is not a folder. {_REMEDY}") from None
            return
        # A folder sorts as "name/", so that whole keys are sorted ("a-b" before "a/b").
        for name, is_folder, is_file in sorted(
            children, key=lambda e: e[0] + "/" if e[1] else e[0]
        ):
            if is_folder and (prefix or name != _TEMPORARY):
                yield from self._walk(f"{folder}/{name}", f"{prefix}{name}/")
            elif is_file and not is_folder:
                yield prefix + name


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


@contextmanager
def _translate_errors(doing: str, root: str, *, writes: bool = False) -> Iterator[None]:
    """Turn errors of the operating system into the store's, except those that mean "not found"."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        if writes:
            raise StoreError(
                f"Could not {doing} in the store {root}: {error.strerror}. {_REMEDY}"
            ) from None
        raise
    except OSError as error:
        error.__suppress_context__ = True  # Hide the error of an earlier try.
        if error.errno in files.FULL:
            raise StoreFull(
                f"Could not {doing} in the store {root}: {files.shortage(root)}. Free some space, "
                "or set KINETIC_HOME to a folder on another disk."
            ) from error
        why = error.strerror or error
        if error.errno in _DENIED:
            raise StoreError(
                f"Could not {doing} in the store {root}: {why}. Change the permissions. If this is "
                f"the store of your jobs, you can instead {_REMEDY.replace('Set', 'set')}"
            ) from None
        raise StoreError(f"Could not {doing} in the store {root}: {why}.") from error


def _fill(temporary: str, data: bytes | Path | Iterator[bytes]) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        if isinstance(data, Path):
            with _open_source(data) as source:
                for chunk in files.chunks(source):
                    files.write_all(file.fileno(), chunk)
        elif isinstance(data, Iterator):
            for chunk in data:
                files.write_all(file.fileno(), chunk)
        else:
            files.write_all(file.fileno(), data)


def _open_source(path: Path) -> FileIO:
    try:
        return FileIO(path)
    except OSError as error:
        raise StoreError(f"Could not read {path} to store it: {error.strerror}.") from error


def _give_name(temporary: str, target: str, if_absent: bool) -> bool:
    if not if_absent:
        os.replace(temporary, target)
        return True
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise StoreError(
                f"Could not write {target}: its file system has no hard links. Set KINETIC_HOME to "
                "a folder on a local disk."
            ) from error
        raise
    return True


def _make_private(folder: str, root: str, *, makes_root: bool = True) -> None:
    """Create the folder and its parents up to the root, private to their owner."""
    if folder == root and not makes_root:
        if not os.path.isdir(root):
            raise StoreError(f"The store {root} was removed.")
        return
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
    except FileNotFoundError:
        if folder == root:
            os.makedirs(os.path.dirname(root), exist_ok=True)
        else:
            _make_private(os.path.dirname(folder), root, makes_root=makes_root)
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _sweep(folder: str, older_than: float) -> None:
    """Remove entries that are too old to be in use: killed processes left them behind."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_mtime < older_than:
                with suppress(OSError):
                    _remove(entry.path)


def _remove(path: str) -> int:
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return 1
        with os.scandir(path) as entries:
            names = [entry.path for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    count = sum(_remove(name) for name in names)
    try:
        os.rmdir(path)
    except OSError as error:
        # If the folder is not empty, another process writes to it.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
    return count
