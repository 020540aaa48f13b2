"""The records of a batch in the store: any process can watch it, even after its submitter's death.

`batch.json` is written once, before the first job. The ids of the jobs follow from the batch's id,
and an input counts as submitted if its job's reference exists, so no record is rewritten when a job
starts or ends. A refused input gets a small file with the reason. The submitting process writes its
heartbeat into `owner.json` every 30 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, Self

from kinetic._client.batch.inputs import BatchEnd, job_id_of
from kinetic._core import layout, record
from kinetic._core.documents import Record
from kinetic._core.ref import JobRef
from kinetic._core.values import dataclass
from kinetic._store import index as job_index
from kinetic._store.base import Store
from kinetic._store.many import get_many
from kinetic._system import machine, processes
from kinetic.errors import (
    CorruptRecord,
    KineticError,
    NotFound,
    SubmitError,
    UnsupportedVersion,
    text_of,
)

SCHEMA_VERSION = 2
STAMP_EVERY_S = 30.0
SILENT_S = 120.0
"""A submitting process on another machine counts as dead after this long without a new stamp."""
SUBMITTER_ENDED = "the process that submitted the batch ended first"
_INPUT = re.compile(r"/(\d{1,9})\.json$")


@dataclass(frozen=True)
class Batch(Record, called="The record of the batch"):
    """The record of a batch, written at its start.

    Attributes:
        group_id: the batch's id, "grp-" and 8 hex digits.
        total: the number of inputs.
        created_at: the time of the batch's start, in seconds since the epoch.
        name: the batch's name for users.
        tags: the caller's notes.
    """

    group_id: str
    total: int
    created_at: float
    name: str = ""
    tags: Any = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object, which `from_json` reads."""
        return super().to_json() | {"schema_version": SCHEMA_VERSION}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Return the record that `to_json` has saved; unknown keys are ignored.

        Raises:
            CorruptRecord: `data` is not such a record.
            UnsupportedVersion: another version of kinetic wrote the record.
        """
        version = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else None
        if version not in (SCHEMA_VERSION, None):
            raise UnsupportedVersion(
                f"The record of the batch {data.get('group_id')} was written by another version of "
                "kinetic, and this version cannot read it. Use that version; `kinetic jobs list "
                "--all` lists the jobs of the batch."
            )
        return super().from_json(data)

    def job_id(self, index: int) -> str:
        """Return the id of an input's job."""
        return job_id_of(self.group_id, index)


class BatchReading(NamedTuple):
    """The state of a batch as read from the store.

    Attributes:
        refs: references of jobs, by input.
        refusals: reasons why inputs could not be submitted, by input.
        end: the end of the submission; None while inputs may be submitted.
        is_abandoned: True if the submitting process died without recording the end.
    """

    refs: Mapping[int, JobRef]
    refusals: Mapping[int, str]
    end: BatchEnd | None
    is_abandoned: bool


