"""A backend without a cluster: each host is a `python -m kinetic.runner` on this machine, joined
over TCP as pods are, and nobody starts a lost one again. It is the second that has no folder for
its store, and answers to the name of one that is not there yet (`open_as_ray`).

In: plans and refs, a store of any kind. Out: detached programs; their state from a lock that all of
them hold, the job's end from the store. Nothing supervises the gang: host 0 leads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import kinetic
from doubles.cluster.containers import Program as Forked
from doubles.cluster.shim import needs_no_interpreter
from kinetic._backends import attempt_logs, registry, stored
from kinetic._backends.base import (
    Connection,
    Document,
    GangProcesses,
    LogRequest,
    Status,
)
from kinetic._backends.local import liveness, simulation
from kinetic._config import settings
from kinetic._core import record
from kinetic._core.endpoint import Endpoint
from kinetic._core.log_format import LogChunk
from kinetic._core.place import Place
from kinetic._core.plan import Plan
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._rpc import certificate
from kinetic._store.base import Store
from kinetic._system import locks, machine, memory_folder, processes
from kinetic._system.connection import SocketConnection
from kinetic.errors import KineticError, PreflightError, SubmitError

Started = Forked | subprocess.Popen[bytes]
UNREACHABLE_AFTER_S = "10"
"""A leader that does not answer for this long is lost: as long as it waits for a silent host."""
LOCK = "alive"
"""The file whose lock all processes of a job inherit."""


@dataclass(frozen=True)
class Program:
    """One process; its id alone could be another's by now.

    Attributes:
        pid: its id.
        started: when it was started, in the kernel's count; "" if it was gone already.
    """

    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> Program:
        """The process that has this id now."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return cls(pid, fields[19] if fields[0] not in "ZX" else "")
        return cls(pid, "")

    def is_there(self) -> bool:
        return bool(self.started) and Program.of(self.pid) == self


@dataclass(frozen=True)
class Gang:
    """The record of a job's programs; the first leads."""

    endpoint: Endpoint
    hosts: tuple[Program, ...]


def root() -> Path:
    """The folder with one of each job: its credentials, process ids and output."""
    return settings.load().cache_dir / "programs"


@contextlib.contextmanager
def open_as_ray() -> Iterator[None]:
    """Let `backend="ray"` mean these hosts, in this process."""

    def make(_place: Place, store: Store) -> ProgramsBackend:
        return ProgramsBackend(store)

    with registry.substitute_backend("ray", make):
        yield


