"""Which records and which content nobody needs any more, and their removal.

In: a desk, a store, times. Out: what was (or would be) removed.

Content is in use while any plan in the store names it, directly or through the lists of its tree.
The search for names is generous on purpose: whatever looks like a digest in a plan or a list keeps
the content of that name, so that a damaged plan, or one of a newer version, loses nothing.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._datasets import cached_copy
from kinetic._datasets.cached_copy import Replica
from kinetic._source import manifest
from kinetic._store import files
from kinetic._store import index as stored
from kinetic._store.base import Store
from kinetic._store.gc_lock import sweeping
from kinetic._store.local import LocalStore
from kinetic.cli.context import Desk
from kinetic.errors import CorruptRecord, NotFound

CONTENT_AGE_S = 86400.0
_HEAD_BYTES = 64
_ENDED = frozenset(status for status in JobStatus if status.ended)
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class Content:
    """Stored content: where it is, its digest, its size, and when it was written (seconds since the
    epoch)."""

    path: Path
    digest: str
    size_bytes: int
    written_at: float

    def is_list(self) -> bool:
        """Whether it lists a folder of a source tree, and is no source file or payload; False when
        it is gone."""
        try:
            with files.opened(self.path) as file:
                head = file.read(_HEAD_BYTES)
        except (FileNotFoundError, IsADirectoryError):  # A host found it damaged.
            return False
        return head.startswith(b'{"schema"') and b'"entries"' in head


@dataclass(frozen=True)
class Swept:
    """What a sweep found: unused content, jobs that were never finished being submitted, unpacked
    data, batches without jobs."""

    contents: tuple[Content, ...] = ()
    orphans: tuple[str, ...] = ()
    data: tuple[Replica, ...] = ()
    size_bytes: int = field(default=0)
    batches: tuple[str, ...] = ()


def ended_before(desk: Desk, moment: float) -> list[JobRef]:
    """Return the jobs that ended before the moment (seconds since the epoch), oldest first."""
    return [ref for ref in reversed(desk.refs()) if _ended_at(desk, ref) < moment]


def _ended_at(desk: Desk, ref: JobRef) -> float:
    """When the job ended; the end of time for one that has not, or of which nobody here can
    tell."""
    ending = desk.ending(ref)
    if ending is not None:
        return ending.at
    return ref.created_at if desk.state(ref) in _ENDED else float("inf")


def remove(desk: Desk, ref: JobRef) -> None:
    """Remove what the backend holds, the records and the logs of a job that has ended; its output
    folder stays."""
    desk.backend_of(ref).cleanup(ref)
    desk.store.delete(layout.job(ref.job_id))
    # last: an interrupted removal can be found and done again
    desk.store.delete(layout.ref(ref.job_id))


def find_unused(store: Store, *, older_than: float, without: Collection[str] = ()) -> Swept:
    """Return what a sweep would remove, taking the jobs `without` as gone. Stores other than
    folders have rules of their own."""
    if not isinstance(store, LocalStore):
        return Swept()
    orphans = tuple(_orphans(store, older_than))
    used = _used(store, {*without, *orphans})
    idle = [content for content in _contents(store) if content.digest not in used]
    # A submission that finds a list in the store sends nothing below it: content goes only together
    # with all lists above it.
    kept = _below(store, {c.digest for c in idle if c.written_at >= older_than and c.is_list()})
    unused = [c for c in idle if c.written_at < older_than and c.digest not in kept]
    rank = _from_the_root(
        {
            c.digest: manifest.named(_content(store, layout.blob(c.digest)))
            for c in unused
            if c.is_list()
        }
    )
    # should we be killed on the way
    contents = tuple(sorted(unused, key=lambda c: rank.get(c.digest, len(rank))))
    data = tuple(
        r
        for r in cached_copy.replicas(cached_copy.root_of(store))
        if r.used_at < older_than and r.digest not in used
    )
    size_bytes = sum(c.size_bytes for c in contents) + sum(map(cached_copy.size_bytes, data))
    return Swept(
        contents, orphans, data, size_bytes, tuple(_empty_batches(store, older_than, without))
    )


def sweep(store: Store, *, older_than: float) -> Swept:
    """Remove unused content that was written before `older_than` (seconds since the epoch), while
    no job is being submitted."""
    with sweeping(store):
        swept = find_unused(store, older_than=older_than)
        for job_id in swept.orphans:
            store.delete(layout.job(job_id))
        for unpacked in swept.data:
            cached_copy.remove(unpacked)
        for content in swept.contents:
            store.delete(layout.blob(content.digest))
        for group_id in swept.batches:
            store.delete(layout.group(group_id))
    return swept


def _orphans(store: LocalStore, older_than: float) -> Iterator[str]:
    """Jobs without a reference: submission was killed before it was written."""
    for entry in _entries(store.path(layout.JOBS)):
        if not store.has(layout.ref(entry.name)) and _is_older(entry, older_than):
            yield entry.name


def _empty_batches(store: LocalStore, older_than: float, without: Collection[str]) -> Iterator[str]:
    """Batches that have no job any more."""
    groups = _entries(store.path(layout.GROUPS))
    used = (
        {ref.group_id for ref in stored.refs(store) if ref.job_id not in without}
        if groups
        else set()
    )
    for entry in groups:
        if entry.name not in used and _is_older(entry, older_than):
            yield entry.name


def _used(store: LocalStore, without: Collection[str]) -> set[str]:
    """The digests of all content that a plan names."""
    used: set[str] = set()
    roots: set[str] = set()
    for entry in _entries(store.path(layout.JOBS)):
        if entry.name not in without:
            plan = _content(store, layout.plan(entry.name))
            named = _digests(plan)
            used |= named
            roots |= named if (known := _roots(plan)) is None else known
    return used | _below(store, roots)


def _below(store: LocalStore, lists: set[str]) -> set[str]:
    """The digests of all content that can be reached from these lists."""
    reached: set[str] = set()
    todo, seen = set(lists), set(lists)
    while todo:
        data = _content(store, layout.blob(todo.pop()))
        reached |= _digests(data)
        new = manifest.named(data) - seen
        todo |= new
        seen |= new
    return reached


def _from_the_root(lists: Mapping[str, set[str]]) -> dict[str, int]:
    """Number lists, given what each of them names, so that each comes before those; without any
    that name each other."""
    named_by = Counter(digest for below in lists.values() for digest in below)
    ordered = [digest for digest in lists if not named_by[digest]]
    for digest in ordered:  # grows meanwhile
        for below in lists[digest] & lists.keys():
            named_by[below] -= 1
            if not named_by[below]:
                ordered.append(below)
    return {digest: number for number, digest in enumerate(ordered)}


def _roots(plan: bytes) -> set[str] | None:
    """The roots' lists that a plan names; None when the plan cannot be read, for then any of its
    digests may be one."""
    try:
        document = record.parse(plan)
        trees = [document["tree"], *(data["tree"] for data in document.get("data", ()))]
        return {tree["manifest"]["digest"] for tree in trees if tree is not None} & _digests(plan)
    except (CorruptRecord, KeyError, TypeError):
        return None


def _content(store: LocalStore, key: str) -> bytes:
    try:
        return store.get(key)
    except NotFound:
        return b""


def _digests(data: bytes) -> set[str]:
    return {found.decode() for found in _DIGEST.findall(data)}


def _contents(store: LocalStore) -> Iterator[Content]:
    for folder in _entries(store.path(layout.BLOBS)):
        for entry in _entries(Path(folder.path)):
            if (facts := _facts(entry)) is not None:
                yield Content(
                    Path(entry.path), folder.name + entry.name, facts.st_size, facts.st_mtime
                )


def _is_older(entry: os.DirEntry[str], moment: float) -> bool:
    facts = _facts(entry)
    return facts is not None and facts.st_mtime < moment


def _facts(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Size and times; None when it was removed since it was listed."""
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
