"""Finding jobs: the references in a store.

In: a store, the beginning of an id. Out: `JobRef`s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kinetic._core import layout, record
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._store.base import Store
from kinetic.errors import CorruptRecord, NotFound, UsageError

_ID = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SHOWN = 5


def refs(store: Store) -> list[JobRef]:
    """Return the references of all jobs, newest first; a damaged one is passed over with a
    warning."""
    return sorted(_readable(store), key=lambda ref: (ref.created_at, ref.job_id), reverse=True)


def ids(store: Store) -> list[str]:
    """Return the ids of all jobs, without reading their references."""
    return [_id(key) for key in _keys(store)]


def find(store: Store, text: str) -> JobRef:
    """Return the job with this id, or the only one whose id begins so.

    Raises:
        NotFound: no id begins so; `suggestions` has the nearest.
        UsageError: several do, or the text cannot be an id.
        CorruptRecord: the reference is damaged.
    """
    wanted = _checked(text)
    try:
        return _read(store, layout.ref(wanted))
    except NotFound:
        return _read(store, layout.ref(_only(wanted, ids(store))))


def find_to_end(store: Store, text: str) -> JobRef:
    """Like `find`; on this machine a damaged or lost reference is replaced by what it takes to stop
    and remove the job.

    Raises:
        NotFound, UsageError: as above.
        CorruptRecord: the reference is damaged, and where the job runs is known to nobody else.
    """
    try:
        return find(store, text)
    except (CorruptRecord, NotFound) as error:
        wanted = _checked(text)
        if (folder := store.as_folder()) is None:
            raise
        if isinstance(error, CorruptRecord):
            wanted = _only(wanted, ids(store))
        elif not (folder / layout.job(wanted)).is_dir():
            raise
        return JobRef(wanted, Place("local"), "", "", wanted, 0.0, store.uri)


def _checked(text: str) -> str:
    if not isinstance(text, str) or not _ID.fullmatch(text.strip().lower()):
        raise UsageError(
            f"{text!r} is not a job id. Ids look like job-1a2b3c4d, and their beginning is enough."
        )
    return text.strip().lower()


def _keys(store: Store) -> list[str]:
    """The keys of all references, also of those in whose place lies something that is no file."""
    return [*store.list(layout.REFS), *_misplaced(store)]


def _misplaced(store: Store) -> list[str]:
    if (folder := store.as_folder()) is not None:
        with suppress(OSError), os.scandir(folder / layout.REFS) as entries:
            return [
                f"{layout.REFS}/{e.name}"
                for e in entries
                if e.name.endswith(".json") and not e.is_file()
            ]
    return []


def _only(wanted: str, known: Sequence[str]) -> str:
    if wanted in known:
        return wanted
    found = [i for i in known if i.startswith(wanted)] or [
        i for i in known if i.startswith(f"job-{wanted}")
    ]
    if len(found) == 1:
        return found[0]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{wanted!r} is the beginning of {len(found)} ids: {', '.join(found[:_SHOWN])}{more}. "
            "Write one more letter."
        )
    nearest = _nearest(wanted, known)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    raise NotFound(
        f"There is no job {wanted!r} in this store.{hint} `kinetic jobs list --all` shows all "
        "jobs.",
        suggestions=nearest,
    )


def _nearest(wanted: str, known: Sequence[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(wanted, known, n=3, cutoff=0.75)


def _readable(store: Store) -> Iterator[JobRef]:
    for key in _keys(store):
        try:
            yield _read(store, key)
        except NotFound:
            continue  # It was removed since it was listed.
        except CorruptRecord as damage:
            import logging  # a list of sound references does without

            logging.getLogger("kinetic.storage").warning("%s is passed over: %s", key, damage)


def _read(store: Store, key: str) -> JobRef:
    try:
        ref = JobRef.from_json(record.parse(store.get(key)))
    except NotFound:
        if key in _misplaced(store):
            raise _damaged(key, "it is not a file") from None
        raise
    except CorruptRecord as error:
        raise _damaged(key, str(error)) from error
    if not _sound(ref):
        raise _damaged(key, "its fields have the wrong types")
    return ref


def _damaged(key: str, why: str) -> CorruptRecord:
    job_id = _id(key)
    return CorruptRecord(
        f"The reference {job_id} is damaged: {why.rstrip('.')}. `kinetic jobs cleanup {job_id}` "
        "removes the job."
    )


def _sound(ref: JobRef) -> bool:
    texts = (ref.job_id, ref.backend, ref.accelerator, ref.display_name, ref.store_uri)
    return (
        all(isinstance(t, str) for t in texts)
        and isinstance(ref.created_at, int | float)
        and isinstance(ref.hosts, int)
    )


def _id(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")
