"""All jobs of a store, for the list of jobs, the batches and the counts.

Ended jobs are read only once. Nothing is read while no page is open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from kinetic._core.ref import JobRef
from kinetic._core.state import UNKNOWN, JobStanding, JobStatus
from kinetic._dashboard.live import SHARE, SILENT_S, describe_silence
from kinetic._store import index
from kinetic._store.base import is_near
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._client.access import JobAccess
    from kinetic._core.gang.picture import AttemptPicture

LOCAL_S, REMOTE_S = 0.5, 2.0
"""Seconds between two reads: of a local folder, and of a remote store, where each read takes
several network calls."""
_FIRST_READ = 1000
"""Most new jobs that one read takes, newest first."""
_GANGS = 25
"""Most running jobs whose gangs one read takes; the next read continues with the other jobs."""
_FEW = 20
_UNREAD = JobStanding("", "")
_ACTIVE = (JobStatus.PENDING, JobStatus.RUNNING, UNKNOWN, "")


class JobRow(NamedTuple):
    """One job.

    Attributes:
        ref: the job's reference.
        standing: the job's state and reason; the state is "" until it has been read.
        attempt: the last attempt of a running job, once it has been read.
    """

    ref: JobRef
    standing: JobStanding = _UNREAD
    attempt: AttemptPicture | None = None

    @property
    def state(self) -> str:
        """The job's state in lower case."""
        return self.standing.state.lower() or "reading"

    @property
    def started_at(self) -> float | None:
        """Time at which the function started in the last attempt."""
        if self.attempt is not None and self.standing.ended_at is None:
            return self.attempt.ready_at
        return self.standing.started_at


class JobList(NamedTuple):
    """All jobs at one moment.

    Attributes:
        version: changes with each change of the list.
        rows: newest first.
        trouble: reason why the list is out of date; "" if it is current.
    """

    version: int = 0
    rows: tuple[JobRow, ...] = ()
    trouble: str = ""

    def counts(self) -> Mapping[str, int]:
        """Return the number of jobs in each state."""
        return Counter(row.state for row in self.rows)

    def sessions(self) -> Mapping[str, str]:
        """Return the names of all sessions, by the ids of their jobs."""
        return {row.ref.job_id: row.ref.session_name for row in self.rows if row.ref.session_name}

    def count_calls(self) -> Mapping[str, int]:
        """Return the number of calls of each session, by the ids of the sessions' jobs."""
        return Counter(row.ref.place.session for row in self.rows)

    def select(self, state: str, words: str) -> list[JobRow]:
        """Return the jobs in `state` ("": any) whose names, batch or session contain all words."""
        wanted = words.casefold().split()
        sessions = {job_id: f"{job_id} session {name}" for job_id, name in self.sessions().items()}
        rows = []
        for row in self.rows:
            ref, session = row.ref, sessions.get(row.ref.place.session, row.ref.place.session)
            texts = ref.job_id, ref.display_name, ref.accelerator, ref.group_id or "", session
            text = " ".join(texts).casefold()
            matches = all(word in text for word in wanted)
            if matches and state in ("", row.state):
                rows.append(row)
        return rows


class BoardWatch:
    """Reads all jobs, for all open pages together. Only one thread reads at a time."""

    def __init__(self, access: JobAccess) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._list = JobList()
        self._rows: dict[str, JobRow] = {}
        self._open: list[JobRef] = []
        self._turn = 0
        self._next_at = self._began_at = 0.0
        self.every_s = LOCAL_S if is_near(access.store) else REMOTE_S

    def read(self, *, patience_s: float = 0.0) -> JobList:
        """Return the list of jobs, which may be some seconds old. Never raises an error.

        If another thread is still reading after `patience_s` seconds, return the previous list.
        """
        if not self._lock.acquire(timeout=patience_s):
            waited_s = time.monotonic() - self._began_at
            trouble = describe_silence(waited_s) if waited_s > SILENT_S else self._list.trouble
            return self._list._replace(trouble=trouble)
        try:
            if time.monotonic() >= self._next_at:
                self._began_at = time.monotonic()
                self._read()
            return self._list
        finally:
            self._lock.release()

    def _read(self) -> None:
        began_s, before, trouble = time.thread_time(), dict(self._rows), ""
        try:
            self._list_jobs()
            self._read_jobs()
        except (KineticError, OSError) as error:
            trouble = str(error)
        if self._rows != before or trouble != self._list.trouble:
            self._list = JobList(self._list.version + 1, tuple(self._rows.values()), trouble)
        used_s = time.thread_time() - began_s
        is_reading = any(not self._rows[ref.job_id].standing.state for ref in self._open)
        # A single open page reads the store at each of its polls; several pages share the reads.
        pause_s = used_s if is_reading else max(self.every_s / 2, SHARE * used_s)
        self._next_at = time.monotonic() + pause_s

    def _list_jobs(self) -> None:
        """Add rows for new jobs and drop those of removed jobs; rows stay sorted, newest first."""
        ids = set(index.list_ids(self._access.store))
        new = ids - self._rows.keys()
        if not new and len(ids) == len(self._rows):
            return
        if len(new) > _FEW:
            refs = [ref for ref in self._access.board.refs() if ref.job_id in new]
        else:
            refs = []
            for job_id in new:
                with contextlib.suppress(KineticError):  # The job was removed, or is damaged.
                    refs.append(self._access.find(job_id))
        rows = [row for job_id, row in self._rows.items() if job_id in ids]
        rows += map(JobRow, refs)
        rows.sort(key=lambda row: (row.ref.created_at, row.ref.job_id), reverse=True)
        self._rows = {row.ref.job_id: row for row in rows}
        self._open = [row.ref for row in rows if row.standing.state in _ACTIVE]

    def _read_jobs(self) -> None:
        read_before = [ref for ref in self._open if self._rows[ref.job_id].standing.state]
        unread = [ref for ref in self._open if not self._rows[ref.job_id].standing.state]
        refs = read_before + unread[:_FIRST_READ]
        for job_id, standing in self._access.board.read_standings(refs).items():
            self._rows[job_id] = self._rows[job_id]._replace(standing=standing)
        self._open = [ref for ref in self._open if self._rows[ref.job_id].standing.state in _ACTIVE]
        running = [ref for ref in self._open if self._rows[ref.job_id].standing.state]
        self._turn = self._turn if self._turn < len(running) else 0
        for ref in running[self._turn : self._turn + _GANGS]:
            attempt = self._access.board.gang(ref).current
            self._rows[ref.job_id] = self._rows[ref.job_id]._replace(attempt=attempt)
        self._turn += _GANGS
