"""The backend of calls that run on a session, whatever backend holds the session's slices.

A call goes through the store: its request is an object in the session's queue, which the session's
leader reads. A bell wakes the leader at once where it can (`_backends.bell`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kinetic._backends.base import (
    Backend,
    Controls,
    Document,
    GangProcesses,
    Kills,
    LogRequest,
    Processes,
    Status,
)
from kinetic._backends.bell import Bell, open_bell
from kinetic._config import settings
from kinetic._core import layout
from kinetic._core.gang.policy import count_slices
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.ref import JobRef
from kinetic._core.session import CANCELLED_WAITING, are_alike, keeps_processes
from kinetic._core.state import SUBMITTING, JobStatus
from kinetic._store import cancellation, index, sessions
from kinetic._store.base import Store, folder_of
from kinetic._store.many import at_once
from kinetic.errors import NotFound, PreflightError, UsageError

if TYPE_CHECKING:
    from kinetic._backends.attempt_logs import Pause
    from kinetic._core.accelerators.topology import Topology
    from kinetic._core.endpoint import Endpoint
    from kinetic._core.log_format import LogChunk
    from kinetic._core.plan import Plan


class SessionBackend:
    """Calls on a session. The promises are those of `backends.base.Backend`."""

    name = "session"

    def __init__(self, session_id: str, store: Store, holder: Backend) -> None:
        """Make a backend for a session's calls; `holder` is the backend of the session's job."""
        self._session_id = session_id
        self._store = store
        self._holder = holder

    @functools.cached_property
    def _session(self) -> JobRef:
        """The session's own job.

        Raises:
            NotFound: the session's records were removed.
        """
        return index.find(self._store, self._session_id)

    @functools.cached_property
    def _held(self) -> Plan:
        """The plan of the session's own job. Raises as `_session` does."""
        from kinetic._core.plan import Plan

        return Plan.read(self._store.get(layout.JobKeys(self._session_id).plan))

    @functools.cached_property
    def _bell(self) -> Bell:
        return open_bell(self._store, self._session_id, self._holder)

    def preflight(self, plan: Plan) -> None:
        """Refuse a call that does not fit the session, or whose session has ended."""
        reads: list[Callable[[], Any]] = [lambda: self._session, lambda: self._held]
        reads.append(lambda: sessions.is_stopped(self._store, self._session_id))
        try:
            session, held, is_stopped = at_once(
                lambda read: read(), reads, self._store.calls_at_once
            )
        except NotFound as error:
            raise PreflightError(
                f"The session {self._session_id} was removed. Start another one: `kinetic session "
                "start`."
            ) from error
        name = session.session_name
        if is_stopped or self._read_held().phase.ended:
            number = held.options.most_slices
            flags = f" --slices {number}" * (number > 1) + " --keep" * bool(held.options.keep)
            raise PreflightError(
                f"The session {name} ({session.job_id}) has ended. Start it again: `kinetic "
                f"session start {held.topology.name} --name {name}{flags}`."
            )
        if fault := find_misfit(plan, held):
            setting = settings.load().setting("session")
            where = f" (from {setting.source})" if setting.value == name else ""
            raise PreflightError(
                f"The call of {plan.name} cannot run on the session {name}{where}: {fault}"
            )

    def choose_image(
        self, plan: Plan, installed: Mapping[str, bytes], tell: Callable[[str], object]
    ) -> Plan:
        """Return the plan unchanged: the hosts are running already, and install the packages that
        the call adds. Refuse packages in other versions than those of the session."""
        from kinetic._source import dependencies

        held = self._held.requirements
        if plan.requirements in (None, held) or held is None:
            return plan
        lines = installed[plan.requirements.digest].decode().splitlines()
        own = self._store.get(layout.blob(held.digest)).decode().splitlines()
        if conflict := dependencies.find_conflict(lines, own):
            raise PreflightError(
                f"The call of {plan.name} requires {conflict[0]}, but the hosts of the session "
                f"{self._session.session_name} have installed {conflict[1]}. Require that version, "
                "or stop the session and start it again."
            )
        return plan

    def render(self, plan: Plan) -> list[Document]:
        """Return the request for the session's queue as the only document."""
        return [{"session": self._session_id, "job_id": plan.job_id}]

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Put the call into the session's queue."""
        key = layout.JobKeys(self._session_id).call(time.time_ns(), ref.job_id)
        self._store.put(key, b"")
        self._bell.ring()

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """Return the status of calls, from their verdicts, the queue, and the session's status."""
        store, session_id = self._store, self._session_id
        list_waiting = functools.cache(lambda: list_waiting_calls(store, session_id))
        read_held = functools.cache(self._read_held)
        return {ref.job_id: self._status_of(ref, list_waiting, read_held) for ref in refs}

    def _status(self, ref: JobRef) -> Status:
        return self.status([ref])[ref.job_id]

    def _status_of(
        self, ref: JobRef, list_waiting: Callable[[], list[str]], read_held: Callable[[], Status]
    ) -> Status:
        from kinetic._backends import stored

        if (verdict := stored.read_verdict(self._store, ref)) is not None:
            return verdict
        waiting = list_waiting()
        if ref.job_id not in waiting:  # The leader removes a request after the verdict.
            verdict = stored.read_verdict(self._store, ref)
            return verdict or Status(JobStatus.NOT_FOUND)
        held = read_held()
        if held.phase.ended:
            verdict = stored.read_verdict(self._store, ref)
            return verdict or Status(JobStatus.FAILED, "its session has ended")
        if stored.is_running(self._store, ref):
            return Status(JobStatus.RUNNING)
        if (place := waiting.index(ref.job_id)) > 0:
            return Status(JobStatus.PENDING, f"it waits for {waiting[place - 1]} on its session")
        return Status(JobStatus.PENDING, held.reason)

    def _read_held(self) -> Status:
        """Return the status of the session's own job: PENDING while it is being submitted."""
        from kinetic._backends import stored

        try:
            session = self._session
        except NotFound:
            return Status(JobStatus.NOT_FOUND)
        held = self._holder.status([session])[self._session_id]
        if held.phase is not JobStatus.NOT_FOUND:
            return held
        phase = stored.status_of_unknown(self._store, session, time.time())
        return stored.read_verdict(self._store, session) or Status(phase, SUBMITTING)

    def why_waiting(self, ref: JobRef) -> str | None:
        """Return why the call does not run yet; None if it runs or has ended. In the first second
        of a call, a store in a bucket is not read, and the answer is "": many calls end sooner."""
        is_new = time.time() - ref.created_at < 1.0 and folder_of(self._store) is None
        return "" if is_new else self._status(ref).why_waiting

    def why_lost(self, ref: JobRef, host: int) -> str:
        """Return "": the session's leader has recorded the cause."""
        return ""

    def why_unready(self, ref: JobRef) -> str:
        """Return "": a call starts only on hosts that are ready."""
        return ""

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read the call's output; with `follow`, until the call ends."""
        from kinetic._backends import attempt_logs

        if folder_of(self._store) is None:
            open_fd = functools.partial(self.ending_fd, ref)
            return attempt_logs.read_of_cluster(self._store, ref, request, self.status, open_fd)

        def has_ended() -> bool:
            has_verdict = self._store.has(layout.JobKeys(ref.job_id).outcome)
            return has_verdict or self._status(ref).phase.ended

        return attempt_logs.read(
            self._store, ref, request, has_ended, functools.partial(self._watch, ref, request)
        )

    def _watch(
        self, ref: JobRef, request: LogRequest, attempt: int, hosts: Sequence[int]
    ) -> AbstractContextManager[Pause]:
        from kinetic._backends.local import liveness

        root = folder_of(self._store)
        assert root is not None
        return liveness.watch_output(
            root, ref, request, attempt, hosts, session_id=self._session_id
        )

    def ending_fd(self, ref: JobRef) -> int | None:
        """Return a descriptor that becomes readable when the call has ended; None if there is no
        connection to the leader."""
        return self._bell.ending_fd(ref.job_id)

    def cancel(self, ref: JobRef) -> None:
        """Ask the leader to end a call, or take it from the queue. The session goes on."""
        cancellation.request(self._store, ref.job_id, self._bell.ring)
        if self._status(ref).phase is JobStatus.PENDING:
            outcome = Outcome(Verdict.CANCELLED, reason=CANCELLED_WAITING, ended_at=time.time())
            index.write_outcome(self._store, ref.job_id, outcome, if_absent=True)
            for key in self._store.list(layout.JobKeys(self._session_id).calls):
                if layout.JobKeys.call_id_of(key) == ref.job_id:
                    self._store.delete(key)

    def cleanup(self, ref: JobRef) -> None:
        """Free the memory that the call's hosts left in use on this machine."""
        from kinetic._system import memory_folder

        if folder_of(self._store) is not None:
            memory_folder.remove(ref.job_id)

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Send a signal to the hosts of the session, if this call runs on them now."""
        if not isinstance(self._holder, Kills):
            raise UsageError(
                f"Hosts of the session {self._session_id} cannot be killed: its backend does not "
                "support that. To end all its hosts, use `kinetic session stop --force NAME`."
            )
        if not self._runs(ref):
            return ()
        return self._holder.kill(self._session, hosts, signum, agents=agents)

    def processes(self, ref: JobRef) -> GangProcesses | None:
        """Return the processes of the session's hosts, if this call runs on them now."""
        if isinstance(self._holder, Processes) and self._runs(ref):
            return self._holder.processes(self._session)
        return None

    def control(self, ref: JobRef) -> Endpoint | None:
        """Return the endpoint of the session's leader, if it runs this call now."""
        if isinstance(self._holder, Controls) and self._runs(ref):
            return self._holder.control(self._session)
        return None

    def _runs(self, ref: JobRef) -> bool:
        return self._status(ref).phase is JobStatus.RUNNING


