"""Copies of declared data on a host: unpacked once, read-only, shared by all hosts and jobs of the
machine.

    data/lock                   one byte is locked for each digest being built or removed
    data/<digest>/files/        the content, without write permission
    data/<digest>/seal          digest of names, sizes and times, to detect later changes
    data/<digest>/source        for data that hosts fetch themselves: digest of the URI
    data/<digest>.new/          being built; the next builder removes or completes the leftovers
                                of a killed one

One process builds a copy while others wait; if it dies, the kernel frees its lock. A finished copy
appears in one step. A copy shares no files with the store, because a job that runs as root may
change the copy. A changed copy is built again for the next job.
"""

# ruff: noqa: PTH101, PTH118

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from kinetic._core import layout
from kinetic._core.plan import Tree
from kinetic._core.values import dataclass
from kinetic._source import download, manifest
from kinetic._store import files as store_files
from kinetic._store.base import Store
from kinetic._store.local import LocalStore
from kinetic._system import locks
from kinetic.errors import StoreError, StoreFull

_log = logging.getLogger("kinetic.packaging")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_MOST_SEALED = 20_000
_BUILDING = ".new"
_REMOVING = ".old"


@dataclass(frozen=True)
class CachedCopy:
    """An unpacked copy.

    Attributes:
        digest: Digest of the content.
        path: Folder of the copy.
        used_at: Time when a job last used it, in seconds since the epoch.
        source: Digest of the URI that it was fetched from; "" for data that was sent.
    """

    digest: str
    path: Path
    used_at: float
    source: str = ""


def provide(store: Store, tree: Tree, root: Path) -> Path:
    """Return the folder with the content of a tree; build it if it is missing or was changed.

    Args:
        store: Store of the content.
        tree: The content.
        root: Folder of all copies; see `find_root`.

    Raises:
        CorruptRecord: The stored content is damaged.
        StoreError: The host's disk cannot be written to; StoreFull if it is full.
    """
    return provide_as(root, tree.manifest.digest, lambda dest: _fill(store, tree, dest))


def provide_as(root: Path, digest: str, fill: Callable[[str], None], *, source: str = "") -> Path:
    """Return the folder of a copy; build it if it is missing or was changed.

    Args:
        root: Folder of all copies.
        digest: Name of the copy, in hex digits.
        fill: Writes the content into a folder, and removes write permission at the end.
        source: URI to fetch the content from; plans have it instead of the digest. `fill` then
            continues an interrupted fetch: the folder may already have complete files.

    Raises:
        StoreError: The host's disk cannot be written to; StoreFull if it is full.
    """
    path = root / digest
    try:
        if not _is_intact(path):
            with hold_lock(root, digest):
                if not _is_intact(path):
                    _build(path, fill, source)
        with suppress(OSError):  # `prune` reads the time. Fails on a read-only host.
            os.utime(path)
    except OSError as error:
        kind = StoreFull if error.errno in _FULL else StoreError
        raise kind(f"The data could not be unpacked into {path}: {error}.") from error
    return path / "files"


def find_root(store: LocalStore) -> Path:
    """Return the folder of a store's copies."""
    return store.path(layout.DATA)


def list_copies(root: Path) -> list[CachedCopy]:
    """Return all copies, including unfinished ones."""
    used_at: dict[str, float] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    digest = entry.name.partition(".")[0]
                    # The copy may have been renamed or removed since it was listed.
                    with suppress(FileNotFoundError):
                        used_at[digest] = max(
                            entry.stat(follow_symlinks=False).st_mtime, used_at.get(digest, 0.0)
                        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        CachedCopy(digest, root / digest, at, _read_source(root / digest))
        for digest, at in sorted(used_at.items())
    ]


def hash_source(source: str) -> str:
    """Return the digest of a URI."""
    return hashlib.sha256(source.encode()).hexdigest()


def _read_source(path: Path) -> str:
    try:
        return store_files.content(path / "source").decode()
    except (OSError, ValueError):
        return ""


