"""Live activity of the hosts of running jobs, for `kinetic top`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kinetic._client.board import activity
from kinetic._client.board.activity import HostLine, Rates
from kinetic._core.ref import JobRef
from kinetic._core.state import UNKNOWN, JobStatus
from kinetic._store import index
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._client import asking
    from kinetic._client.access import JobAccess
    from kinetic._rpc.client import ControlClient

_ACTIVE = (JobStatus.PENDING, JobStatus.RUNNING, UNKNOWN)
_SNAPSHOT_TIMEOUT_S = 1.0
ANSWER_S, _PAUSE_S = 12.0, 0.25
"""In seconds: the longest wait for the answers of leaders on clusters, which read requests every
ten seconds, and the pause between two polls."""


class ActivityWatch:
    """Reads the activity of the hosts of the chosen jobs, or of all jobs, once per `poll`. A job
    that has ended is not read again."""

    def __init__(self, app: JobAccess, chosen: set[str]) -> None:
        self._app = app
        self._chosen = chosen
        self._refs: dict[str, JobRef] = {}
        self._ended: set[str] = set()
        self._clients: dict[str, tuple[object, ControlClient]] = {}
        self._rates = Rates()
        self._polls: dict[str, asking.ActivityPoll] = {}
        self._unanswered: set[str] = set()

    def __enter__(self) -> ActivityWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for _address, client in self._clients.values():
            client.close()

    def poll_to_end(self, patience_s: float = ANSWER_S) -> list[HostLine]:
        """Poll until every leader on a cluster has answered, or `patience_s` seconds have passed.
        Return the lines of the last poll."""
        give_up_at = time.monotonic() + patience_s
        while True:
            lines = self.poll()
            if not self._unanswered or time.monotonic() > give_up_at:
                return lines
            time.sleep(_PAUSE_S)

    def poll(self) -> list[HostLine]:
        """Return a line for each host of the active jobs, newest job first."""
        self._unanswered.clear()
        lines: list[HostLine] = []
        active = self._list_active()
        standings = self._app.board.read_standings(active)
        for ref in active:
            state = standings[ref.job_id].state
            if state not in _ACTIVE:
                self._ended.add(ref.job_id)
                self._disconnect(ref.job_id)
                continue
            snapshot = self._read_snapshot(ref, may_run=state != JobStatus.PENDING)
            attempt = None if snapshot else self._app.board.gang(ref).current
            lines += activity.lines(
                ref, state, snapshot, self._rates, self._app.now(), attempt=attempt
            )
        return lines

    def _list_active(self) -> list[JobRef]:
        ids = set(index.list_ids(self._app.store)) - self._ended
        wanted = ids & self._chosen if self._chosen else ids
        if not wanted <= self._refs.keys():
            self._refs |= {ref.job_id: ref for ref in self._find(wanted)}
            self._ended |= wanted - self._refs.keys()  # Their references were removed or damaged.
        active = [self._refs[job_id] for job_id in wanted - self._ended]
        return sorted(active, key=lambda ref: (ref.created_at, ref.job_id), reverse=True)

    def _find(self, wanted: set[str]) -> Iterator[JobRef]:
        if not self._chosen:
            yield from self._app.board.refs()
        for job_id in wanted & self._chosen:
            with contextlib.suppress(KineticError):
                yield self._app.find(job_id)

    def _read_snapshot(self, ref: JobRef, *, may_run: bool) -> dict[str, Any] | None:
        from kinetic._backends.base import Controls

        if ref.place.is_cluster:
            return self._ask_leader(ref) if may_run else None
        try:
            backend = self._app.backend_of(ref)
            address = backend.control(ref) if isinstance(backend, Controls) else None
            return (
                None
                if address is None
                else self._connect(ref.job_id, address).snapshot(_SNAPSHOT_TIMEOUT_S)
            )
        except (KineticError, ValueError):  # The job is ending, or its supervisor does not answer.
            return None

    def _ask_leader(self, ref: JobRef) -> dict[str, Any] | None:
        """Return the latest answer of the leader of a job on a cluster, read from the store; None
        if the leader has not answered yet."""
        from kinetic._client import asking

        poll = self._polls.setdefault(ref.job_id, asking.ActivityPoll(self._app.store, ref))
        with contextlib.suppress(KineticError):
            if (answer := poll.read_answer()) is not None:
                return answer
        self._unanswered.add(ref.job_id)
        return None

    def _connect(self, job_id: str, address: Any) -> ControlClient:
        entry = self._clients.get(job_id)
        if entry is not None and entry[0] == address:
            return entry[1]
        self._disconnect(job_id)  # Each attempt has its own address.
        from kinetic._rpc.client import ControlClient

        client = ControlClient(address, give_up_s=0.0)
        self._clients[job_id] = (address, client)
        return client

    def _disconnect(self, job_id: str) -> None:
        entry = self._clients.pop(job_id, None)
        if entry is not None:
            entry[1].close()
