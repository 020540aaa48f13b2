"""Find jobs in a store by their references: small records of where a job runs.

Reading the reference of each job is fast in a folder and slow over a network. So stores without a
folder also have empty objects whose keys encode the reference and, later, the end of a job: to list
the jobs, it is enough to list these keys. The objects are a cache: if one is missing, damaged or
out of date, a list only takes longer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kinetic._core import layout, record
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store import files
from kinetic._store.base import Store, folder_of, is_near
from kinetic._store.many import at_once, put_many
from kinetic.errors import CorruptRecord, NotFound, UsageError, name_some

if TYPE_CHECKING:
    from kinetic._core.outcome import Outcome

_ID = re.compile(r"[a-z0-9][a-z0-9_-]*")
_MOST_IDS = 5
_REF, _END = "ref-", "end-"
_LONGEST_KEY_BYTES = 900
"""Largest key that encodes a reference or an outcome; buckets allow 1024 bytes."""


class JobListing(NamedTuple):
    """The jobs of a store.

    Attributes:
        refs: the jobs, newest first.
        endings: by job id, a part of the outcome of jobs that have ended, if a key has it.
    """

    refs: list[JobRef]
    endings: Mapping[str, Mapping[str, Any]]


def list_refs(store: Store) -> list[JobRef]:
    """Return the references of all jobs, newest first. Warn about damaged ones and skip them."""
    return list_jobs(store).refs


def list_jobs(store: Store) -> JobListing:
    """List all jobs. Warn about damaged references and skip them."""
    if is_near(store):
        listed = JobListing(_readable(store, _keys(store)), {})
    else:
        listed = _read_listing(store)
    listed.refs.sort(key=lambda ref: (ref.created_at, ref.job_id), reverse=True)
    return listed


def read_refs(store: Store, job_ids: Collection[str]) -> dict[str, JobRef]:
    """Return the references of these jobs by id, without missing and damaged ones."""
    wanted = {layout.JobKeys(job_id).ref for job_id in job_ids}
    if is_near(store):
        refs = _readable(store, [key for key in _keys(store) if key in wanted])
    else:
        refs = [
            ref for ref in _read_listing(store).refs if layout.JobKeys(ref.job_id).ref in wanted
        ]
    return {ref.job_id: ref for ref in refs}


def add(store: Store, ref: JobRef) -> None:
    """Write the reference of a job."""
    data = {layout.JobKeys(ref.job_id).ref: json.dumps(ref.to_json(), indent=1).encode() + b"\n"}
    if not is_near(store) and (key := _entry(ref.job_id, _REF, ref.to_json())):
        data[key] = b""
    put_many(store, data)


def remove(store: Store, job_id: str) -> None:
    """Remove a job's records and its reference."""
    store.delete(layout.JobKeys(job_id).prefix)
    if not is_near(store):
        store.delete(layout.JobKeys(job_id).listing)
    # Remove the reference after the records, so that an interrupted removal can be repeated.
    store.delete(layout.JobKeys(job_id).ref)
    # Another process may have written the job's outcome meanwhile.
    store.delete(layout.JobKeys(job_id).prefix)


def write_outcome(store: Store, job_id: str, outcome: Outcome, *, if_absent: bool = False) -> bool:
    """Write a job's verdict (with `if_absent`, only the first); return whether this call wrote."""
    data = json.dumps(outcome.to_json()).encode()
    wrote = store.put(layout.JobKeys(job_id).outcome, data, if_absent=if_absent)
    if wrote and not is_near(store):
        started = [report.started_at for report in outcome.reports if report.started_at]
        excerpt = {
            "verdict": outcome.verdict,
            "ended_at": outcome.ended_at,
            "reports": [{"started_at": min(started)}] if started else [],
        }
        if key := _entry(job_id, _END, excerpt):
            store.put(key, b"")
    return wrote


def list_ids(store: Store) -> list[str]:
    """Return the ids of all jobs, without reading their references."""
    return [_id(key) for key in _keys(store)]


def find(store: Store, text: str) -> JobRef:
    """Return the job with this id, or the only one whose id begins with the text.

    Raises:
        NotFound: no id begins with the text; `suggestions` has the nearest ids.
        UsageError: several ids begin with the text, or it cannot be an id.
        CorruptRecord: the reference is damaged.
    """
    wanted = _check_id(text)
    try:
        return _read_ref(store, layout.JobKeys(wanted).ref)
    except NotFound:
        pass  # Search outside of the handler: errors must not be chained to this one.
    return _read_ref(store, layout.JobKeys(_find_only(wanted, store)).ref)


def find_to_end(store: Store, text: str) -> JobRef:
    """Find a job in order to stop or remove it, like `find`. But if the store is a folder, a job
    with a damaged or lost reference counts as one of the local backend.

    Raises:
        NotFound, UsageError: as in `find`.
        CorruptRecord: the reference is damaged, and only it says where the job runs.
    """
    try:
        return find(store, text)
    except (CorruptRecord, NotFound) as error:
        wanted = _check_id(text)
        if (folder := folder_of(store)) is None:
            raise
        if isinstance(error, CorruptRecord):
            wanted = _find_only(wanted, store)
        elif not (folder / layout.JobKeys(wanted).prefix).is_dir():
            raise
        return JobRef(wanted, Place("local"), "", "", wanted, 0.0, store.uri)


