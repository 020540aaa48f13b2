"""The records of a batch in the store, from which any process can take it up again, whenever the
submitting one dies.

In: a store, ids. Out: `Batch`, where its inputs stand.

`batch.json` is written once, before the first job. The ids of the jobs follow from the batch's, and
a job whose reference exists was submitted: nothing is rewritten as jobs come and go. Why an input
was refused is a small file of its own. The process that submits stamps `owner.json` every 30 s.
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
"""A process on another machine that has not stamped the batch for so long is gone."""
SUBMITTER_ENDED = "the process that submitted the batch ended before"
_INPUT = re.compile(r"/(\d{1,9})\.json$")


@dataclass(frozen=True)
class Batch(Record, called="The record of the batch"):
    """A batch as it was begun.

    Attributes:
        group_id: "grp-" and 8 hex digits.
        total: number of inputs.
        created_at: seconds since the epoch.
        name: as shown to users.
        tags: the caller's notes.
    """

    group_id: str
    total: int
    created_at: float
    name: str = ""
    tags: Any = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object from which `from_json` makes an equal value."""
        return super().to_json() | {"schema_version": SCHEMA_VERSION}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Rebuild from `to_json`; unknown keys are ignored.

        Raises:
            CorruptRecord: it is no such object.
            UnsupportedVersion: another version of kinetic wrote it.
        """
        known = data.get("schema_version", SCHEMA_VERSION) if isinstance(data, dict) else None
        if known not in (SCHEMA_VERSION, None):
            raise UnsupportedVersion(
                "The record of the batch was written by another version of kinetic: read it with "
                "that one. `kinetic jobs list --all` shows its jobs."
            )
        return super().from_json(data)

    def job_id(self, index: int) -> str:
        """Return the id of the job of an input."""
        return job_id_of(self.group_id, index)


class BatchReading(NamedTuple):
    """What the store has of a batch.

    Attributes:
        refs: of jobs, by input.
        refusals: why inputs could not be submitted.
        end: None while inputs may be submitted.
        is_left: whether the process that submitted ended without recording the end.
    """

    refs: Mapping[int, JobRef]
    refusals: Mapping[int, str]
    end: BatchEnd | None
    is_left: bool


@dataclass(frozen=True)
class Stamp(Record, called="The record of who submits the batch"):
    """The process that submits a batch.

    Attributes:
        process: its id on its machine.
        started: when it started there, to tell it from a later process with this id.
        machine: names the machine, its start and the container.
        host: the machine's name, for people.
        beat: counted up with every stamp.
    """

    process: int
    started: str
    machine: str
    host: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class SubmitterWatch:
    """Judges whether the process that submits a batch is gone: on this machine by its id, elsewhere
    if its stamp has not changed for `SILENT_S` on this process's clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stamp: Stamp | None = None
        self._changed_at = clock()

    def is_gone(self, stamp: Stamp | None) -> bool:
        """Judge by the stamp as it is now; without one, the batch was removed."""
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
        """Read a batch.

        Raises:
            NotFound: there is none.
            CorruptRecord: its record is damaged.
        """
        return cls(store, Batch.from_json(_read_record(store, layout.GroupKeys(group_id).batch)))

    # -- written while inputs are submitted --------------------------------------------------------

    def begin(self) -> None:
        """Write the batch, and stamp it as this process's until `note_end`.

        Raises:
            SubmitError: there is a batch with this id.
        """
        me = os.getpid()
        stamp = Stamp(me, processes.read_start(me), machine.container_id(), socket.gethostname())
        key = layout.GroupKeys(self.batch.group_id).batch
        self._stamp(stamp)  # Before the batch can be found: one without a stamp counts as left.
        if not self.store.put(key, _json(self.batch.to_json()), if_absent=True):
            raise SubmitError(
                f"There is already a batch {self.batch.group_id}. Submit again; the next id will "
                "be another one."
            )

        def beat() -> None:
            number = 0
            while not self._ended.wait(STAMP_EVERY_S):
                number += 1
                with contextlib.suppress(KineticError, OSError):
                    if not self.store.has(key):  # It was removed.
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
        """Whether the submitting process was asked to stop."""
        return self.store.has(layout.GroupKeys(self.batch.group_id).stop)

    def remove(self) -> None:
        """Remove the batch; its jobs stay."""
        self._ended.set()
        self.store.delete(layout.GroupKeys(self.batch.group_id).prefix)

    # -- read by other processes -------------------------------------------------------------------

    def read(self, submitter: SubmitterWatch, entered: Collection[int] = ()) -> BatchReading:
        """Read where the inputs stand, but for those that are `entered`: references of jobs, why
        inputs were refused, the end. First comes whether the process that submits is gone, then the
        end: what was written before either is all read."""
        is_gone, end = submitter.is_gone(self.read_stamp()), self._read_end()
        wanted = {
            self.batch.job_id(index): index
            for index in range(self.batch.total)
            if index not in entered
        }
        refs = job_index.read_refs(self.store, wanted) if wanted else {}
        return BatchReading(
            {wanted[job_id]: ref for job_id, ref in refs.items()},
            dict(self._read_refusals(entered)),
            end,
            is_gone and end is None,
        )

    def read_stamp(self) -> Stamp | None:
        """Return the stamp of the process that submits; None if there is none."""
        with contextlib.suppress(NotFound, CorruptRecord):
            return Stamp.read(self.store.get(layout.GroupKeys(self.batch.group_id).owner))
        return None

    def _read_end(self) -> BatchEnd | None:
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
    """Choose the id of a batch."""
    tags = {} if tags is None else tags
    return Batch(f"grp-{secrets.token_hex(4)}", total, now, name, tags)


def _read_record(store: Store, key: str) -> dict[str, Any]:
    data = store.get(key)
    try:
        return record.parse(data)
    except CorruptRecord as error:
        raise CorruptRecord(f"{key} is damaged: {error}.") from error


def _json(document: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