def remove(copy: CachedCopy) -> None:
    """Remove a copy and its leftovers. No job may be using it."""
    with hold_lock(copy.path.parent, copy.digest):
        for suffix in (_BUILDING, _REMOVING):
            _discard(Path(f"{copy.path}{suffix}"))
        _retire(copy.path)


def size_bytes(copy: CachedCopy) -> int:
    """Return the size of the files of a copy."""
    files = copy.path / "files"
    if not files.is_dir():
        return 0
    return sum(info.st_size for _, info in _walk(str(files)) if stat.S_ISREG(info.st_mode))


# -- building --------------------------------------------------------------------------------------


def _build(path: Path, fill: Callable[[str], None], source: str) -> None:
    """Build the copy under another name, then rename it, so that an unfinished copy is never
    visible. The caller holds the lock."""
    new = Path(f"{path}{_BUILDING}")
    if not source:
        _discard(new)
    if os.path.lexists(path):
        _log.warning("the copy of the data in %s was changed, so the data is unpacked again", path)
        _retire(path)
    try:
        files = new / "files"
        for folder in (new, files):
            folder.mkdir(mode=0o700, exist_ok=bool(source))
        fill(str(files))
        if source:
            (new / "source").write_text(hash_source(source))
        (new / "seal").write_text(_seal(str(files)))
        new.rename(path)
    except BaseException:
        if not source:
            _discard(new)
        raise


def _fill(store: Store, tree: Tree, dest: str) -> None:
    with download.open_tree(store, tree) as stored:
        download.write_tree(stored, dest, _place_file)
        folders = [entry.path for entry in stored.entries if isinstance(entry, manifest.Folder)]
        for folder in (*folders, ""):
            os.chmod(os.path.join(dest, folder), 0o555)


def _place_file(stored: download.StoredTree, file: manifest.File, dest: str) -> None:
    download.write_file(stored, file, dest)
    os.chmod(os.path.join(dest, file.path), 0o555 if file.mode & 0o111 else 0o444)


# -- verifying -------------------------------------------------------------------------------------


def _is_intact(path: Path) -> bool:
    try:
        return store_files.content(path / "seal").decode() == _seal(str(path / "files"))
    except (OSError, ValueError):
        return False


def _seal(files: str) -> str:
    """Return a digest of the files' names, sizes, inodes and times; any accidental change alters
    it. To save time when a host starts, contents are not read, and only the first files of a very
    large copy count."""
    digest = hashlib.sha256()
    for rel, info in sorted(islice(_walk(files), _MOST_SEALED)):
        fields = (
            rel,
            stat.S_IFMT(info.st_mode),
            info.st_size,
            info.st_ino,
            0 if stat.S_ISDIR(info.st_mode) else info.st_mtime_ns,
        )
        digest.update(repr(fields).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _walk(top: str) -> Iterator[tuple[str, os.stat_result]]:
    todo = [""]
    while todo:
        folder = todo.pop()
        with os.scandir(os.path.join(top, folder)) as entries:
            for entry in entries:
                rel = os.path.join(folder, entry.name)
                yield rel, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(rel)


# -- removing --------------------------------------------------------------------------------------


def _retire(path: Path) -> None:
    """Rename a copy in one step, so that no job can find it, then remove it."""
    old = Path(f"{path}{_REMOVING}")
    _discard(old)
    with suppress(FileNotFoundError):
        path.rename(old)
    _discard(old)


def _discard(folder: Path) -> None:
    """Remove a read-only folder."""
    if not os.path.lexists(folder):
        return
    folders = [rel for rel, info in _walk(str(folder)) if stat.S_ISDIR(info.st_mode)]
    for rel in ("", *folders):
        os.chmod(os.path.join(folder, rel), 0o700)
    shutil.rmtree(folder)


@contextmanager
def hold_lock(root: Path, digest: str) -> Iterator[None]:
    """Hold the lock of one digest; wait while another process holds it."""
    root.mkdir(exist_ok=True, mode=0o700)  # Do not create parents: the store may have been removed.
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.hold_record(descriptor, start=int(digest[:15], 16), length=1)
        yield
    finally:
        os.close(descriptor)
