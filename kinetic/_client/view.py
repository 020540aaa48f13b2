"""A read-only view of a job, from any process: its reference, state, output, events and stacks.

In: `JobRef`. Out: what the store and the backend know of the job. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kinetic._backends import registry
from kinetic._backends.base import Backend, Controls, LogRequest, Processes, Signals
from kinetic._client import following
from kinetic._client import result as collecting
from kinetic._client.board.reader import JobBoard
from kinetic._core import layout
from kinetic._core.events import GangEvent
from kinetic._core.log_format import LogChunk
from kinetic._core.outcome import Outcome
from kinetic._core.ref import ATTRIBUTES, JobRef
from kinetic._core.state import JobStatus, status_of_verdict
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic._store.open import as_existing, open_store
from kinetic.errors import KineticError, NotFound, UsageError

if TYPE_CHECKING:
    from kinetic._client.board.drawing import Picture
    from kinetic._client.metrics import Metrics
    from kinetic._core.place import Place
    from kinetic._core.state import JobStanding

_OF_FUTURES = ("_condition", "_state", "_waiters")
"""What the functions of `concurrent.futures` ask for first."""


class JobView:
    """One job, to look at; the base of `JobHandle`."""

    if TYPE_CHECKING:
        job_id: str
        place: Place
        backend: str
        requested_backend: str
        accelerator: str
        func_name: str
        display_name: str
        store_uri: str
        hosts: int
        project: str
        cluster_name: str
        zone: str
        namespace: str
        bucket_name: str
        k8s_name: str
        image_uri: str
        group_id: str | None
        group_kind: str | None
        group_index: int | None
        debug: bool

    def __init__(
        self, ref: JobRef, backend: Backend | None = None, store: Store | None = None
    ) -> None:
        self.ref = ref
        self._store = as_existing(store or open_store(ref.store_uri))
        self._made_backend = backend

    if not TYPE_CHECKING:  # A type checker should report misspelt names.

        def __getattr__(self, name):
            if name in JobRef.__dataclass_fields__:
                return getattr(self.ref, name)
            if name in ATTRIBUTES:
                return self.ref.attributes().get(name, "")
            if name in _OF_FUTURES:
                raise AttributeError(
                    f"{self.job_id} is no future of concurrent.futures, whose wait() and "
                    "as_completed() take only their own. Use kinetic.as_completed(handles), or "
                    "await the handle."
                )
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        """For completion: with the fields of the reference, and without internals."""
        names = {*super().__dir__(), *ATTRIBUTES}
        return sorted(name for name in names if name.startswith("__") or not name.startswith("_"))

    def __repr__(self) -> str:
        return (
            f"<JobHandle {self.job_id}: {self.display_name} on {self.accelerator} ({self.backend})>"
        )

    def _repr_html_(self) -> str:
        from kinetic._client.board import drawing

        return drawing.html(self.picture())

    @property
    def created_at(self) -> str:
        """When it was submitted, in UTC, as ISO 8601 has it: "2026-01-31T12:00:00Z".
        `ref.created_at` is a number of seconds."""
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.ref.created_at))

    @property
    def output_dir(self) -> str:
        """Where the function leaves files: `KINETIC_OUTPUT_DIR` in its environment."""
        return (
            self.ref.output_dir
            or f"{self.ref.store_uri.rstrip('/')}/{layout.JobKeys(self.ref.job_id).outputs}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the reference as a JSON object."""
        return self.ref.attributes()

    def status(self) -> JobStatus:
        """Return the job's status: PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED or NOT_FOUND."""
        return self._board.look_at(self.ref).status

    def outcome(self) -> Outcome | None:
        """Return the verdict over all hosts, or None while the job runs."""
        return self._board.outcome(self.ref)

    def look(self, refs: Sequence[JobRef]) -> dict[str, JobStanding]:
        """Return where jobs with the same place and store as this one stand, by id."""
        return self._board.look(refs)

    def settle(self, refs: Sequence[JobRef]) -> dict[str, Outcome | KineticError | None]:
        """Return the verdicts of jobs with the same place and store as this one, by id; an error
        for a job whose verdict cannot be determined, or whose records were removed."""
        return self._board.settle(refs)

    def ending_fd(self) -> int | None:
        """Return a descriptor that becomes readable when the job has ended, which the caller
        closes; None if there is none."""
        return self._backend.ending_fd(self.ref) if isinstance(self._backend, Signals) else None

    def chunks(
        self, request: LogRequest, tell: Callable[[str], object] | None = None
    ) -> Iterator[LogChunk | None]:
        """Yield output as bytes with host, stream and time; None while nothing is new. With
        `follow`, `tell` gets why the job does not run yet."""
        return following.chunks(self._backend, self._store, self.ref, request, tell=tell)

    def metrics(
        self,
        host: int = 0,
        all_hosts: bool = False,
        attempt: int | None = None,
        repeats: bool = False,
    ) -> Metrics:
        """Return what the function has logged so far with `kinetic.log`, by name, and figures of
        its hosts.

        A step that was trained again, after a checkpoint was restored, shows once, as it was
        trained last.

        Args:
            host: what this host has logged; 0 is the leader.
            all_hosts: what all of them have.
            attempt: only what this attempt has, from 1; by default all of them.
            repeats: also the steps that were trained again, as often as they were.

        Raises:
            PreflightError: NumPy is not installed here.
        """
        from kinetic._client.metrics import Metrics, MetricsReader

        hosts = None if all_hosts else (self._check_host(host),)
        if attempt is not None:
            attempts.check(self._store, self.job_id, attempt)
        reader = MetricsReader(self._store, self.ref, hosts=hosts, attempt=attempt)
        reader.look()
        return Metrics(self.job_id, reader.recording.series(repeats=repeats))

    def events(self) -> list[dict[str, Any]]:
        """Return what happened when, oldest first, as JSON objects. Damaged lines, and events that
        only a newer version knows, are skipped."""
        return [event.to_json() for event in self._board.events(self.ref)]

    def stacks(self, timeout_s: float = 5.0) -> dict[int, str]:
        """Return the Python stacks of every host's worker: live, or as stored when the gang
        hung.

        Raises:
            NotFound: the job is not running and no stacks were stored.
            WaitTimeout: the leader of a job on a cluster does not answer.
        """
        endpoint = self._backend.control(self.ref) if isinstance(self._backend, Controls) else None
        if endpoint is not None:
            from kinetic._rpc.client import ControlClient

            with ControlClient(endpoint, give_up_s=timeout_s) as client:
                return client.dump_stacks(timeout_s)
        found = self._read_verdict()
        if found is None and self.ref.place.is_cluster and self.status() is JobStatus.RUNNING:
            from kinetic._client import asking

            told = asking.stacks(
                self._store,
                self.ref,
                patience_s=timeout_s + asking.ANSWER_S,
                ended=lambda: self._read_verdict() is not None,
            )
            if told:
                return told
            found = self._read_verdict()
        kept = {} if found is None else collecting.stacks(found)
        if not kept:
            raise NotFound(
                f"{self.job_id} is not running, and no stacks were kept: they are when "
                "hang_timeout ends a job."
            )
        return kept

    def processes(self) -> dict[str, Any]:
        """Return the process ids of a job that runs on this machine: {"supervisor": pid, "agents":
        {host: pid}}; else {}."""
        found = self._backend.processes(self.ref) if isinstance(self._backend, Processes) else None
        if found is None:
            return {}
        return {"supervisor": found.supervisor, "agents": dict(found.agents)}

    def picture(self, outcome: Outcome | None = None) -> Picture:
        """The job's current picture. Never fails: it is drawn while something else goes
        on."""
        from kinetic._client.board import drawing

        state, events = "unknown", list[GangEvent]()
        with contextlib.suppress(KineticError, OSError):
            outcome = outcome or self._read_verdict()
            status = self.status() if outcome is None else status_of_verdict(outcome.verdict)
            state = status.lower()
            events = self._board.events(self.ref) if outcome is None else []
        return drawing.of_job(self.ref, state, events, outcome, time.time())

    @property
    def _backend(self) -> Backend:
        if self._made_backend is None:
            self._made_backend = registry.make(self.ref.place, self._store)
        return self._made_backend

    @property
    def _board(self) -> JobBoard:
        return JobBoard(self._store, lambda _: self._backend, time.time)

    def _check_host(self, host: int) -> int:
        if isinstance(host, bool) or not isinstance(host, int) or not 0 <= host < self.hosts:
            raise UsageError(
                f"There is no host {host!r}: {self.job_id} has {self.hosts} "
                f"host{'s' * (self.hosts != 1)}, from 0 on."
            )
        return host

    def _read_verdict(self) -> Outcome | None:
        return self._board.verdict(self.ref)