@dataclass(frozen=True)
class Stamp(Record, called="The record of who submits the batch"):
    """The identity of the process that submits a batch, with a heartbeat.

    Attributes:
        process: the process id.
        started: the start of the process, to tell it from a later process with the same id.
        machine: identifies the machine, its boot and the container.
        host: the machine's name, for people.
        beat: increases with every stamp.
    """

    process: int
    started: str
    machine: str
    host: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class SubmitterWatch:
    """Judges whether the process that submits a batch is dead. On this machine, its process id
    tells; on another one, it is dead if its stamp has not changed for `SILENT_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stamp: Stamp | None = None
        self._changed_at = clock()

    def is_dead(self, stamp: Stamp | None) -> bool:
        """True if the process that wrote the stamp is dead, or the stamp was removed (None)."""
        if stamp is None:
            return True
        if stamp.machine and stamp.machine == machine.container_id():
            return processes.read_start(stamp.process) != stamp.started
        now = self._clock()
        if stamp != self._stamp:
            self._stamp, self._changed_at = stamp, now
        return now - self._changed_at > SILENT_S


class BatchRecords:
    """The records of one batch."""

    def __init__(self, store: Store, batch: Batch) -> None:
        self.store = store
        self.batch = batch
        self._ended = threading.Event()

    @classmethod
    def open(cls, store: Store, group_id: str) -> BatchRecords:
        """Return the records of an existing batch.

        Raises:
            NotFound: no batch has this id.
            CorruptRecord: the batch's record is damaged.
        """
        try:
            document = _read_record(store, layout.GroupKeys(group_id).batch)
        except NotFound as error:
            raise NotFound(
                f"There is no batch {group_id!r} in the store {store.uri}. `kinetic jobs list "
                "--all --json` shows the batch of each job."
            ) from error
        return cls(store, Batch.from_json(document))

    # -- written while inputs are submitted --------------------------------------------------------

    def begin(self) -> None:
        """Write the batch's record, and this process's stamp every 30 s until `note_end`.

        Raises:
            SubmitError: another batch has this id.
        """
        me = os.getpid()
        stamp = Stamp(me, processes.read_start(me), machine.container_id(), socket.gethostname())
        key = layout.GroupKeys(self.batch.group_id).batch
        # Write the stamp first: readers think that a batch without a stamp has lost its process.
        self._stamp(stamp)
        if not self.store.put(key, _json(self.batch.to_json()), if_absent=True):
            raise SubmitError(
                f"Another batch already has the id {self.batch.group_id}. Submit again: each batch "
                "has a new id."
            )

        def beat() -> None:
            number = 0
            while not self._ended.wait(STAMP_EVERY_S):
                number += 1
                with contextlib.suppress(KineticError, OSError):
                    if not self.store.has(key):  # The batch was removed.
                        return
                    self._stamp(Stamp(me, stamp.started, stamp.machine, stamp.host, number))

        threading.Thread(
            target=beat, name=f"kinetic-{self.batch.group_id}-stamp", daemon=True
        ).start()

    def _stamp(self, stamp: Stamp) -> None:
        self.store.put(layout.GroupKeys(self.batch.group_id).owner, _json(stamp.to_json()))

    def note_refused(self, index: int, error: Exception) -> None:
        """Record why an input could not be submitted."""
        document = {"type": type(error).__name__, "message": text_of(error)}
        self.store.put(layout.GroupKeys(self.batch.group_id).refusal(index), _json(document))

    def note_end(self, end: BatchEnd) -> None:
        """Record that nothing more will be submitted, and which inputs were skipped."""
        self._ended.set()
        document = {"stopped": end.stopped, "skipped": sorted(end.skipped)}
        self.store.put(layout.GroupKeys(self.batch.group_id).end, _json(document))

    def ask_to_stop(self) -> None:
        """Ask the submitting process to stop."""
        self.store.put(layout.GroupKeys(self.batch.group_id).stop, b"{}\n")

    def is_to_stop(self) -> bool:
        """True if a process has asked the submitting process to stop."""
        return self.store.has(layout.GroupKeys(self.batch.group_id).stop)

    def remove(self) -> None:
        """Remove the batch's records; those of its jobs stay."""
        self._ended.set()
        self.store.delete(layout.GroupKeys(self.batch.group_id).prefix)

    # -- read by other processes -------------------------------------------------------------------

    def read(self, submitter: SubmitterWatch, entered: Collection[int] = ()) -> BatchReading:
        """Read the state of all inputs except those in `entered`, which the caller already knows.

        The order of reads matters: first the submitting process, then the end, then references and
        refusals. If the process is dead or has ended the batch, this order reads all that it wrote.
        """
        is_dead, end = submitter.is_dead(self.read_stamp()), self.read_end()
        index_by_id = {
            self.batch.job_id(index): index
            for index in range(self.batch.total)
            if index not in entered
        }
        refs = job_index.read_refs(self.store, index_by_id) if index_by_id else {}
        return BatchReading(
            {index_by_id[job_id]: ref for job_id, ref in refs.items()},
            dict(self._read_refusals(entered)),
            end,
            is_dead and end is None,
        )

    def read_stamp(self) -> Stamp | None:
        """Return the stamp of the submitting process; None if it is missing or damaged."""
        with contextlib.suppress(NotFound, CorruptRecord):
            return Stamp.read(self.store.get(layout.GroupKeys(self.batch.group_id).owner))
        return None

    def read_end(self) -> BatchEnd | None:
        """Return the end of the submission; None while inputs may be submitted."""
        try:
            document = _read_record(self.store, layout.GroupKeys(self.batch.group_id).end)
        except NotFound:
            return None
        except CorruptRecord:
            return BatchEnd()
        skipped = frozenset(document.get("skipped", ()))
        return BatchEnd(str(document.get("stopped", "")), skipped)

    def _read_refusals(self, entered: Collection[int]) -> Iterator[tuple[int, str]]:
        keys = {
            key: int(match[1])
            for key in self.store.list(f"{layout.GroupKeys(self.batch.group_id).prefix}/refused")
            if (match := _INPUT.search(key)) and int(match[1]) not in entered
        }
        for key, data in get_many(self.store, list(keys)).items():
            document = record.parse(data)
            yield keys[key], f"{document.get('type')}: {document.get('message')}"


def new_batch(total: int, *, now: float, name: str = "", tags: Any = None) -> Batch:
    """Return a batch with a new random id."""
    tags = {} if tags is None else tags
    return Batch(f"grp-{secrets.token_hex(4)}", total, now, name, tags)


def _read_record(store: Store, key: str) -> dict[str, Any]:
    data = store.get(key)
    try:
        return record.parse(data)
    except CorruptRecord as error:
        raise CorruptRecord(
            f"The file {key} in the store {store.uri} is damaged: {error}. Restore the file, or "
            "run the batch again."
        ) from error


def _json(document: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
