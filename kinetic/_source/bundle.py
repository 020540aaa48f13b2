"""The project's source tree: a list of its files with their digests.

In: a folder. Out: a `Bundle`, which `upload` sends to a store and `download` unpacks on a host.
"""

# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from kinetic._core.plan import Blob, Tree
from kinetic._core.values import dataclass
from kinetic._source import cache, hashing, manifest, walk
from kinetic._source.companions import Companions, find_top, scan_with_companions
from kinetic._source.manifest import Entry
from kinetic.errors import UsageError, name_some

NOTHING = Companions()
_LARGEST = 5
_LISTED_PATHS = 10
MANY_FILES = 10_000
"""Number of files above which the caller is warned: a host unpacks a few thousand a second."""
_RenderWarnings = Callable[[walk.Scan], tuple[str, ...]]
"""Renders the warnings about a scan."""


@dataclass(frozen=True)
class Bundle:
    """A source tree, ready to be sent.

    Attributes:
        manifest: the list of its files, folders and links, with digests.
        tree: digest and size.
        root: the folder with the files.
        warnings: warnings for the caller, one sentence each.
        largest: the largest files, (path, bytes), largest first.
        note: path of the tree's snapshot in the user's cache; None without a cache.
        elsewhere: the real path of each file that was reached through a link, by path in the tree.
    """

    manifest: bytes
    tree: Tree
    root: Path
    warnings: tuple[str, ...] = ()
    largest: tuple[tuple[str, int], ...] = ()
    note: Path | None = field(default=None, compare=False)
    elsewhere: Mapping[str, str] = field(default_factory=dict, compare=False)

    def path_on_disk(self, path: str) -> str:
        """Return the path on this machine from which a file of the tree is read."""
        return self.elsewhere.get(path) or str(self.root / path)

    def warn_of_number(self) -> tuple[str, ...]:
        """Return a warning if the tree has so many files that calls take seconds longer. Name the
        folder with most of them."""
        if self.tree.files <= MANY_FILES:
            return ()
        folders = Counter(path.rpartition("/")[0] or "." for path in self.digests())
        ((fullest, count),) = folders.most_common(1)
        return (
            f"The source tree {self.root} has {self.tree.files:,} files, {count:,} of them in "
            f"{fullest}: every call checks all of them for changes, and every host unpacks them. "
            "List files that the function does not need in .kineticignore; pass data as "
            "kinetic.Data, which hosts cache.",
        )

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file's content, by path relative to the root."""
        return {file.path: file.digest for file in manifest.list_files(self.manifest)}

    def files(self) -> list[tuple[str, int]]:
        """Return all files, (path, bytes), largest first."""
        files = [(file.path, file.size_bytes) for file in manifest.list_files(self.manifest)]
        return sorted(files, key=lambda file: (-file[1], file[0]))

    def with_entries(self, entries: Sequence[Entry]) -> Bundle:
        """Return a bundle with these entries, without links whose target is not among them."""
        data = manifest.encode(manifest.drop_broken_links(entries))
        return dataclasses.replace(self, manifest=data, tree=_tree_of(data))


