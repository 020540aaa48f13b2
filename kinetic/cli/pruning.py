"""Removal of old jobs' records, and of content (files, pickles) that no job uses any more.

Content is in use while any plan in the store names it, directly or through the record of its tree.
The search is conservative: any text in a plan or record that looks like a digest counts as a use,
so that content of damaged plans and of newer versions' plans stays.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field, replace

from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStanding, JobStatus
from kinetic._core.values import dataclass
from kinetic._datasets import cached_copy
from kinetic._datasets.cached_copy import CachedCopy
from kinetic._store import index as stored
from kinetic._store.base import Entry, Store, folder_of
from kinetic._store.gc_lock import lock_for_sweep
from kinetic._store.many import at_once, get_many
from kinetic.cli.context import AppContext

_DIGEST_DIGITS = 64
_ENDED = frozenset(status for status in JobStatus if status.ended)
_FETCHED = re.compile(rb'"source": *("(?:gs|hf)://[^"\\]*")')
"""Matches the URI of data that hosts fetch themselves, in the text of a plan."""
_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class Swept:
    """Objects that pruning removes besides old jobs: unused content, unfinished submissions,
    unpacked data, batches without jobs."""

    contents: tuple[Entry, ...] = ()
    orphans: tuple[str, ...] = ()
    data: tuple[CachedCopy, ...] = ()
    size_bytes: int = field(default=0)
    batches: tuple[str, ...] = ()


def list_ended_before(app: AppContext, moment: float) -> list[JobRef]:
    """Return the jobs that ended before the moment (seconds since the epoch), oldest first."""
    refs = app.board.refs()
    standings = app.board.read_standings(refs)
    return [ref for ref in reversed(refs) if _end_time(ref, standings[ref.job_id]) <= moment]


def _end_time(ref: JobRef, standing: JobStanding) -> float:
    """Return when the job ended; if its end was not recorded, when it was submitted. Return
    infinity if the job has not ended, or its backend does not answer."""
    if standing.ended_at is not None:
        return standing.ended_at
    return ref.created_at if standing.state in _ENDED else float("inf")


def remove(app: AppContext, ref: JobRef) -> None:
    """Remove an ended job: its resources, its records and its logs. Its output folder stays."""
    app.backend_of(ref).cleanup(ref)
    stored.remove(app.store, ref.job_id)


def find_unused(store: Store, *, older_than: float, without: Collection[str] = ()) -> Swept:
    """Return the objects that `sweep` would remove if the jobs in `without` did not exist."""
    # Content must be listed before plans are read: see gc_lock.
    trees, packs, blobs, executables = at_once(
        lambda prefix: list(store.entries(prefix)),
        [layout.TREES, layout.PACKS, layout.BLOBS, layout.EXECUTABLES],
        store.calls_at_once,
    )
    jobs = list(store.parts(layout.JOBS))
    orphans = tuple(_orphans(store, {*jobs, *store.parts(layout.LISTED)}, older_than))
    stay = set(jobs).difference(without, orphans)
    used = _find_in_plans(store, sorted(stay))
    # A submission that finds a tree's record sends no content: keep what the record names.
    used_trees = [tree for tree in trees if digest(tree) in used or tree.written_at >= older_than]
    records = get_many(store, [tree.key for tree in used_trees])
    used |= {digest(tree) for tree in used_trees}.union(*map(_digests, records.values()))
    contents = tuple(
        content
        # Remove records of trees first: an interrupted sweep must not leave a record without its
        # content.
        for content in (*trees, *packs, *blobs, *executables)
        if digest(content) not in used and content.written_at < older_than
    )
    folder = folder_of(store)
    data = tuple(
        copy
        for copy in (() if folder is None else cached_copy.list_copies(folder / layout.DATA))
        if copy.used_at < older_than and used.isdisjoint((copy.digest, copy.source))
    )
    batches = tuple(_empty_batches(store, older_than, without))
    return Swept(contents, orphans, data, _size_bytes(contents, data), batches)


def sweep(store: Store, *, older_than: float) -> Swept:
    """Remove unused content written before `older_than` (seconds since the epoch). Content of jobs
    that are being submitted stays. Return what was removed."""
    with lock_for_sweep(store):
        unused = find_unused(store, older_than=older_than)
        for job_id in unused.orphans:
            store.delete(layout.JobKeys(job_id).prefix)
            store.delete(layout.JobKeys(job_id).listing)
        for unpacked in unused.data:
            cached_copy.remove(unpacked)
        removed: list[Entry] = []
        for _, kind in itertools.groupby(
            unused.contents, lambda entry: entry.key.partition("/")[0]
        ):
            entries = list(kind)
            counts = at_once(lambda entry: store.delete(entry.key), entries, store.calls_at_once)
            removed += itertools.compress(entries, counts)
        for probe in store.entries(layout.PROBES):
            if probe.written_at < older_than:
                store.delete(probe.key)
        for group_id in unused.batches:
            store.delete(layout.GroupKeys(group_id).prefix)
    size_bytes = _size_bytes(removed, unused.data)
    return replace(unused, contents=tuple(removed), size_bytes=size_bytes)


def _size_bytes(contents: Sequence[Entry], data: Sequence[CachedCopy]) -> int:
    return sum(entry.size_bytes for entry in contents) + sum(map(cached_copy.size_bytes, data))


def digest(content: Entry) -> str:
    """Return the digest that plans and records use for an object."""
    return "".join(content.key.split("/")[-2:])[-_DIGEST_DIGITS:]


def _orphans(store: Store, jobs: set[str], older_than: float) -> Iterator[str]:
    """Yield the ids of old jobs whose submission was killed before it wrote the job's reference,
    the record by which jobs are listed."""
    for job_id in sorted(jobs.difference(stored.list_ids(store))):
        prefixes = (layout.JobKeys(job_id).prefix, layout.JobKeys(job_id).listing)
        if all(_is_older(store, prefix, older_than) for prefix in prefixes):
            yield job_id


def _empty_batches(store: Store, older_than: float, without: Collection[str]) -> Iterator[str]:
    """Yield ids of old batches that have no jobs, not counting the jobs in `without`."""
    groups = list(store.parts(layout.GROUPS))
    refs = stored.list_refs(store) if groups else []
    used = {ref.group_id for ref in refs if ref.job_id not in without}
    for group_id in groups:
        if group_id not in used and _is_older(store, layout.GroupKeys(group_id).prefix, older_than):
            yield group_id


def _is_older(store: Store, prefix: str, moment: float) -> bool:
    return all(entry.written_at < moment for entry in store.entries(prefix))


def _find_in_plans(store: Store, jobs: Sequence[str]) -> set[str]:
    """Return the digests in jobs' plans, and those of the URIs from which hosts fetch data."""
    used: set[str] = set()
    for plan in get_many(store, [layout.JobKeys(job_id).plan for job_id in jobs]).values():
        used |= _digests(plan)
        used |= {cached_copy.hash_source(json.loads(uri)) for uri in _FETCHED.findall(plan)}
    return used


def _digests(data: bytes) -> set[str]:
    return {match.decode() for match in _DIGEST.findall(data)}
