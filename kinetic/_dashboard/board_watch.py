"""All jobs of a store, looked at again and again: what the list, the batches and the counts show.

In: access to jobs. Out: `JobList`s, each with a version.

Jobs that have ended are read once. Once all have been read, looks may take a twentieth of a
processor: the more one costs, the longer the next one waits. While nobody asks, nothing is looked
at.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kinetic._core import layout
from kinetic._core.ref import JobRef
from kinetic._core.state import UNKNOWN, JobStanding, JobStatus
from kinetic._dashboard.live import SILENT_S, describe_silence
from kinetic._store import index
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from pathlib import Path

    from kinetic._client.access import JobAccess
    from kinetic._core.gang.picture import AttemptPicture

SOONEST_S = 0.2
REMOTE_S = 2.0
"""Between two looks at a store that is no folder: each is some calls over the network."""
_SHARE = 20
_FIRST_READ = 1000
"""How many jobs are read in one look that were never read before, newest first."""
_GANGS = 25
"""How many gangs of running jobs are read in one look; the others have their turn in the next."""
_MOST_FILES = 1000
_FEW = 20
_STEADY_S = 1.0
"""A folder that was changed this recently may have been changed again within the same tick."""
_UNREAD = JobStanding("", "")
_ACTIVE = (JobStatus.PENDING, JobStatus.RUNNING, UNKNOWN, "")


class JobRow(NamedTuple):
    """One job.

    Attributes:
        ref: its reference.
        standing: where it stands; a state of "" while it has not been read.
        attempt: the last one of a running job, once it was read.
    """

    ref: JobRef
    standing: JobStanding = _UNREAD
    attempt: AttemptPicture | None = None

    @property
    def state(self) -> str:
        """The job's state, in small letters."""
        return self.standing.state.lower() or "reading"

    @property
    def started_at(self) -> float | None:
        """When its function started in the last attempt."""
        if self.attempt is not None and self.standing.ended_at is None:
            return self.attempt.ready_at
        return self.standing.started_at


class JobList(NamedTuple):
    """All jobs at one moment.

    Attributes:
        version: another one after each change.
        rows: newest first.
        trouble: why this is not how things stand now; "" if it is.
    """

    version: int = 0
    rows: tuple[JobRow, ...] = ()
    trouble: str = ""

    def counts(self) -> Mapping[str, int]:
        """Return how many jobs are in each state."""
        return Counter(row.state for row in self.rows)

    def select(self, state: str, words: str) -> list[JobRow]:
        """Return the jobs in a state, whose name, id, accelerator or batch has the words."""
        wanted = words.casefold().split()
        return [
            row
            for row in self.rows
            if state in ("", row.state) and all(word in _text_of(row.ref) for word in wanted)
        ]


def _text_of(ref: JobRef) -> str:
    return f"{ref.job_id} {ref.display_name} {ref.accelerator} {ref.group_id or ''}".casefold()