def _check_id(text: str) -> str:
    if not isinstance(text, str) or not _ID.fullmatch(text.strip().lower()):
        raise UsageError(
            f"{text!r} is not a job id. Ids look like job-1a2b3c4d; the beginning of one is enough."
        )
    return text.strip().lower()


def _keys(store: Store) -> list[str]:
    """Return the keys of all references, including damaged ones that are not files."""
    return [*store.list(layout.REFS), *_list_misplaced(store)]


def _list_misplaced(store: Store) -> list[str]:
    if (folder := folder_of(store)) is not None:
        with suppress(OSError), os.scandir(folder / layout.REFS) as entries:
            return [
                f"{layout.REFS}/{e.name}"
                for e in entries
                if e.name.endswith(".json") and not files.is_file(e)
            ]
    return []


def _find_only(wanted: str, store: Store) -> str:
    from difflib import get_close_matches  # Only an error needs it.

    existing = list_ids(store)
    if wanted in existing:
        return wanted
    matching = [i for i in existing if i.startswith(wanted)] or [
        i for i in existing if i.startswith(f"job-{wanted}")
    ]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(
            f"{len(matching)} job ids begin with {wanted!r}: {name_some(matching, _MOST_IDS)}. "
            "Write more of the id."
        )
    if wanted.startswith("grp-"):
        raise NotFound(
            f"{wanted} is the id of a batch. `kinetic jobs list --group {wanted}` lists its jobs; "
            "`kinetic jobs status`, `cancel` and `cleanup` also take the id of a batch."
        )
    nearest = get_close_matches(wanted, existing, n=3, cutoff=0.75)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    raise NotFound(
        f"There is no job {wanted!r} in the store {store.uri}.{hint} `kinetic jobs list --all` "
        "lists all jobs.",
        suggestions=nearest,
    )


def _entry(job_id: str, kind: str, document: Mapping[str, Any]) -> str:
    """Return a key that encodes the document; "" if it would be too long."""
    import zlib  # not needed for a store in a folder
    from base64 import urlsafe_b64encode

    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 9)
    key = f"{layout.JobKeys(job_id).listing}/{kind}{urlsafe_b64encode(packed).decode()}"
    return key if len(key) <= _LONGEST_KEY_BYTES else ""


def _decode_key(key: str, kind: str) -> dict[str, Any] | None:
    """Return the document encoded in a key; None if the key is damaged or of another kind."""
    import zlib
    from base64 import urlsafe_b64decode

    name = key.rpartition("/")[2]
    if not name.startswith(kind):
        return None
    with suppress(ValueError, zlib.error, CorruptRecord):
        return record.parse(zlib.decompress(urlsafe_b64decode(name.removeprefix(kind))))
    return None


def _read_listing(store: Store) -> JobListing:
    prefixes = [layout.REFS, layout.LISTED]
    keys, entries = at_once(lambda p: list(store.list(p)), prefixes, store.calls_at_once)
    keys_by_id = {_id(key): key for key in keys}
    entry_refs: dict[str, list[JobRef]] = {}
    endings: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        job_id = entry.split("/")[1]
        if (end := _decode_key(entry, _END)) is not None:
            endings[job_id] = end
        elif job_id in keys_by_id and (document := _decode_key(entry, _REF)) is not None:
            with suppress(CorruptRecord):
                if (ref := _parse_ref(document)).job_id == job_id:
                    entry_refs.setdefault(job_id, []).append(ref)
    # A job has two entries if a writer was killed: read its reference instead.
    cached = {job_id: refs[0] for job_id, refs in entry_refs.items() if len(refs) == 1}
    uncached = [key for job_id, key in keys_by_id.items() if job_id not in cached]
    return JobListing([*cached.values(), *_readable(store, uncached)], endings)


def _readable(store: Store, keys: Sequence[str]) -> list[JobRef]:
    refs = at_once(lambda key: _read_if_sound(store, key), keys, store.calls_at_once)
    return [ref for ref in refs if ref is not None]


def _read_if_sound(store: Store, key: str) -> JobRef | None:
    try:
        return _read_ref(store, key)
    except NotFound:
        return None  # The job was removed since it was listed.
    except CorruptRecord as damage:
        import logging  # needed only here

        logging.getLogger("kinetic.storage").warning("%s is skipped. %s", _id(key), damage)
        return None


def _read_ref(store: Store, key: str) -> JobRef:
    try:
        return _parse_ref(record.parse(store.get(key)))
    except NotFound:
        if key in _list_misplaced(store):
            raise _corrupt_ref(key, "it is not a file") from None
        raise
    except CorruptRecord as error:
        raise _corrupt_ref(key, str(error).partition(" is damaged: ")[2] or str(error)) from error


def _corrupt_ref(key: str, why: str) -> CorruptRecord:
    job_id = _id(key)
    return CorruptRecord(
        f"The record of {job_id} in the store is damaged ({why.rstrip('.')}). `kinetic jobs "
        f"cleanup {job_id}` removes the job."
    )


def _parse_ref(document: dict[str, Any]) -> JobRef:
    ref = JobRef.from_json(document)
    texts = (ref.job_id, ref.backend, ref.accelerator, ref.display_name, ref.store_uri)
    sound = (
        all(isinstance(t, str) for t in texts)
        and isinstance(ref.created_at, int | float)
        and isinstance(ref.hosts, int)
    )
    if not sound:
        raise CorruptRecord("the record's fields have the wrong types")
    return ref


def _id(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")
