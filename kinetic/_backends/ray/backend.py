"""The Ray backend: a job's leader is a driver that Ray's Jobs API starts; it reserves slices, and
has actors start the hosts.

In: plans and refs, a store that all nodes reach, the Jobs API. Out: an entry of the Jobs API with
our job id as its own; the state of jobs there. Output and verdicts are read from the store, where
hosts leave them, so they outlive the cluster.
"""

from __future__ import annotations

import functools
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kinetic._backends import attempt_logs, stored
from kinetic._backends.base import Document, LogRequest, Status
from kinetic._backends.ray import capacity, states, submission
from kinetic._backends.ray.states import DriverFacts
from kinetic._backends.ray.submission import HostSettings
from kinetic._core import layout, record
from kinetic._core.log_format import LogChunk
from kinetic._core.plan import Blob, Plan
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._ray import store_servers
from kinetic._ray.jobs_api import JobsApi, RayJob, secrets_package
from kinetic._store import cancellation
from kinetic._store.base import Store
from kinetic.errors import BackendUnavailable, NotFound, PreflightError, UsageError

_LEAVING_S, _STOPPING_S = 20.0, 20.0
"""How long a driver takes to end by itself, and when it is told to."""


class RayBackend:
    """Jobs of one cluster (see backends.base.Backend for the promises)."""

    name = "ray"

    def __init__(
        self,
        store: Store,
        open_api: Callable[[], JobsApi],
        read_archive: Callable[[], tuple[Blob, bytes]],
        settings: HostSettings,
    ) -> None:
        """`read_archive` returns kinetic itself; `settings` need not name it."""
        self._store = store
        self._open_api = open_api
        self._read_archive = functools.cache(read_archive)
        self._settings = settings
        self._opened: JobsApi | None = None

    @property
    def _api(self) -> JobsApi:
        if self._opened is None:
            self._opened = self._open_api()
        return self._opened

    # -- before and at the start -------------------------------------------------------------------

    def preflight(self, plan: Plan) -> None:
        """Refuse what the cluster cannot run: a few calls, before anything is sent."""
        if plan.has_single_controller:
            raise PreflightError(
                'controller="single" needs Pathways, which Ray does not have: use '
                'backend="pathways", or leave controller= away.'
            )
        capacity.check(plan, self._api.nodes(), grows=self._api.can_grow())
        if self._settings.has_store_on_head:
            self._start_store_server()

    def _start_store_server(self) -> None:
        """The cluster keeps the store: what is written next waits for its store server."""
        archive = self._send_kinetic()
        command = submission.entrypoint(
            self._settings.python, installs=False, module=store_servers.MODULE
        )
        store_servers.ensure_server(self._api, command, submission.environment_of(archive))

    def _send_kinetic(self) -> str:
        blob, data = self._read_archive()
        self._api.send_package(submission.package_of(blob.digest), data)
        return blob.digest

    def render(self, plan: Plan) -> list[Document]:
        """Return the entry of the Jobs API."""
        blob, _ = self._read_archive()
        return [submission.render(plan, replace(self._settings, archive=blob.digest))]

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Send kinetic unless the cluster has it, and secrets, and create the entry: nothing can
        start without it."""
        (document,) = documents
        plan = Plan.read(self._store.get(layout.JobKeys(ref.job_id).plan))
        lines: list[str] = []
        if plan.requirements is not None:
            lines = self._store.get(layout.blob(plan.requirements.digest)).decode().splitlines()
        self._send_kinetic()
        if secrets:
            package = json.dumps(dict(secrets)).encode()
            self._api.lend_package(secrets_package(ref.job_id), package)
        self._api.submit(submission.read(document, lines))

    # -- what becomes of jobs ----------------------------------------------------------------------

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """From the verdicts, and for jobs without one from one question to the cluster."""
        verdicts = {ref.job_id: stored.verdict(self._store, ref) for ref in refs}
        found = {job_id: verdict for job_id, verdict in verdicts.items() if verdict is not None}
        open_refs = [ref for ref in refs if ref.job_id not in found]
        jobs = self._look(open_refs)
        return found | {ref.job_id: self._status(ref, jobs.get(ref.job_id)) for ref in open_refs}

    def _look(self, refs: Sequence[JobRef]) -> Mapping[str, RayJob]:
        if len(refs) > 1:
            return {job.job_id: job for job in self._api.list()}
        told = {ref.job_id: self._api.find(ref.job_id) for ref in refs}
        return {job_id: job for job_id, job in told.items() if job is not None}

    def _status(self, ref: JobRef, job: RayJob | None) -> Status:
        status = states.judge(
            DriverFacts(
                job,
                ref.hosts,
                is_cancelled=lambda: self._store.has(layout.JobKeys(ref.job_id).cancellation),
                has_begun=lambda: stored.has_begun(self._store, ref),
                was_there=lambda: self._store.has(layout.JobKeys(ref.job_id).events),
                waits_for=lambda: self._waits_for(ref),
            )
        )
        # Its leader may have written it since the first look.
        return (stored.verdict(self._store, ref) if status.phase.ended else None) or status

    def _waits_for(self, ref: JobRef) -> str:
        try:
            return str(
                record.parse(self._store.get(layout.JobKeys(ref.job_id).wait_note))["reason"]
            )
        except (NotFound, LookupError):
            return ""

    def why_waiting(self, ref: JobRef) -> str | None:
        """What its leader says."""
        return self.status([ref])[ref.job_id].why_waiting

    def why_lost(self, ref: JobRef, host: int) -> str:
        """Its leader has told all that is known."""
        return ""

    def why_unready(self, ref: JobRef) -> str:
        """What its leader has waited for last."""
        reason = self._waits_for(ref)
        return f"{reason[0].upper()}{reason[1:]}." if reason else ""

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Have their leader kill their actors: a host's function and agent end with it."""
        if signum != signal.SIGKILL:
            raise UsageError(
                "Ray ends the actor of a host at once, and sends no signals: use KILL."
            )
        if self.status([ref])[ref.job_id].phase is not JobStatus.RUNNING:
            return ()
        return stored.ask_to_kill(self._store, ref, hosts)

    # -- output ------------------------------------------------------------------------------------

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read what the hosts have left in the store and, when following, go on until the job ends.

        Not Ray's own log of the driver: it comes a second late, has no positions, and is gone with
        the cluster.
        """
        return attempt_logs.read_of_cluster(self._store, ref, request, self.status)

    # -- the end -----------------------------------------------------------------------------------

    def cancel(self, ref: JobRef) -> None:
        """Record the request, and stop the driver: it ends its hosts first."""
        cancellation.request(self._store, ref.job_id, lambda: self._api.stop(ref.job_id))

    def cleanup(self, ref: JobRef) -> None:
        """Stop what may be left of its driver: one that has written its verdict ends by itself.

        Its entry stays, as those of Ray's other jobs do: what is deleted while Ray still watches
        the end of its driver, Ray enters again, as failed.
        """
        if self._store.has(layout.JobKeys(ref.job_id).outcome) and self._has_ended_within(
            _LEAVING_S, ref
        ):
            return
        self._api.stop(ref.job_id)
        if not self._has_ended_within(_STOPPING_S, ref):
            raise BackendUnavailable(
                f"Ray has not ended the driver of {ref.job_id} within {_STOPPING_S:g} s. Ask again."
            )

    def _has_ended_within(self, limit_s: float, ref: JobRef) -> bool:
        until = time.monotonic() + limit_s
        while (job := self._api.find(ref.job_id)) is not None and not job.has_ended:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True
