"""The project's source tree on its way to the hosts, by content: what is there already is not sent again.

In: a folder, later a store. Out: a `Bundle`, its blobs in the store, on the host the same folder. Called by planning (`build`),
`data` (`build_data`), submission (`upload`) and the host's workspace (`unpack`).
"""

# ruff: noqa: PTH118

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kinetic.errors import SourceChanged, UsageError
from kinetic.job import paths
from kinetic.job.plan import Blob, Tree
from kinetic.packaging import hashing, manifest, snapshot, walk
from kinetic.packaging.arrival import unpack
from kinetic.packaging.threads import in_threads, worth_it
from kinetic.storage.base import Store
from kinetic.storage.local import LocalStore

_LARGEST = 5
_NAMED = 10
_WHOLE_BYTES = 64 << 20
_Told = Callable[[walk.Scan], tuple[str, ...]]
"""What people should know of a walk."""

__all__ = ["Bundle", "Sent", "build", "build_data", "unpack", "upload"]


@dataclass(frozen=True)
class Bundle:
    """A source tree, packed.

    Attributes:
        manifests: the lists of its folders, one a line, the root's last; the digest of that one names the tree.
        tree: digest and size.
        root: the folder it was packed from.
        warnings: what people should know of it, one sentence each.
        largest: the largest files, (path, bytes), largest first.
    """

    manifests: bytes
    tree: Tree
    root: Path
    warnings: tuple[str, ...] = ()
    largest: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Sent:
    """What an upload wrote: files that the store did not have, their total size, and that of the lists which name them."""

    files: int
    size_bytes: int
    lists_bytes: int = 0