def build(
    root: Path,
    *,
    exclude: Iterable[Path] = (),
    outputs: Iterable[Path] = (),
    default_excludes: bool = True,
    sparing: bool = False,
    also: Companions = NOTHING,
    script: tuple[str, ...] | None = None,
    whole: bool = True,
    cache_dir: Path,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Bundle:
    """List and hash the files below a folder. Writes only a snapshot of the tree in the cache.

    Args:
        root: the folder.
        exclude: files and folders to leave out besides those that ignore files name.
        outputs: output folders of jobs: left out like caches, unless an ignore file keeps them.
        default_excludes: whether to leave out virtual environments, caches and the like.
        sparing: whether to leave out hidden folders and files that look like keys.
        also: further folders to pack; paths in the tree are then relative to the folder that
            contains them and `root` (`find_top`).
        script: for a script whose folder is no project, the paths that belong to it: a large folder
            is reduced to these. Files that look like keys are never sent.
        whole: whether a script's folder may be packed as a whole if it is small.
        cache_dir: the user's cache folder; never source.
        clock_ns: returns nanoseconds since the epoch.

    Raises:
        UsageError: the tree is implausibly large.
    """
    top = os.path.realpath(root)
    if not os.path.isdir(top):
        raise UsageError(
            f"The project folder {root} does not exist. Set KINETIC_PACKAGE_ROOT to the folder of "
            "your project."
        )
    options = walk.ScanOptions(
        _list_left_out(top, exclude, cache_dir),
        frozenset(map(str, outputs)),
        default_excludes,
        sparing or script is not None,
    )
    if script is not None:
        if whole:
            small = dataclasses.replace(options, most=(walk.MODEST_FILES, walk.MODEST_BYTES))
            with contextlib.suppress(walk.TooMuch):
                return _build_by_walk(top, small, also, cache_dir, clock_ns)
        # Ignore git's rules here: a repository in a home folder may hold anything.
        options = dataclasses.replace(options, only=script, asks_git=False)
    return _build_by_walk(top, options, also, cache_dir, clock_ns)


def _list_left_out(top: str, exclude: Iterable[Path], cache_dir: Path) -> frozenset[str]:
    places = (*exclude, *cache.own_folders(cache_dir))
    return frozenset(os.path.realpath(os.path.join(top, path)) for path in places)


def _build_by_walk(
    top: str,
    options: walk.ScanOptions,
    also: Companions,
    cache_dir: Path,
    clock_ns: Callable[[], int],
) -> Bundle:
    kind = f"sparing:{options.only!r}:" if options.sparing else ""
    note = cache.snapshot_path(
        cache_dir,
        f"{kind}{top}:{also!r}" if also.places else kind + top,
        _list_reached(top, options.exclude),
        options.default_excludes,
    )

    def scan() -> walk.Scan:
        own = walk.scan(top, dataclasses.replace(options, imported=also.imported))
        return scan_with_companions(top, own, also, options) if also.places else own

    return _pack_if_changed(
        find_top(top, also.places),
        note,
        clock_ns,
        scan,
        _source_warnings if options.only is None else functools.partial(_script_warnings, top),
        left_out=options.exclude | options.outputs,
    )


def build_data(
    path: Path,
    *,
    exclude: Iterable[Path] = (),
    cache_dir: Path,
    clock_ns: Callable[[], int] = time.time_ns,
) -> Bundle:
    """Pack declared data (`kinetic.Data`): a folder without `exclude`, or a single file.

    Raises:
        UsageError: the path does not exist, or a part of it cannot be read.
    """
    if os.path.isdir(path):
        top = os.path.realpath(path)
        left_out = _list_left_out(top, exclude, cache_dir)
        note = cache.snapshot_path(cache_dir, f"data:{top}", left_out, False)
        return _pack_if_changed(
            top,
            note,
            clock_ns,
            lambda: walk.scan(top, walk.ScanOptions(left_out, everything=True)),
            functools.partial(_data_warnings, path),
        )
    top = os.path.realpath(path.parent)
    note = cache.snapshot_path(
        cache_dir, f"data:{top}/{path.name}:{os.path.realpath(path)}", (), False
    )
    warnings = functools.partial(_data_warnings, path)
    return _pack_if_changed(top, note, clock_ns, lambda: _scan_file(path), warnings)


def _scan_file(path: Path) -> walk.Scan:
    try:
        info = path.stat()
    except OSError as error:
        raise UsageError(f"The data {path} cannot be read: {error.strerror}.") from error
    stamp = walk.stamp_of(info)
    file = walk.FoundFile(os.path.realpath(path), info.st_mode & 0o777, info.st_size, stamp)
    return walk.Scan(files={path.name: file}, watched={file.path: stamp})


def _pack_if_changed(
    root: str,
    note: Path,
    clock_ns: Callable[[], int],
    scan: Callable[[], walk.Scan],
    render_warnings: _RenderWarnings,
    *,
    left_out: Collection[str] = (),
) -> Bundle:
    """Pack the tree; or reuse the snapshot at path `note` if the tree and the left-out paths are
    unchanged."""
    old = cache.load(note)
    if (
        old is None
        or old.left_out != _list_reached(root, left_out, old.targets)
        or not cache.is_unchanged(old)
    ):
        began_ns = clock_ns()
        old = _pack(root, scan(), old, render_warnings)
        reached = _list_reached(root, left_out, old.targets)
        old = dataclasses.replace(old, left_out=reached)
        cache.save(note, old, began_ns=began_ns)
    return Bundle(old.manifest, old.tree, Path(root), old.warnings, old.largest, note, old.followed)


def _list_reached(
    root: str, places: Collection[str], targets: Collection[str] = ()
) -> tuple[str, ...]:
    """Return those of `places` that are below the root, or below a target of the tree's links."""
    tops = tuple(f"{top.rstrip('/')}/" for top in (root, *targets))
    return tuple(sorted(path for path in places if f"{path}/".startswith(tops)))


def _pack(
    root: str, scan: walk.Scan, old: cache.Snapshot | None, render_warnings: _RenderWarnings
) -> cache.Snapshot:
    entries: list[Entry] = [manifest.Folder(path, mode) for path, mode in scan.folders.items()]
    entries += [manifest.Symlink(path, target) for path, target in scan.links.items()]
    files: list[manifest.File] = []
    inside = root.rstrip("/") + "/"
    watched = dict(scan.watched)
    contents = hashing.hash_files(scan.files.values(), hashing.read_snapshot(root, old))
    for path, file in scan.files.items():
        content = contents.get(file.path)
        if content is None:
            # A file that was removed after the walk is ignored.
            if os.path.lexists(file.path):
                scan.unreadable.append(path)
            continue
        watched[file.path] = content.stamp
        files.append(manifest.File(path, file.mode, content.size_bytes, content.digest))
    data = manifest.encode(manifest.drop_broken_links([*entries, *files]))
    largest = sorted(
        ((file.path, file.size_bytes) for file in files), key=lambda row: (-row[1], row[0])
    )[:_LARGEST]
    return cache.Snapshot(
        manifest=data,
        tree=_tree_of(data),
        warnings=render_warnings(scan),
        largest=tuple(largest),
        followed={
            path: file.path for path, file in scan.files.items() if file.path != inside + path
        },
        watched=watched,
        targets=tuple(sorted(scan.targets)),
    )


def _tree_of(data: bytes) -> Tree:
    files = manifest.list_files(data)
    blob = Blob(hashlib.sha256(data).hexdigest(), len(data))
    return Tree(blob, len(files), sum(file.size_bytes for file in files))


def _data_warnings(path: Path, scan: walk.Scan) -> tuple[str, ...]:
    """Render the warnings about declared data. Raise if a part of it cannot be read, because
    incomplete data must not be sent."""
    if scan.unreadable:
        raise UsageError(
            f"The data {path} cannot be sent, because these files or folders in it cannot be read: "
            f"{_name_some(scan.unreadable)}. Make them readable, or remove them."
        )
    texts = (
        (scan.secrets, "These files of the data look like secrets and are sent: {}."),
        (scan.broken, "Broken links in the data are left out: {}."),
        (scan.loops, "Links in the data to a folder that contains them are left out: {}."),
        (scan.special, "Paths left out of the data, neither files nor folders: {}."),
    )
    return tuple(text.format(_name_some(paths)) for paths, text in texts if paths)


def _source_warnings(scan: walk.Scan) -> tuple[str, ...]:
    texts = (
        (
            scan.secrets,
            "These files look like secrets and are sent: {}. List those that are not needed in "
            ".kineticignore.",
        ),
        (scan.kept_back, "Files left out because they look like keys or passwords: {}."),
        (scan.broken, "Broken links are left out: {}."),
        (
            scan.unreadable,
            "Not sent with the job, because they cannot be read: {}. Make them readable if the job "
            "needs them.",
        ),
        (scan.loops, "Links to a folder that contains them are left out: {}."),
        (scan.special, "Paths left out because they are neither files nor folders: {}."),
        (
            scan.too_large,
            "Too large to be sent, although installed editable or on PYTHONPATH: {}. Hosts on this "
            "machine can import it, but other hosts do not have it. List files that are not needed "
            "in its .kineticignore.",
        ),
    )
    return (
        *(text.format(_name_some(paths)) for paths, text in texts if paths),
        *dict.fromkeys(scan.without_git),
    )


def _script_warnings(root: str, scan: walk.Scan) -> tuple[str, ...]:
    sent = sorted(scan.files.keys() - scan.foreign)
    which = f"only the script and its modules are sent: {_name_some(sent)}"
    return (
        f"{root} is not a project, so {which if sent else 'none of its files is sent'}. To send "
        "more, put the files in a folder of their own with a pyproject.toml or .kineticignore.",
        *_source_warnings(scan),
    )


def _name_some(paths: Sequence[str]) -> str:
    return name_some(
        [name.encode("utf-8", "replace").decode() for name in sorted(paths)], _LISTED_PATHS
    )