def list_waiting_calls(store: Store, session_id: str) -> list[str]:
    """Return the ids of the calls in a session's queue; the call that runs first comes first. A
    call that has its verdict does not count: the leader is about to remove it."""
    keys = sorted(store.list(layout.JobKeys(session_id).calls))
    job_ids = [layout.JobKeys.call_id_of(key) for key in keys]
    has_ended = bool(job_ids) and store.has(layout.JobKeys(job_ids[0]).outcome)
    return job_ids[1:] if has_ended else job_ids


def _name_shape(topology: Topology) -> str:
    number = topology.hosts
    return f"{topology.name} ({number} host{'' if number == 1 else 's'})"


def find_misfit(plan: Plan, held: Plan) -> str:
    """Return why a call with `plan` cannot run on a session with the plan `held`, as the end of a
    sentence; "" if it can."""
    wanted, own = plan.options, held.options
    if not are_alike(plan.topology, held.topology):
        own_shape, shape = _name_shape(held.topology), _name_shape(plan.topology)
        return (
            f"the session holds {own_shape}, but the call needs {shape}. Call the function without "
            "the session, or start another one."
        )
    if wanted.most_slices != own.most_slices:
        held_slices, slices = count_slices(own.most_slices), count_slices(wanted.most_slices)
        return (
            f"the session holds {held_slices}, but the call needs {slices}. Change slices= of the "
            "call, or start another session."
        )
    if plan.versions.python != held.versions.python:
        return (
            f"it runs Python {held.versions.python}, and this is Python {plan.versions.python}. "
            "Start a session with this Python."
        )
    for name, value in wanted.env.items():
        if name.startswith("JAX_") and own.env.get(name) != value:
            return (
                f"{name} takes effect when JAX is imported, which its hosts have done. Start a "
                f'session with env={{"{name}": "{value}"}}.'
            )
    unsupported = {
        "slices=(least, most)": wanted.elastic is not None,
        'controller="single"': plan.has_single_controller,
        "debug=True": wanted.debug,
        "volumes=": any(data.mount for data in plan.data),
        "compile_check= with keep=": wanted.compile_check and keeps_processes(wanted, own),
    }
    if options := [name for name, is_set in unsupported.items() if is_set]:
        return f"{options[0]} does not work on sessions. Call the function without the session."
    if missing := sorted(set(plan.secrets) - set(held.secrets)):
        return (
            f"the secret {missing[0]} was not given to it. Start a session with "
            f'secrets=["{missing[0]}"].'
        )
    return ""