def build(
    root: Path,
    *,
    exclude: Iterable[Path] = (),
    default_excludes: bool = True,
    cache_dir: Path,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Bundle:
    """Pack the tree below the root; creates nothing but a note in the cache.

    Args:
        root: the folder.
        exclude: files and folders to leave out besides what the ignore files say.
        default_excludes: whether virtual environments, caches and the like are left out.
        cache_dir: the user's cache folder; also left out.
        clock_ns: nanoseconds since the epoch.

    Raises:
        UsageError: the tree is too large to be meant, or a file does not stand still.
    """
    top = os.path.realpath(root)
    if not os.path.isdir(top):
        raise UsageError(f"The project's folder {root} does not exist.")
    left_out = {os.path.realpath(os.path.join(top, path)) for path in (*exclude, cache_dir / "trees")}
    note = snapshot.place(cache_dir, top, left_out, default_excludes)
    return _packed(top, note, clock_ns, lambda: walk.scan(top, exclude=left_out, default_excludes=default_excludes), _of_sources)


def build_data(
    path: Path, *, exclude: Iterable[Path] = (), cache_dir: Path, clock_ns: Callable[[], int] = time.time_ns
) -> Bundle:
    """Pack declared data: a whole folder, or a file as a tree of one file. Nothing is left out but `exclude`.

    Raises:
        UsageError: there is nothing at the path, or a part of it cannot be read or does not stand still.
    """
    if os.path.isdir(path):
        top = os.path.realpath(path)
        left_out = {os.path.realpath(each) for each in (*exclude, cache_dir / "trees")}
        note = snapshot.place(cache_dir, f"data:{top}", left_out, False)
        return _packed(
            top, note, clock_ns, lambda: walk.scan(top, exclude=left_out, default_excludes=False, everything=True), _of_data
        )
    top = os.path.realpath(path.parent)
    note = snapshot.place(cache_dir, f"data:{top}/{path.name}:{os.path.realpath(path)}", (), False)
    return _packed(top, note, clock_ns, lambda: _one_file(path), _of_data)


def _one_file(path: Path) -> walk.Scan:
    try:
        info = path.stat()
    except OSError as error:
        raise UsageError(f"The data {path} cannot be read: {error.strerror}.") from error
    stamp = walk.stamp_of(info)
    found = walk.FoundFile(os.path.realpath(path), info.st_mode & 0o777, info.st_size, stamp)
    return walk.Scan(files={path.name: found}, watched={found.path: stamp})


def _packed(root: str, note: Path, clock_ns: Callable[[], int], scan: Callable[[], walk.Scan], told: _Told) -> Bundle:
    """Pack, unless nothing has changed since that was done last."""
    old = snapshot.load(note)
    if old is None or not snapshot.unchanged(old):
        began_ns = clock_ns()
        old = _pack(root, scan(), old, told)
        snapshot.save(note, old, began_ns=began_ns)
    return Bundle(old.manifests, old.tree, Path(root), old.warnings, old.largest)


def upload(bundle: Bundle, store: Store) -> Sent:
    """Bring the tree's content into the store; a folder whose list is there sends nothing.

    A list comes after all that it names, so that one which is there vouches for everything below it.

    Raises:
        SourceChanged: a file has changed since it was packed.
        StoreError: the store does not take it.
    """
    if store.has(paths.blob(bundle.tree.manifest.digest)):
        return Sent(0, 0)
    distant = not isinstance(store, LocalStore)
    lists = manifest.split(bundle.manifests)
    levels, sources = _absent(bundle, lists, store, distant)
    worth = distant or worth_it(bundle.tree.files, bundle.tree.size_bytes)
    sizes = in_threads(lambda item: _send(store, *item), list(sources.items()), worth=worth)
    sent = [size for size in sizes if size is not None]
    lists_bytes = 0
    for level in reversed(levels):
        written = in_threads(lambda digest: store.put(paths.blob(digest), lists[digest], if_absent=True), level, worth=distant)
        lists_bytes += sum(len(lists[digest]) for digest, wrote in zip(level, written, strict=True) if wrote)
    return Sent(len(sent), sum(sent), lists_bytes)


def _absent(bundle: Bundle, lists: Mapping[str, bytes], store: Store, distant: bool) -> tuple[list[list[str]], dict[str, Path]]:
    """Return the lists that the store lacks, level by level from the root, and where to read the contents that they name."""
    levels: list[list[str]] = []
    sources: dict[str, Path] = {}
    level = {bundle.tree.manifest.digest: ""}
    while level:
        there = in_threads(lambda digest: store.has(paths.blob(digest)), list(level), worth=distant)
        absent = {digest: path for (digest, path), has in zip(level.items(), there, strict=True) if not has}
        levels.append(list(absent))
        level = {}
        for digest, folder in absent.items():
            for entry in manifest.contents(folder, lists[digest]):
                if isinstance(entry, manifest.File):
                    sources[entry.digest] = bundle.root / entry.path
                elif not isinstance(entry, manifest.Link):
                    level[entry.digest] = entry.path
    return levels, sources


def _pack(root: str, scan: walk.Scan, old: snapshot.Snapshot | None, told: _Told) -> snapshot.Snapshot:
    entries: list[manifest.Entry] = [manifest.Folder(path, mode) for path, mode in scan.folders.items()]
    entries += [manifest.Link(path, target) for path, target in scan.links.items()]
    files: list[manifest.File] = []
    inside = root.rstrip("/") + "/"
    watched = dict(scan.watched)
    contents = hashing.contents(scan.files.values(), hashing.known(root, old))
    for path, found in scan.files.items():
        content = contents.get(found.path)
        if content is None:
            scan.unreadable.append(path)
            continue
        watched[found.path] = content.stamp
        files.append(manifest.File(path, found.mode, content.size_bytes, content.digest))
    lists = manifest.encode([*entries, *files])
    digest, data = next(reversed(lists.items()))
    largest = sorted(((file.path, file.size_bytes) for file in files), key=lambda each: (-each[1], each[0]))[:_LARGEST]
    return snapshot.Snapshot(
        manifests=manifest.join(lists),
        tree=Tree(Blob(digest, len(data)), len(files), sum(file.size_bytes for file in files)),
        warnings=told(scan),
        largest=tuple(largest),
        followed={path: found.path for path, found in scan.files.items() if found.path != inside + path},
        watched=watched,
    )


def _of_data(scan: walk.Scan) -> tuple[str, ...]:
    """Declared data arrives whole or not at all."""
    if scan.unreadable:
        raise UsageError(f"This part of the data cannot be read: {_named(scan.unreadable)}. Make it readable, or take it out.")
    texts = (
        (scan.secrets, "These files of the data look like secrets and are sent: {}."),
        (scan.broken, "Links in the data that lead nowhere are left out: {}."),
        (scan.loops, "Links in the data to a folder that they lie in are left out: {}."),
        (scan.special, "What is neither file nor folder is left out of the data: {}."),
    )
    return tuple(text.format(_named(found)) for found, text in texts if found)


def _of_sources(scan: walk.Scan) -> tuple[str, ...]:
    texts = (
        (scan.secrets, "These files look like secrets and are sent: {}. Leave out in .kineticignore what is not needed."),
        (scan.broken, "Links that lead nowhere are left out: {}."),
        (scan.unreadable, "What cannot be read is left out: {}."),
        (scan.loops, "Links to a folder that they lie in are left out: {}."),
        (scan.special, "What is neither file nor folder is left out: {}."),
    )
    return tuple(text.format(_named(found)) for found, text in texts if found)


def _named(found: Sequence[str]) -> str:
    names = ", ".join(name.encode("utf-8", "replace").decode() for name in sorted(found)[:_NAMED])
    return f"{names} and {len(found) - _NAMED} more" if len(found) > _NAMED else names


def _send(store: Store, digest: str, source: Path) -> int | None:
    """Put one content; return its size, or None when it was there."""
    key = paths.blob(digest)
    if store.has(key):
        return None
    try:
        size = source.stat().st_size
        written = _put_large(store, key, digest, source) if size > _WHOLE_BYTES else _put_small(store, key, digest, source)
    except OSError as error:
        raise UsageError(f"{source} could not be read while it was being sent: {error}. Submit again.") from error
    return size if written else None


def _put_small(store: Store, key: str, digest: str, source: Path) -> bool:
    data = source.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise _changed(source)
    return store.put(key, data, if_absent=True)


def _put_large(store: Store, key: str, digest: str, source: Path) -> bool:
    """Put a file that is too large for memory: between hashing and copying it must not have been touched."""
    content = hashing.read(str(source))
    if content.digest != digest:
        raise _changed(source)
    written = store.put(key, source, if_absent=True)
    if walk.stamp_at(str(source)) != content.stamp:
        if written:
            store.delete(key)
        raise _changed(source)
    return written


def _changed(source: Path) -> SourceChanged:
    return SourceChanged(f"{source} has changed since the source tree was packed. Submit again when nothing writes to it.")
