"""Finds and removes the records of old jobs, and content that no job uses any more.

In: the context, a store, times. Out: what was (or would be) removed.

Content is in use while any plan in the store names it, directly or through the record of its tree.
The search is conservative: anything that looks like a digest in a plan or a record keeps the
content of that name, so that a damaged plan, or one of a newer version, loses nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import field
from pathlib import Path

from kinetic._backends.programs import folders
from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.values import dataclass
from kinetic._datasets import cached_copy
from kinetic._datasets.cached_copy import CachedCopy
from kinetic._store import index as stored
from kinetic._store.base import Store
from kinetic._store.gc_lock import sweeping
from kinetic.cli.context import AppContext, Standing
from kinetic.errors import NotFound

CONTENT_AGE_S = 86400.0
_DIGEST_DIGITS = 64
_ENDED = frozenset(status for status in JobStatus if status.ended)
_FETCHED = re.compile(rb'"source": *("(?:gs|hf)://[^"\\]*")')
"""Data that hosts fetch, in a plan."""
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class StoredContent:
    """One object of content; `written_at` is in seconds since the epoch."""

    key: str
    digest: str
    size_bytes: int
    written_at: float


@dataclass(frozen=True)
class Swept:
    """What a sweep finds: unused content, unfinished submissions, unpacked data, folders of hosts
    that were programs, batches without jobs."""

    contents: tuple[StoredContent, ...] = ()
    orphans: tuple[str, ...] = ()
    data: tuple[CachedCopy, ...] = ()
    programs: tuple[Path, ...] = ()
    size_bytes: int = field(default=0)
    batches: tuple[str, ...] = ()


def ended_before(app: AppContext, moment: float) -> list[JobRef]:
    """Return the jobs that ended before the moment (seconds since the epoch), oldest first."""
    refs = app.refs()
    standings = app.standings(refs)
    return [ref for ref in reversed(refs) if _ended_at(ref, standings[ref.job_id]) < moment]


def _ended_at(ref: JobRef, found: Standing) -> float:
    """When the job ended; infinity if it has not, or if its backend cannot be asked."""
    if found.ending is not None:
        return found.ending.at
    return ref.created_at if found.state in _ENDED else float("inf")


def remove(app: AppContext, ref: JobRef) -> None:
    """Remove what the backend holds, the records and the logs of an ended job; its output folder
    stays."""
    app.backend_of(ref).cleanup(ref)
    app.store.delete(layout.job(ref.job_id))
    # last, so that an interrupted removal can be found and repeated
    stored.remove(app.store, ref.job_id)


def find_unused(store: Store, *, older_than: float, without: Collection[str] = ()) -> Swept:
    """Return what a sweep would remove if the jobs in `without` were gone; nothing in a store
    that is not a folder (see gc_lock)."""
    programs = tuple(path for path, _ in folders.unused(folders.root(), before=older_than))
    if (folder := store.as_folder()) is None:
        return Swept(programs=programs)
    orphans = tuple(_orphans(store, folder, older_than))
    used = _named_by_plans(store, folder, {*without, *orphans})
    trees = [*_contents(folder, layout.TREES)]
    # A submission that finds the record of a tree sends nothing: keep what the record names.
    kept = [tree for tree in trees if tree.digest in used or tree.written_at >= older_than]
    used |= {tree.digest for tree in kept}
    for tree in kept:
        used |= _digests(_content(store, tree.key))
    written_at = {pack.digest: pack.written_at for pack in _contents(folder, layout.PACK_INDEXES)}
    contents = tuple(
        content
        # In case we are killed midway: each comes before what it vouches for.
        for content in (
            *trees,
            *_contents(folder, layout.PACK_INDEXES),
            *_contents(folder, layout.PACKS),
            *_contents(folder, layout.BLOBS),
        )
        if content.digest not in used
        and max(content.written_at, written_at.get(content.digest, 0.0)) < older_than
    )
    data = tuple(
        r
        for r in cached_copy.copies(folder / layout.DATA)
        if r.used_at < older_than and used.isdisjoint((r.digest, r.source))
    )
    size_bytes = sum(c.size_bytes for c in contents) + sum(map(cached_copy.size_bytes, data))
    batches = tuple(_empty_batches(store, folder, older_than, without))
    return Swept(contents, orphans, data, programs, size_bytes, batches)


def sweep(store: Store, *, older_than: float) -> Swept:
    """Remove unused content written before `older_than` (seconds since the epoch), while no job is
    being submitted."""
    with sweeping(store):
        swept = find_unused(store, older_than=older_than)
        for job_id in swept.orphans:
            store.delete(layout.job(job_id))
        for unpacked in swept.data:
            cached_copy.remove(unpacked)
        for path in swept.programs:
            shutil.rmtree(path, ignore_errors=True)
        for content in swept.contents:
            store.delete(content.key)
        for group_id in swept.batches:
            store.delete(layout.group(group_id))
    return swept


def _orphans(store: Store, folder: Path, older_than: float) -> Iterator[str]:
    """Jobs without a reference: their submission was killed before it wrote one."""
    for entry in _entries(folder / layout.JOBS):
        if not store.has(layout.ref(entry.name)) and _is_older(entry, older_than):
            yield entry.name


def _empty_batches(
    store: Store, folder: Path, older_than: float, without: Collection[str]
) -> Iterator[str]:
    """Batches that have no jobs any more."""
    groups = _entries(folder / layout.GROUPS)
    used = (
        {ref.group_id for ref in stored.refs(store) if ref.job_id not in without}
        if groups
        else set()
    )
    for entry in groups:
        if entry.name not in used and _is_older(entry, older_than):
            yield entry.name


def _named_by_plans(store: Store, folder: Path, without: Collection[str]) -> set[str]:
    """The digests that appear anywhere in plans, and those of the URIs of data."""
    used: set[str] = set()
    for entry in _entries(folder / layout.JOBS):
        if entry.name not in without:
            plan = _content(store, layout.plan(entry.name))
            used |= _digests(plan)
            used |= {cached_copy.name_of(json.loads(uri)) for uri in _FETCHED.findall(plan)}
    return used


def _content(store: Store, key: str) -> bytes:
    try:
        return store.get(key)
    except NotFound:
        return b""


def _digests(data: bytes) -> set[str]:
    return {match.decode() for match in _DIGEST.findall(data)}


def _contents(root: Path, prefix: str) -> Iterator[StoredContent]:
    """All content below a prefix."""
    for entry in _entries(root / prefix):
        if entry.is_dir(follow_symlinks=False):
            yield from _contents(root, f"{prefix}/{entry.name}")
        elif (stat := _stat(entry)) is not None:
            key = f"{prefix}/{entry.name}"
            digest = "".join(key.split("/")[-2:])[-_DIGEST_DIGITS:]
            yield StoredContent(key, digest, stat.st_size, stat.st_mtime)


def _is_older(entry: os.DirEntry[str], moment: float) -> bool:
    stat = _stat(entry)
    return stat is not None and stat.st_mtime < moment


def _stat(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Size and times; None if it was removed since it was listed."""
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
