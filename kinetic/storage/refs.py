"""Finding jobs: the references that rest in a store.

In: a store, the beginning of an id. Out: `JobRef`s. Called by handle.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kinetic.errors import CorruptRecord, NotFound, UsageError
from kinetic.job import paths, record
from kinetic.job.ref import JobRef
from kinetic.storage.base import Store

_ID = re.compile(r"[a-z0-9][a-z0-9_-]*")
_SHOWN = 5


def refs(store: Store) -> list[JobRef]:
    """Return the references of all jobs, newest first; a damaged one is passed over with a warning."""
    return sorted(_readable(store), key=lambda ref: (ref.created_at, ref.job_id), reverse=True)


def ids(store: Store) -> list[str]:
    """Return the ids of all jobs, without reading their references."""
    return [_id(key) for key in store.list(paths.REFS)]


def find(store: Store, text: str) -> JobRef:
    """Return the job with this id, or the only one whose id begins so.

    Raises:
        NotFound: no id begins so; `suggestions` has the nearest.
        UsageError: several do, or the text cannot be an id.
        CorruptRecord: the reference is damaged.
    """
    if not isinstance(text, str) or not _ID.fullmatch(text.strip().lower()):
        raise UsageError(f"{text!r} is no job id. Ids look like job-1a2b3c4d, and their beginning is enough.")
    wanted = text.strip().lower()
    try:
        return _read(store, paths.ref(wanted))
    except NotFound:
        return _read(store, paths.ref(_only(wanted, ids(store))))


def _only(wanted: str, known: Sequence[str]) -> str:
    found = [i for i in known if i.startswith(wanted)] or [i for i in known if i.startswith(f"job-{wanted}")]
    if len(found) == 1:
        return found[0]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UsageError(
            f"{wanted!r} is the beginning of {len(found)} ids: {', '.join(found[:_SHOWN])}{more}. Write one more letter."
        )
    nearest = _nearest(wanted, known)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    raise NotFound(
        f"There is no job {wanted!r} in this store.{hint} `kinetic jobs list --all` shows all jobs.", suggestions=nearest
    )


def _nearest(wanted: str, known: Sequence[str]) -> list[str]:
    from difflib import get_close_matches

    return get_close_matches(wanted, known, n=3, cutoff=0.75)


def _readable(store: Store) -> Iterator[JobRef]:
    for key in store.list(paths.REFS):
        try:
            yield _read(store, key)
        except NotFound:
            continue  # It was removed since it was listed.
        except CorruptRecord as damage:
            import logging  # a list of sound references does without

            logging.getLogger("kinetic.storage").warning("%s is passed over: %s", key, damage)


def _read(store: Store, key: str) -> JobRef:
    data = store.get(key)
    try:
        ref = JobRef.from_json(record.parse(data))
    except CorruptRecord as error:
        raise CorruptRecord(f"The reference {_id(key)} is damaged: {error}.") from error
    if not _sound(ref):
        raise CorruptRecord(f"The reference {_id(key)} is damaged: its fields have the wrong types.")
    return ref


def _sound(ref: JobRef) -> bool:
    texts = (ref.job_id, ref.backend, ref.accelerator, ref.display_name, ref.store_uri)
    return all(isinstance(t, str) for t in texts) and isinstance(ref.created_at, int | float) and isinstance(ref.hosts, int)


def _id(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".json")
