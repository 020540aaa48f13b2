"""The records of a batch in the store, from which any process can take it up again, whenever the
submitting one dies.

In: a store, ids. Out: `Batch`, and what became of its inputs.

`batch.json` is written once, before the first job, with the id of every try of every input: a job
whose reference exists was submitted. Nothing is rewritten as jobs come and go. What cannot be known
in advance (why an input was refused; the job of a function that submits by itself) is a small file
of its own. While inputs are being submitted, a lease is held.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any, Self

from kinetic._client.batch.ledger import InputState
from kinetic._core import layout, record
from kinetic._core.documents import Record
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic._store import lease
from kinetic._store.base import Store
from kinetic._store.lease import Lease, Owner
from kinetic.errors import (
    CheckpointError,
    CorruptRecord,
    NotFound,
    StoreError,
    SubmitError,
    text_of,
)

SCHEMA_VERSION = 1
SILENT_S = 120.0
"""A process that submits, and has not counted up for so long, is gone."""
LEFT = "the process that submitted the batch ended before"
_INPUT = re.compile(r"/(\d{1,9})\.json$")
_TRY = re.compile(r"/(\d{1,9})-(\d{1,9})\.json$")


@dataclass(frozen=True)
class Batch(Record, called="The record of the batch"):
    """A batch as it was begun.

    Attributes:
        group_id: "grp-" and 8 hex digits.
        total: number of inputs.
        created_at: seconds since the epoch.
        name: as shown to users.
        tags: the caller's notes.
        retries: how often an input whose job failed is submitted again.
        jobs: for each input the ids of its tries; empty if a function submits by itself.
        counts: whether the process that submits counts up instead of holding a lock.
    """

    group_id: str
    total: int
    created_at: float
    name: str = ""
    tags: Any = field(default_factory=dict)
    retries: int = 0
    jobs: tuple[tuple[str, ...], ...] = ()
    counts: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `from_json` makes an equal value."""
        return super().to_json() | {"schema_version": SCHEMA_VERSION}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild from `to_json`; unknown keys are ignored.

        Raises:
            CorruptRecord: the document is not a batch, or a newer version wrote it.
        """
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise CorruptRecord(
                f"The batch has schema version {version!r}; use the kinetic that began it."
            )
        return super().from_json(data)


@dataclass(frozen=True)
class BatchSnapshot:
    """The state of the inputs so far.

    Attributes:
        jobs: the latest try of each input that has one: its number, from 1, and its reference.
        refused: why inputs could not be submitted.
        unreadable: ids of jobs whose reference is damaged, by input.
        ended: whether the process that submits has said that it is done.
        skipped: inputs that were skipped when the batch was stopped.
        stopped: why the batch was stopped.
        is_left: whether the process that submits is gone; None where only its silence tells.
    """

    jobs: Mapping[int, tuple[int, JobRef]]
    refused: Mapping[int, str]
    unreadable: Mapping[int, str]
    ended: bool
    skipped: frozenset[int]
    stopped: str
    is_left: bool | None

    @property
    def over(self) -> bool:
        """Whether nothing more will be submitted."""
        return self.ended or bool(self.is_left)

    def state_of(self, index: int) -> InputState:
        """Return the state of an input of which no job was known before."""
        if index in self.refused:
            return InputState.REFUSED
        if index in self.skipped:
            return InputState.SKIPPED
        if index in self.jobs or not self.over:
            return InputState.WAITING
        was_submitted = self.ended or index in self.unreadable
        return InputState.GONE if was_submitted else InputState.REFUSED


def new_batch(
    store: Store,
    total: int,
    *,
    known_ids: bool,
    now: float,
    retries: int = 0,
    name: str = "",
    tags: Any = None,
) -> Batch:
    """Choose the id of a batch and, with `known_ids`, of all its jobs: none that the store already
    has."""
    taken = (
        {key.rpartition("/")[2].removesuffix(".json") for key in store.list(layout.REFS)}
        if known_ids
        else set()
    )
    jobs = (
        tuple(tuple(_make_name("job", taken) for _ in range(retries + 1)) for _ in range(total))
        if known_ids
        else ()
    )
    counts = store.as_folder() is None
    return Batch(
        _make_name("grp", set()),
        total,
        now,
        name,
        {} if tags is None else tags,
        retries,
        jobs,
        counts,
    )


def _make_name(kind: str, taken: set[str]) -> str:
    while (made := f"{kind}-{secrets.token_hex(4)}") in taken:
        pass
    taken.add(made)
    return made


class Manifest:
    """The records of one batch."""

    def __init__(self, store: Store, batch: Batch) -> None:
        self.store = store
        self.batch = batch

    @classmethod
    def begin(cls, store: Store, batch: Batch) -> Manifest:
        """Write the batch.

        Raises:
            SubmitError: there is a batch with this id.
        """
        if not store.put(
            layout.GroupKeys(batch.group_id).batch, _json(batch.to_json()), if_absent=True
        ):
            raise SubmitError(
                f"There is already a batch {batch.group_id}. Submit again; the next id will be "
                "another one."
            )
        return cls(store, batch)

    @classmethod
    def open(cls, store: Store, group_id: str) -> Manifest:
        """Read a batch.

        Raises:
            NotFound: there is none.
            CorruptRecord: its record is damaged.
        """
        return cls(store, Batch.from_json(_read_record(store, layout.GroupKeys(group_id).batch)))

    # -- written while inputs are submitted --------------------------------------------------------

    def note_job(self, index: int, attempt: int, ref: JobRef) -> None:
        """Record the job of an input whose id was not known in advance."""
        self.store.put(
            layout.GroupKeys(self.batch.group_id).job(index, attempt), _json(ref.to_json())
        )

    def note_refused(self, index: int, error: Exception) -> None:
        """Record why an input could not be submitted."""
        told = {"type": type(error).__name__, "message": text_of(error)}
        self.store.put(layout.GroupKeys(self.batch.group_id).refusal(index), _json(told))

    def note_end(self, why: str, skipped: Sequence[int]) -> None:
        """Record that nothing more will be submitted, and which inputs were skipped."""
        self.store.put(
            layout.GroupKeys(self.batch.group_id).end,
            _json({"stopped": why, "skipped": list(skipped)}),
        )

    def ask_to_stop(self) -> None:
        """Ask the submitting process to stop."""
        self.store.put(layout.GroupKeys(self.batch.group_id).stop, b"{}\n")

    def is_to_stop(self) -> bool:
        """Whether the submitting process was asked to stop."""
        return self.store.has(layout.GroupKeys(self.batch.group_id).stop)

    def remove(self) -> None:
        """Remove the batch; its jobs stay."""
        self.store.delete(layout.GroupKeys(self.batch.group_id).prefix)

    # -- read by other processes -------------------------------------------------------------------

    def snapshot(self, beyond: Mapping[int, int]) -> BatchSnapshot:
        """Return what is new beyond the given number of tries of each input."""
        # Looked at first, so that all that was submitted before the end is seen.
        is_held = self.owner.is_held()
        end = self._end()
        jobs: dict[int, tuple[int, JobRef]] = {}
        unreadable: dict[int, str] = {}
        for index, attempt, key in self._tries():
            if attempt <= max(beyond.get(index, 0), jobs[index][0] if index in jobs else 0):
                continue
            try:
                jobs[index] = (attempt, JobRef.from_json(_read_record(self.store, key)))
            except NotFound:  # It was removed since it was listed.
                continue
            except CorruptRecord:
                unreadable[index] = key.rpartition("/")[2].removesuffix(".json")
        told = end or {}
        refused = dict(self._read_refusals(beyond))
        return BatchSnapshot(
            jobs,
            refused,
            unreadable,
            end is not None,
            frozenset(told.get("skipped", ())),
            str(told.get("stopped", "")),
            None if is_held is None else not is_held,
        )

    def refs(self) -> Iterator[JobRef]:
        """Yield the references of all tries of all inputs, as far as they can be read."""
        for _, _, key in self._tries():
            with suppress(NotFound, CorruptRecord):
                yield JobRef.from_json(_read_record(self.store, key))

    def _end(self) -> dict[str, Any] | None:
        try:
            return _read_record(self.store, layout.GroupKeys(self.batch.group_id).end)
        except NotFound:
            return None
        except CorruptRecord:
            return {}

    def _tries(self) -> Iterator[tuple[int, int, str]]:
        """Yield input, try and key of the reference of all that were submitted; of an input's tries
        the last one first."""
        if self.batch.jobs:
            there = set(self.store.list(layout.REFS))
            for index, ids in enumerate(self.batch.jobs):
                for attempt in range(len(ids), 0, -1):
                    if (key := layout.JobKeys(ids[attempt - 1]).ref) in there:
                        yield index, attempt, key
            return
        for key in self.store.list(f"{layout.GroupKeys(self.batch.group_id).prefix}/jobs"):
            if found := _TRY.search(key):
                yield int(found[1]), int(found[2]), key

    def _read_refusals(self, beyond: Mapping[int, int]) -> Iterator[tuple[int, str]]:
        for key in self.store.list(f"{layout.GroupKeys(self.batch.group_id).prefix}/refused"):
            found = _INPUT.search(key)
            if found and (index := int(found[1])) not in beyond:
                told = _read_record(self.store, key)
                yield index, f"{told.get('type')}: {told.get('message')}"

    # -- the lease of the submitting process -------------------------------------------------------

    @property
    def owner(self) -> lease.InFolder | lease.InStore:
        """Who submits."""
        return lease.place_in(self.store, layout.GroupKeys(self.batch.group_id).owner)

    def hold(self) -> Lease:
        """Become the process that submits.

        Raises:
            StoreError: the record cannot be written.
        """
        me = Owner("", secrets.token_hex(8), os.getpid(), socket.gethostname())
        held = Lease(self.owner, f"batch {self.batch.group_id}", me)
        try:
            held.acquire()
        except CheckpointError as error:
            raise StoreError(str(error)) from error
        return held


def _read_record(store: Store, key: str) -> dict[str, Any]:
    data = store.get(key)
    try:
        return record.parse(data)
    except CorruptRecord as error:
        raise CorruptRecord(f"{key} is damaged: {error}.") from error


def _json(document: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