class BoardWatch:
    """Looks at all jobs, for all who ask; one look at a time."""

    def __init__(self, access: JobAccess) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._list = JobList()
        self._rows: dict[str, JobRow] = {}
        self._order: list[str] = []
        self._open: list[JobRef] = []
        self._turn = 0
        self._soonest_at = self._next_at = 0.0
        self._began_at = 0.0
        self._listed_at: tuple[int, float] = (-1, 0.0)
        self.files: tuple[Path, ...] = ()
        """A write to one of these is a reason to look."""
        self._ids: frozenset[str] = frozenset()

    def pause_s(self) -> float:
        """For how long to ask for nothing: the jobs are not looked at before that."""
        return max(self._next_at - time.monotonic(), 0.0)

    def look(self, *, patience_s: float = 0.0, is_told: bool = False) -> JobList:
        """Return the jobs as of now, or as of a moment ago; never raises.

        Who comes while another one looks gets what was seen last, after `patience_s` at most. Who
        was told that one of the `files` was written to need not wait for the next look.
        """
        if not self._lock.acquire(timeout=patience_s):
            waited_s = time.monotonic() - self._began_at
            trouble = describe_silence(waited_s) if waited_s > SILENT_S else ""
            return self._list._replace(trouble=trouble or self._list.trouble)
        try:
            if is_told:
                self._next_at = self._soonest_at
            if time.monotonic() >= self._next_at:
                self._began_at = time.monotonic()
                self._look()
            return self._list
        finally:
            self._lock.release()

    def _look(self) -> None:
        began_s, before, trouble = time.thread_time(), dict(self._rows), ""
        try:
            self._find_jobs()
            self._read_jobs()
        except (KineticError, OSError) as error:
            trouble = str(error)
        if self._rows != before or trouble != self._list.trouble:
            rows = tuple(self._rows[job_id] for job_id in self._order)
            self._list = JobList(self._list.version + 1, rows, trouble)
        is_reading = any(not self._rows[ref.job_id].standing.state for ref in self._open)
        took_s = (time.thread_time() - began_s) * (1 if is_reading else _SHARE)
        self._soonest_at = time.monotonic() + took_s
        folder = self._access.store.as_folder()
        usual_s = SOONEST_S if folder is not None else REMOTE_S
        self._next_at = max(self._soonest_at, time.monotonic() + usual_s)
        if folder is not None:
            self.files = (folder / layout.REFS, *self._own_folders(folder))

    def _own_folders(self, folder: Path) -> Iterator[Path]:
        """The folders of jobs that have not ended, and whose records processes of this machine
        write."""
        for ref in self._open[:_MOST_FILES]:
            if not ref.place.is_cluster:
                yield folder / layout.job(ref.job_id)

    def _find_jobs(self) -> None:
        ids = self._list_ids()
        if ids == self._rows.keys():
            return
        new = ids - self._rows.keys()
        if len(new) > _FEW:
            refs: Sequence[JobRef] = [ref for ref in self._access.board.refs() if ref.job_id in new]
        else:
            refs = [ref for job_id in sorted(new) for ref in self._find(job_id)]
        self._rows = {job_id: row for job_id, row in self._rows.items() if job_id in ids}
        self._rows |= {ref.job_id: JobRow(ref) for ref in refs}
        newest_first = sorted(
            self._rows.values(), key=lambda row: (row.ref.created_at, row.ref.job_id), reverse=True
        )
        self._order = [row.ref.job_id for row in newest_first]
        self._open = [row.ref for row in newest_first if row.standing.state in _ACTIVE]

    def _find(self, job_id: str) -> list[JobRef]:
        with contextlib.suppress(KineticError):  # removed since, or damaged
            return [self._access.find(job_id)]
        return []

    def _list_ids(self) -> frozenset[str]:
        """The ids of all jobs; a folder that has not changed is not listed again."""
        folder = self._access.store.as_folder()
        changed_ns = -1
        if folder is not None:
            with contextlib.suppress(OSError):
                changed_ns = (folder / layout.REFS).stat().st_mtime_ns
        known_ns, listed_at = self._listed_at
        is_steady = listed_at - changed_ns / 1e9 > _STEADY_S
        if changed_ns < 0 or changed_ns != known_ns or not is_steady:
            self._listed_at = changed_ns, time.time()
            self._ids = frozenset(index.ids(self._access.store))
        return self._ids

    def _read_jobs(self) -> None:
        known = [ref for ref in self._open if self._rows[ref.job_id].standing.state]
        unread = [ref for ref in self._open if not self._rows[ref.job_id].standing.state]
        refs = known + unread[:_FIRST_READ]
        for job_id, standing in self._access.board.look(refs).items():
            self._rows[job_id] = self._rows[job_id]._replace(standing=standing)
        self._open = [ref for ref in self._open if self._rows[ref.job_id].standing.state in _ACTIVE]
        running = [ref for ref in self._open if self._rows[ref.job_id].standing.state]
        self._turn = self._turn if self._turn < len(running) else 0
        for ref in running[self._turn : self._turn + _GANGS]:
            attempt = self._access.board.gang(ref).current
            self._rows[ref.job_id] = self._rows[ref.job_id]._replace(attempt=attempt)
        self._turn += _GANGS
