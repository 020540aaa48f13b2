"""The content of declared data on a host: unpacked once, read-only, shared by all hosts and jobs of
the machine.

In: a store, the data's tree. Out: a folder.

    data/lock                   one byte of it is locked for each digest being built or
                                removed
    data/<digest>/files/        the content, without write permission
    data/<digest>/seal          a digest of names, sizes and times:
                                shows whether the content was changed since
    data/<digest>/source        for data that hosts fetch themselves: the URI's digest
    data/<digest>.new/          being built; leftovers of a killed builder are removed or completed
                                by the next one

One process builds while the others wait; the kernel frees the lock of one that dies. A copy appears
in one step. Nothing in it is linked to the store's own contents: a job of root's may change the
copy where no mount guards it; then the next job makes it again.
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
_GOING = ".old"


@dataclass(frozen=True)
class CachedCopy:
    """An unpacked copy: its digest, its folder, when a job last used it (seconds since the epoch),
    and the digest of the URI that it was fetched from; "" for data that was sent."""

    digest: str
    path: Path
    used_at: float
    source: str = ""


def provide(store: Store, tree: Tree, root: Path) -> Path:
    """Return the folder with the content, unpacked and verified; made first if it is missing or was
    changed.

    Args:
        store: where the content is.
        tree: the content.
        root: folder of all copies; `root_of` names it for a store in a folder.

    Raises:
        CorruptRecord: the stored content is not what was sent.
        StoreError: it cannot be written to the host's disk; StoreFull when that is full.
    """
    return provide_as(root, tree.manifest.digest, lambda dest: _fill(store, tree, dest))


def provide_as(root: Path, digest: str, fill: Callable[[str], None], *, source: str = "") -> Path:
    """Return the folder with the content of this name; filled first if it is missing or was
    changed.

    Args:
        root: folder of all copies.
        digest: the name, in hex digits.
        fill: writes the content into a folder, without write permission at the end.
        source: the URI that it is fetched from, which plans name instead of the digest. Then `fill`
            continues after an interruption: the folder may hold complete files.

    Raises:
        StoreError: it cannot be written to the host's disk; StoreFull when that is full.
    """
    place = root / digest
    try:
        if not _is_intact(place):
            with hold_lock(root, digest):
                if not _is_intact(place):
                    _build(place, fill, source)
        with suppress(OSError):  # for prune; impossible for a host that may only read
            os.utime(place)
    except OSError as error:
        kind = StoreFull if error.errno in _FULL else StoreError
        raise kind(f"The data could not be unpacked into {place}: {error}.") from error
    return place / "files"


def root_of(store: LocalStore) -> Path:
    """Return the folder of a store's copies."""
    return store.path(layout.DATA)


def copies(root: Path) -> list[CachedCopy]:
    """Return all copies, also those that were never finished."""
    used_at: dict[str, float] = {}
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    digest = entry.name.partition(".")[0]
                    # It was finished or removed since it was listed.
                    with suppress(FileNotFoundError):
                        used_at[digest] = max(
                            entry.stat(follow_symlinks=False).st_mtime, used_at.get(digest, 0.0)
                        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        CachedCopy(digest, root / digest, at, _source(root / digest))
        for digest, at in sorted(used_at.items())
    ]


def name_of(source: str) -> str:
    """Return the digest of a URI."""
    return hashlib.sha256(source.encode()).hexdigest()


def _source(place: Path) -> str:
    try:
        return store_files.content(place / "source").decode()
    except (OSError, ValueError):
        return ""


def remove(copy: CachedCopy) -> None:
    """Remove a copy, and leftovers of building it. The caller knows that no job uses it."""
    with hold_lock(copy.path.parent, copy.digest):
        for suffix in (_BUILDING, _GOING):
            _discard(Path(f"{copy.path}{suffix}"))
        _retire(copy.path)


def size_bytes(copy: CachedCopy) -> int:
    """Return the size of the files."""
    files = copy.path / "files"
    if not files.is_dir():
        return 0
    return sum(info.st_size for _, info in _walk(str(files)) if stat.S_ISREG(info.st_mode))


# -- building --------------------------------------------------------------------------------------


def _build(place: Path, fill: Callable[[str], None], source: str) -> None:
    """Build under another name, then rename, so no unfinished copy is visible. The caller holds the
    lock."""
    new = Path(f"{place}{_BUILDING}")
    if not source:
        _discard(new)
    if os.path.lexists(place):
        _log.warning("the data in %s was changed; it is being made again", place)
        _retire(place)
    try:
        files = new / "files"
        for folder in (new, files):
            folder.mkdir(mode=0o700, exist_ok=bool(source))
        fill(str(files))
        if source:
            (new / "source").write_text(name_of(source))
        (new / "seal").write_text(_seal(str(files)))
        new.rename(place)
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


def _is_intact(place: Path) -> bool:
    try:
        return store_files.content(place / "seal").decode() == _seal(str(place / "files"))
    except (OSError, ValueError):
        return False


def _seal(files: str) -> str:
    """A digest of names, sizes, inodes and times, which every accidental change alters; contents
    are not read. Of a copy with very many files the first ones count: each host that starts looks
    at them."""
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


def _retire(place: Path) -> None:
    """Rename the copy away in one step, then remove it."""
    old = Path(f"{place}{_GOING}")
    _discard(old)
    with suppress(FileNotFoundError):
        place.rename(old)
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
    """Hold the lock of one digest; waits while another process has it."""
    root.mkdir(exist_ok=True, mode=0o700)  # Not the store above it, which may have been removed.
    descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.hold_record(descriptor, start=int(digest[:15], 16), length=1)
        yield
    finally:
        os.close(descriptor)
