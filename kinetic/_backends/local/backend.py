"""The local backend: every host of the slice is a process tree on this machine.

Each job has a detached supervisor process, which starts and leads its hosts. This module has no
connection to it: it reads phase and output from the job's folder and the supervisor's lock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._backends.base import (
    Document,
    GangProcesses,
    LogRequest,
    Status,
)
from kinetic._backends.local import liveness, simulation
from kinetic._core import layout, record
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._core.variables import select_start_variables
from kinetic._store import files
from kinetic._store.base import folder_of
from kinetic._system import locks, machine, memory_folder, pipes
from kinetic.errors import CorruptRecord, PreflightError, SubmitError, UsageError

# A list of running jobs needs none of these, nor the modules that functions import.
if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kinetic._backends.attempt_logs import Pause
    from kinetic._backends.base import Connection
    from kinetic._core.endpoint import Endpoint
    from kinetic._core.log_format import LogChunk
    from kinetic._core.plan import Plan
    from kinetic._store.base import Store

LINGER_S = 2.0
"""Longest wait in seconds for reports of the hosts of a killed supervisor; 0.1 s is usual."""
_STARTING = "its hosts are starting"
_ENDING = "its supervisor was killed, and its hosts are ending"
_KILLED = "its supervisor was killed"


class LocalBackend:
    """Simulated slices on this machine. The promises are those of `backends.base.Backend`."""

    name = "local"

    def __init__(
        self,
        store: Store,
        worker_environ: Mapping[str, str] | None = None,
        *,
        available_memory_bytes: Callable[[], int | None] = machine.available_memory_bytes,
        usable_cpus: Callable[[], int] = machine.usable_cpus,
        unreachable_after_s: float = 30.0,
        has_debugger: Callable[[], bool] = simulation.has_debugger,
        loopback_fault: Callable[[], str] = machine.loopback_fault,
        system: str = sys.platform,
    ) -> None:
        self._store = store
        self._root = _folder_of(store)
        self._worker_environ = worker_environ
        self._available_memory_bytes = available_memory_bytes
        self._usable_cpus = usable_cpus
        self._has_debugger = has_debugger
        self._loopback_fault = loopback_fault
        self._system = system
        self._unreachable_after_s = unreachable_after_s
        self._orphaned_at: dict[str, float] = {}

    @functools.cached_property
    def _environ(self) -> dict[str, str]:
        """The environment variables that hosts inherit from this process."""
        if self._worker_environ is not None:
            return dict(self._worker_environ)
        from kinetic._config import settings  # not needed for a list of running jobs

        return settings.worker_environ()

    def preflight(self, plan: Plan) -> None:
        """Refuse a plan for which this machine lacks memory, programs or data."""
        simulation.check_system(self._system, plan.place)
        simulation.check_reach(plan, folder_of(self._store))
        simulation.check_places(plan, (self._store.uri, sys.prefix, sys.base_prefix))
        simulation.check_memory(plan, self._available_memory_bytes())
        simulation.check_loopback(plan, self._loopback_fault)
        simulation.check_debugger(plan, installed=self._has_debugger)
        simulation.check_pathways(plan)

    def room(self, plan: Plan | None) -> int:
        """Return the number of jobs for which this machine has processors and memory."""
        return simulation.room(plan, self._usable_cpus(), self._available_memory_bytes())

    def render(self, plan: Plan) -> list[Document]:
        """Return one document, from which the supervisor starts the gang."""
        return [simulation.document(plan)]

    def warm_up(
        self, *, needs_jax: bool, variables: Mapping[str, str], libraries: Sequence[str] = ()
    ) -> None:
        """Start the zygote, so that it imports modules while the caller still plans the job."""
        if not simulation.can_simulate(self._system):
            return
        from kinetic._backends.local import launcher

        modules = simulation.preload_modules(needs_jax=needs_jax, variables=variables)
        more = simulation.preload_libraries(libraries, variables=variables) if modules else ()
        launcher.warm_up(modules, self._environ | select_start_variables(variables), libraries=more)

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Start the supervisor, and return once it holds the job's lock."""
        from kinetic._backends.local import launcher

        (gang,) = documents
        environ = self._environ | select_start_variables({**gang["env"], **secrets})
        folder = self._folder(ref)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SubmitError(
                f"The folder {folder} of {ref.job_id} cannot be created: {error.strerror}. Correct "
                "this, or set KINETIC_HOME to a folder elsewhere."
            ) from error
        request = {
            "store": self._store.uri,
            "job_id": ref.job_id,
            "base_env": environ,
            "secrets": dict(secrets),
            "unreachable_after_s": self._unreachable_after_s,
        }
        try:
            launcher.launch(request, modules=tuple(gang["preload"]), environ=environ)
        except BaseException:
            liveness.bar_supervisor(folder)
            raise

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """Return the status of jobs, from their verdicts, or else from their supervisors' locks."""
        return {ref.job_id: self._status(ref) for ref in refs}

    def _status(self, ref: JobRef) -> Status:
        verdict = self._verdict(ref)
        if verdict is not None:
            return verdict
        # Read this before the lock: if a supervisor begins in between, the lock shows it.
        had_begun = self._was_supervised(ref)
        if self._is_supervised(ref):
            is_ready = (self._folder(ref) / "state.json").exists()
            with contextlib.suppress(OSError):
                source = files.content(self._root / layout.JobKeys(ref.job_id).fetch).decode()
                return Status(JobStatus.RUNNING, f"it is fetching {source}")
            return Status(JobStatus.RUNNING) if is_ready else Status(JobStatus.PENDING, _STARTING)
        if not had_begun:  # The submission is under way, or was interrupted.
            return self._verdict(ref) or Status(JobStatus.NOT_FOUND)
        verdict = self._verdict(ref)  # The supervisor may have judged and ended in between.
        if verdict is None and self._lingers(ref):
            return Status(JobStatus.RUNNING, _ENDING)
        return verdict or Status(JobStatus.FAILED, _KILLED)

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read the hosts' output files; with `follow`, until the job ends."""
        from kinetic._backends import attempt_logs  # not needed for a list of running jobs

        def has_ended() -> bool:  # Do not wait for the supervisor's cleanup.
            is_over = self._is_judged(ref) or not self._is_supervised(ref)
            return is_over and self._status(ref).phase.ended

        return attempt_logs.read(
            self._store, ref, request, has_ended, functools.partial(self._watch, ref, request)
        )

    def _watch(
        self, ref: JobRef, request: LogRequest, attempt: int, hosts: Sequence[int]
    ) -> AbstractContextManager[Pause]:
        return liveness.watch_output(self._root, ref, request, attempt, hosts)

    def cancel(self, ref: JobRef) -> None:
        """Ask the supervisor to stop the gang. Wake the supervisor if it is suspended (SIGSTOP)."""
        import signal

        pid = liveness.supervisor(self._folder(ref) / "lock")
        for signum in (signal.SIGTERM, signal.SIGCONT) if pid else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def cleanup(self, ref: JobRef) -> None:
        """Free the memory that the job's hosts left in use; records stay."""
        if self._is_judged(ref) or not self._is_supervised(ref):
            memory_folder.remove(ref.job_id)

    def control(self, ref: JobRef) -> Endpoint | None:
        """Return the endpoint of a running job's leader, or None."""
        runs = self._is_supervised(ref) and not self._is_judged(ref)
        if not (supervisor := runs and self._supervisor(ref)):
            return None
        from kinetic._core.endpoint import Endpoint

        return Endpoint(supervisor["target"], supervisor["token"], ref.job_id)

    def connect(self, ref: JobRef, host: int | None, port: int) -> Connection:
        """Connect to a port of this machine, on which all hosts run."""
        import socket

        from kinetic._system.connection import SocketConnection

        return SocketConnection(socket.create_connection(("127.0.0.1", port)))

    def processes(self, ref: JobRef) -> GangProcesses | None:
        """Return the processes that the supervisor has recorded; None if it has ended."""
        if not (supervisor := self._is_supervised(ref) and self._supervisor(ref)):
            return None
        return GangProcesses(
            supervisor["pid"], {int(host): pid for host, pid in supervisor["agents"].items()}
        )

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Send the signal to the hosts' workers or agents. In a job with a single controller, any
        signal to a machine of a slice simulates the loss of that slice."""
        real_hosts = [host for host in hosts if host < ref.hosts]
        machines = [host - ref.hosts for host in hosts if host >= ref.hosts]
        killed = liveness.signal_hosts(self.processes(ref), ref, real_hosts, signum, agents=agents)
        lost = self._lose_slices(ref, machines)
        return (*killed, *(ref.hosts + machine for machine in lost))

    def _lose_slices(self, ref: JobRef, machines: Sequence[int]) -> Sequence[int]:
        """Simulate the loss of the slices that contain these machines. Return the machines that
        exist; () if the job has no worker that can lose slices."""
        if not machines or not ref.has_single_controller:
            return ()
        from kinetic._core.plan import Plan

        plan = Plan.read(self._store.get(layout.JobKeys(ref.job_id).plan))
        if plan.elastic_controller is None:
            raise UsageError(
                f"{ref.job_id} has a single controller, one process with all slices, so it can "
                "lose a simulated slice only with slices=(least, most). Name host 0 to kill the "
                "controller."
            )
        hosts_each, most = plan.topology.hosts, plan.options.most_slices
        existing = [machine for machine in machines if machine < hosts_each * most]
        pipe = self._folder(ref) / "work" / "host-0" / layout.SLICES_PIPE
        lost = pipes.tell(
            pipe, "".join(f"{n}\n" for n in sorted({m // hosts_each for m in existing}))
        )
        return existing if lost else ()

    def ending_fd(self, ref: JobRef) -> int | None:
        """Return a descriptor that becomes readable when the supervisor ends; None if it has."""
        fd = liveness.ending_fd(self._folder(ref))
        return fd if fd >= 0 else None

    # -- the job's folder --------------------------------------------------------------------------

    def _folder(self, ref: JobRef) -> Path:
        return self._root / layout.JobKeys(ref.job_id).prefix / "local"

    def _lingers(self, ref: JobRef) -> bool:
        """True while agents of a killed supervisor end their hosts, for `LINGER_S` at most."""
        since = self._orphaned_at.setdefault(ref.job_id, time.monotonic())
        agents = (self._supervisor(ref) or {}).get("agents", {})
        return time.monotonic() - since <= LINGER_S and any(
            liveness.is_agent(pid, ref.job_id) for pid in agents.values()
        )

    def _is_judged(self, ref: JobRef) -> bool:
        return self._store.has(layout.JobKeys(ref.job_id).outcome)

    def _verdict(self, ref: JobRef) -> Status | None:
        try:
            data = self._store.get(layout.JobKeys(ref.job_id).outcome)
        except LookupError:
            return None
        from kinetic._backends import stored  # not needed for a list of running jobs

        return stored.parse_verdict(data)

    def _supervisor(self, ref: JobRef) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, CorruptRecord):
            return record.parse(files.content(self._folder(ref) / "supervisor.json"))
        return None

    def _was_supervised(self, ref: JobRef) -> bool:
        """True if a supervisor has ever held the job's lock."""
        folder = self._folder(ref)
        with contextlib.suppress(OSError):
            return (folder / "lock").stat().st_size > 0 or (folder / "supervisor.json").exists()
        return (folder / "supervisor.json").exists()

    def _is_supervised(self, ref: JobRef) -> bool:
        return locks.is_record_held(self._folder(ref) / "lock")


def _folder_of(store: Store) -> Path:
    folder = folder_of(store)
    if folder is None:
        raise PreflightError(
            f"The local backend needs a store in a folder of this machine, not {store.uri}. Set "
            "KINETIC_STORE to the path of a folder, or unset it."
        )
    return folder