class ProgramsBackend:
    """Slices of programs on this machine (see backends.base.Backend for the promises).

    Args:
        store: of the jobs' records.
        forks: whether hosts begin as forks of a process that has imported JAX (cluster/shim.py).
    """

    name = "programs"

    def __init__(self, store: Store, *, forks: bool = True) -> None:
        self._store = store
        self._environ = settings.worker_environ()
        self._root = root()
        self._forks = forks

    def preflight(self, plan: Plan) -> None:
        """Refuse what this machine cannot hold or reach."""
        simulation.check_system(sys.platform, plan.place)
        simulation.check_reach(plan, self._store.as_folder())
        simulation.check_places(plan, (self._store.uri, sys.prefix, sys.base_prefix))
        simulation.check_memory(plan, machine.available_memory_bytes())
        simulation.check_debugger(plan, installed=simulation.has_debugger)
        if not certificate.is_available():
            raise PreflightError(certificate.MISSING)

    def render(self, plan: Plan) -> list[Document]:
        """One document for each host."""
        return [_document(plan, host) for host in range(plan.hosts)]

    def submit(self, ref: JobRef, documents: list[Document], secrets: Mapping[str, str]) -> None:
        """Start all programs, or none."""
        folder = self._folder(ref)
        try:
            folder.mkdir(parents=True, mode=0o700)
        except OSError as error:
            raise SubmitError(
                f"The job's folder {folder} cannot be created: {error.strerror}."
            ) from error
        started: list[Started] = []
        try:
            with _hold_port() as port, _hold_folder(folder) as alive:
                endpoint = _credentials(folder, ref.job_id, f"127.0.0.1:{port.getsockname()[1]}")
                env = self._environ | dict(secrets) | self._variables(folder, endpoint)
                for document in documents:
                    fds = (alive, port.fileno())
                    started.append(_start(folder, env | document["env"], fds, forks=self._forks))
                _keep(folder, endpoint, started)
        except BaseException:
            for program in started:
                program.kill()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            for program in started:
                # Nothing else would reap those that end while this process lives.
                threading.Thread(target=program.wait, daemon=True).start()

    def _variables(self, folder: Path, endpoint: Endpoint) -> dict[str, str]:
        own = str(Path(kinetic.__file__).resolve().parents[1])
        path = self._environ.get("PYTHONPATH", "")
        return {
            "PYTHONPATH": f"{own}{os.pathsep}{path}" if path else own,
            "KINETIC_STORE": self._store.uri,
            "KINETIC_COORDINATOR": endpoint.target,
            "KINETIC_CREDENTIALS": str(folder / "credentials"),
            "KINETIC_SCRATCH": str(folder / "work"),
            "KINETIC_UNREACHABLE_AFTER_S": UNREACHABLE_AFTER_S,
        }

    def status(self, refs: Sequence[JobRef]) -> dict[str, Status]:
        """From the verdicts or, without one, from the programs' lock and records."""
        return {ref.job_id: self._status(ref) for ref in refs}

    def _status(self, ref: JobRef) -> Status:
        verdict = stored.verdict(self._store, ref)
        if verdict is not None:
            return verdict
        if not _was_begun(self._folder(ref)):
            # It is being submitted, or its submission was interrupted.
            return stored.verdict(self._store, ref) or Status(JobStatus.NOT_FOUND)
        if self._is_alive(ref):
            return (
                Status(JobStatus.RUNNING)
                if self._is_ready(ref)
                else Status(JobStatus.PENDING, "its hosts are starting")
            )
        # It may have been written between the two checks.
        verdict = stored.verdict(self._store, ref)
        return verdict or Status(JobStatus.FAILED, "its hosts are gone")

    def logs(self, ref: JobRef, request: LogRequest) -> Iterator[LogChunk | None]:
        """Read what the hosts have printed and, when following, go on until the job has ended."""
        return attempt_logs.read(self._store, ref, request, lambda: self._has_ended(ref))

    def _has_ended(self, ref: JobRef) -> bool:
        return not self._is_alive(ref) and self._status(ref).phase.ended

    def cancel(self, ref: JobRef) -> None:
        """Ask the leader to stop the gang; one that was stopped (SIGSTOP) is continued."""
        pid = self._find_leader(ref)
        for signum in (signal.SIGTERM, signal.SIGCONT) if pid else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def cleanup(self, ref: JobRef) -> None:
        """Remove the job's secrets and what its programs wrote, unless it runs."""
        if not self._is_alive(ref):
            shutil.rmtree(self._folder(ref), ignore_errors=True)
            memory_folder.remove(ref.job_id)

    def control(self, ref: JobRef) -> Endpoint | None:
        """The coordinator of a running job."""
        gang = self._gang(ref)
        return gang.endpoint if gang is not None and gang.hosts[0].is_there() else None

    def connect(self, ref: JobRef, host: int, port: int) -> Connection:
        """Connect to a port of a host, which is this machine."""
        return SocketConnection(socket.create_connection(("127.0.0.1", port)))

    def processes(self, ref: JobRef) -> GangProcesses | None:
        """Process ids of a running job; the program that leads the gang is its supervisor."""
        gang = self._gang(ref)
        if gang is None or not self._is_alive(ref):
            return None
        pids = {host: program.pid for host, program in enumerate(gang.hosts)}
        return GangProcesses(supervisor=pids[0], agents=pids)

    def kill(
        self, ref: JobRef, hosts: Sequence[int], signum: int, *, agents: bool = False
    ) -> tuple[int, ...]:
        """Send the signal to their workers, or to their agents."""
        return liveness.signal_hosts(self.processes(ref), ref, hosts, signum, agents=agents)

    # -- records ------------------------------------------------------------------------------

    def _folder(self, ref: JobRef) -> Path:
        return self._root / ref.job_id

    def _find_leader(self, ref: JobRef) -> int:
        """Process id of the leader; 0 if it does not run."""
        gang = self._gang(ref)
        if gang is None:  # The caller was killed before it recorded which programs it started.
            # It cannot be found before it is executed, or while it changes its title.
            while not (pid := _find_leader(self._folder(ref))) and self._is_alive(ref):
                time.sleep(0.01)
            return pid
        return gang.hosts[0].pid if gang.hosts[0].is_there() else 0

    def _is_alive(self, ref: JobRef) -> bool:
        """Whether any host's process is left."""
        with contextlib.suppress(OSError):
            fd = os.open(self._folder(ref) / LOCK, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return not locks.try_hold(fd, shared=True)
            finally:
                os.close(fd)
        return False

    def _gang(self, ref: JobRef) -> Gang | None:
        folder = self._folder(ref)
        try:
            told = record.parse((folder / "hosts.json").read_bytes())
            hosts = tuple(Program(**host) for host in told["hosts"])
            secrets = folder / "credentials"
            token, shown = (secrets / "token").read_text(), (secrets / "tls.crt").read_text()
            endpoint = Endpoint(told["target"], token, ref.job_id, certificate=shown)
            return Gang(endpoint, hosts)
        except (OSError, KineticError, KeyError, TypeError):
            return None

    def _is_ready(self, ref: JobRef) -> bool:
        if ref.hosts == 1:
            return True  # There are no other hosts to wait for.
        return stored.has_begun(self._store, ref)


def _document(plan: Plan, host: int) -> Document:
    return {
        "kind": "host program",
        "job_id": plan.job_id,
        "command": ["python", "-m", "kinetic.runner"],
        "env": {
            "KINETIC_JOB_ID": plan.job_id,
            "KINETIC_HOST_INDEX": str(host),
            "KINETIC_HOSTS": str(plan.hosts),
            "KINETIC_HOST_ADDRESS": "127.0.0.1",
            "KINETIC_SIMULATED": "1",
            "KINETIC_DEBUG_PORT": "0",
        },
    }


def _was_begun(folder: Path) -> bool:
    """Whether the lock has ever been held."""
    try:
        return (folder / LOCK).stat().st_size > 0
    except OSError:
        return False


@contextlib.contextmanager
def _hold_folder(folder: Path) -> Iterator[int]:
    """A descriptor with a lock that is free once all processes that inherited it have closed it."""
    fd = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        locks.hold(fd)
        os.write(fd, b"held\n")  # An empty file means that nothing was started yet.
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _hold_port() -> Iterator[socket.socket]:
    """A port for the leader, bound without listening: the leader can bind it as well, but no other
    process is given it."""
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        yield port


def _credentials(folder: Path, job_id: str, target: str) -> Endpoint:
    endpoint = Endpoint(target, os.urandom(16).hex(), job_id)
    made = certificate.make(endpoint.tls_name)
    secrets = folder / "credentials"
    secrets.mkdir(mode=0o700)
    files = {"token": endpoint.token, "tls.crt": made.certificate, "tls.key": made.key}
    for name, text in files.items():
        fd = os.open(secrets / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "w") as file:
            file.write(text)
    return replace(endpoint, certificate=made.certificate)


def _start(folder: Path, env: Mapping[str, str], fds: tuple[int, ...], *, forks: bool) -> Started:
    # The leader acts on SIGTERM (cancel) once it can; until then the signal waits. Masks are
    # inherited.
    leads = env["KINETIC_HOST_INDEX"] == "0"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM] if leads else [])
    wanted: dict[str, Any] = {"argv": [sys.executable, "-m", "kinetic.runner"], "env": env}
    try:
        with open(folder / f"output-{env['KINETIC_HOST_INDEX']}", "ab") as output:
            if forks and needs_no_interpreter(wanted):
                return Forked(wanted | {"cwd": "/"}, output.fileno(), fds)
            return subprocess.Popen(
                wanted["argv"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
                start_new_session=True,
                cwd="/",
                env=env,
            )
    except OSError as error:
        raise SubmitError(
            f"A host could not be started: {error.strerror}: {error.filename or sys.executable}."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _keep(folder: Path, endpoint: Endpoint, started: Sequence[Started]) -> None:
    told = [asdict(Program.of(each.pid)) for each in started]
    data = json.dumps({"target": endpoint.target, "hosts": told})
    (folder / "hosts.json.new").write_text(data)
    (folder / "hosts.json.new").replace(folder / "hosts.json")


def _find_leader(folder: Path) -> int:
    """Process id of the leader that has the credentials of this folder; 0 if none runs. Its title
    overwrites the environment that /proc shows, and the folder has the job's id."""
    marks = {f"KINETIC_CREDENTIALS={folder / 'credentials'}".encode(), b"KINETIC_HOST_INDEX=0"}
    title = f"kinetic-host {folder.name} host 0".encode()
    for pid in processes.all_pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) != pid:
                continue  # perhaps forked by it, with the same environment and title
            is_titled = processes.command_line(pid).rstrip(b"\0") == title
            if is_titled or marks <= set(processes.environ(pid).split(b"\0")):
                return pid
    return 0
