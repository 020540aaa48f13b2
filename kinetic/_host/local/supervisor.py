"""The supervisor: leads a simulated gang whose hosts it forks on this machine.

It runs in its own session, so that it outlives the caller. It holds the job's lock exactly as long
as it lives.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import time
import traceback
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kinetic._core import layout
from kinetic._core.endpoint import Endpoint
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass
from kinetic._host.agents import Agents, import_gang_modules
from kinetic._host.identity import Identity
from kinetic._store.local import LocalStore
from kinetic._system import locks, memory_folder, processes
from kinetic.errors import KineticError

# The leader is imported after the agents are forked, so that they do not wait for it.
if TYPE_CHECKING:
    from kinetic._host.verdicts import Attempt

SOCKET_PATH_LIMIT = 100
"""Longest path of a Unix socket, in bytes; the kernel accepts 107."""
_ROOM_FILES = 32
"""Number of free inodes below which a disk counts as nearly full."""
_ADDRESS_SYNTAX = frozenset("%#?")
"""Characters with a meaning in the address of a socket."""
ATTEMPT_FILES = ("state.json", "fetching")
"""Files of the supervisor that concern one attempt; the next attempt removes them."""
LOCK_POLL_S = 0.002
FREE_AFTER_S = 3600.0
"""Time after which the memory of a job that succeeded is freed, even if its value was not
fetched."""


@dataclass(frozen=True)
class Request:
    """The request to start a supervisor.

    Attributes:
        store: root folder of the store.
        job_id: id of the job, whose plan is in the store.
        base_env: environment that the workers start from.
        secrets: values of the plan's secrets; never written to disk.
        heartbeat_s: seconds between two heartbeats of an agent.
        heartbeat_timeout_s: silence after which an agent counts as lost.
        unreachable_after_s: an agent that cannot reach the coordinator for this long ends its
            worker and exits.
    """

    store: str
    job_id: str
    base_env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    unreachable_after_s: float = 30.0


def main(request: Request, answer_fd: int = -1) -> NoReturn:
    """Run the gang and exit. Never returns into the code of the process that forked it.

    The answer is written to `answer_fd`, which is then closed: an error, or the process id of the
    supervisor that holds the job's lock. For a repeated request, that is the first supervisor.
    """
    processes.exit_with(lambda: Supervisor(request).run(answer_fd))


def free_memory_of_ended(store: LocalStore, now: float) -> None:
    """Free this machine's memory of jobs that succeeded long ago. Otherwise it is freed only when
    a job's value is fetched, which may never happen.

    Args:
        store: store of the jobs; memory of other stores' jobs stays.
        now: seconds since the epoch.
    """
    from kinetic._core.outcome import Outcome, Verdict

    for job_id in memory_folder.jobs():
        with contextlib.suppress(KineticError):
            outcome = Outcome.read(store.get(layout.JobKeys(job_id).outcome))
            if outcome.verdict is Verdict.SUCCEEDED and outcome.ended_at < now - FREE_AFTER_S:
                memory_folder.remove(job_id)


class Supervisor:
    """The supervisor of one job."""

    def __init__(self, request: Request) -> None:
        self._request = request
        # The next submission sweeps the store: this job's caller waits for the supervisor.
        self._store = LocalStore(Path(request.store), existing=True, sweeps=False)
        self._job = self._store.path(layout.JobKeys(request.job_id).prefix)
        self._own = self._job / "local"
        self._scratch = self._own / "work"
        self._socket_dir: Path | None = None
        self._attempt = 1

    def run(self, answer_fd: int) -> int:
        """Answer, lead the job to its end, and write the verdict; return an exit code."""
        try:
            self._init_process()
            leader = self._lock()
        except OSError as error:
            _answer(answer_fd, {"error": str(error), "errno": error.errno})
            raise
        _answer(answer_fd, {"pid": leader})
        if leader != os.getpid():
            return 0
        plan, ended = self._lead_to_end()
        processes.kill_descendants()
        with contextlib.suppress(OSError):  # To make room for the verdict.
            (self._scratch / processes.DISK_RESERVE).unlink()
        if _is_nearly_full(self._scratch):
            _remove(self._scratch)
        from kinetic._host import verdicts

        job_id = self._request.job_id
        memory_folder.remove_unused(job_id)
        try:
            verdicts.conclude(self._store, job_id, ended, plan)
        finally:  # Even if the store was removed.
            # After the verdict, so that the caller does not wait for this.
            _remove(self._scratch)
            self._sweep_up()
        return 0

    def _init_process(self) -> None:
        """Detach from the caller: own streams, signals, folder and title."""
        os.umask(0o077)
        os.chdir("/")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # Until the leader handles it.
        log = os.open(self._own / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        processes.adopt_orphans()
        processes.take_precedence()
        processes.raise_file_limit()
        processes.set_title(f"kinetic-supervisor {self._request.job_id}")

    def _lock(self) -> int:
        """Take the job's lock for as long as this process lives; children do not inherit a record
        lock. Return the id of this process, or that of an earlier supervisor of the job (0 if that
        has ended): callers repeat a request if the zygote dies before answering.

        Raises:
            FileNotFoundError: the job was removed.
        """
        path = self._own / "lock"
        self._lock_file = open(path, "a")
        while not locks.try_hold_record(self._lock_file.fileno()):
            if self._has_begun() and (first := locks.record_holder(path)):
                return first
            time.sleep(LOCK_POLL_S)  # Another supervisor begins, or a process tests the lock.
        if not self._holds_the_lock():
            raise FileNotFoundError(errno.ENOENT, "the job was removed", str(self._job))
        if self._has_begun():
            return 0
        self._scratch.mkdir(exist_ok=True, mode=0o700)
        self._lock_file.write("held\n")  # While the file is empty, no supervisor has begun.
        self._lock_file.flush()
        return os.getpid()

    def _has_begun(self) -> bool:
        return os.fstat(self._lock_file.fileno()).st_size > 0

    def _lead_to_end(self) -> tuple[Plan | None, Attempt]:
        """Return the plan and the last attempt. After any error the job must get a verdict."""
        plan = None
        try:
            plan = Plan.read(self._store.get(layout.JobKeys(self._request.job_id).plan))
            agents, target = Agents(plan, self._store), f"unix:{self._socket_path()}"
            endpoint = Endpoint(target, os.urandom(16).hex(), plan.job_id)
            self._fork_agents(plan, agents, endpoint)
            return plan, self._lead(plan, agents, endpoint)
        except Exception as error:  # noqa: BLE001 - after any error the job must get a verdict
            from kinetic._core.outcome import Outcome, Verdict
            from kinetic._host.verdicts import Attempt
            from kinetic._store import attempts

            traceback.print_exc()
            reason = f"The supervisor failed: {type(error).__name__}: {error}"
            ended_at, attempt = time.time(), attempts.find_newest(self._store, self._request.job_id)
            outcome = Outcome(Verdict.FAILED, (), reason, ended_at=ended_at, attempt=attempt)
            return plan, Attempt(outcome)

    def _fork_agents(self, plan: Plan, agents: Agents, endpoint: Endpoint) -> None:
        if plan.hosts > 1:
            import_gang_modules()  # Before the fork, so that agents share it.
        if _is_alone(plan):
            self._say_ready()  # The host begins at once.
        agents.fork(
            (self._identity(plan, host, endpoint) for host in range(plan.hosts)),
            may_repeat=_may_repeat(plan),
        )

    def _lead(self, plan: Plan, agents: Agents, endpoint: Endpoint) -> Attempt:
        self._publish(agents, endpoint)
        is_alone = _is_alone(plan)
        self._reserve()  # While the agents start.
        import shutil  # noqa: F401 - while the agents start, for the removal at the end

        from kinetic._core.gang.formation import make_policy
        from kinetic._host.hosts import ForkedHosts
        from kinetic._host.leader import Leader

        def on_agents(attempt: int) -> None:
            if attempt > self._attempt and plan.elastic_gang is None:
                for name in ("fetching",) if is_alone else ATTEMPT_FILES:
                    (self._own / name).unlink(missing_ok=True)
            self._attempt = attempt
            self._publish(agents, endpoint)
            self._reserve()  # The attempt before may have used the reserve.

        return Leader(
            plan,
            self._store,
            ForkedHosts(agents, stay=_stays(plan), alone=is_alone),
            make_policy(plan),
            heartbeat_timeout_s=self._request.heartbeat_timeout_s,
            has_records=self._holds_the_lock,
            on_ready=(lambda: None) if is_alone else self._say_ready,
            on_agents=on_agents,
            free_space=lambda: processes.free_half(self._scratch / processes.DISK_RESERVE),
            bell=self._own / "bell",
        ).lead(endpoint)

    def _reserve(self) -> None:
        processes.reserve_disk(self._scratch / processes.DISK_RESERVE)

    def _socket_path(self) -> Path:
        path = self._own / "socket"
        if not _is_socket_path(path):
            import tempfile

            self._socket_dir = Path(tempfile.mkdtemp(prefix="kinetic-"))
            path = self._socket_dir / "socket"
        path.unlink(missing_ok=True)
        return path

    def _identity(self, plan: Plan, host: int, endpoint: Endpoint) -> Identity:
        request, place = self._request, None
        if _may_repeat(plan):
            from kinetic._core.gang.formation import first_assignment, make_policy

            place = replace(first_assignment(plan, make_policy(plan)), host=host)
        return Identity(
            store_uri=request.store,
            job_id=plan.job_id,
            host=host,
            hosts=plan.hosts,
            target=endpoint.target,
            token=endpoint.token,
            address="127.0.0.1",
            scratch=str(self._scratch),
            simulated=True,
            assignment=place,
            assigned_index=host,
            stays=_stays(plan),
            base_env=request.base_env,
            secrets=request.secrets,
            heartbeat_s=request.heartbeat_s,
            unreachable_after_s=request.unreachable_after_s,
        )

    def _publish(self, agents: Agents, endpoint: Endpoint) -> None:
        record = {
            "pid": os.getpid(),
            "target": endpoint.target,
            "token": endpoint.token,
            "agents": {str(host): pid for pid, host in agents.pids.items()},
            "attempt": self._attempt,
        }
        self._put("supervisor.json", record)

    def _put(self, name: str, data: dict[str, Any]) -> None:
        key = f"{layout.JobKeys(self._request.job_id).prefix}/local/{name}"
        with contextlib.suppress(KineticError):  # A full disk must not end a running job.
            self._store.put(key, json.dumps(data).encode())

    def _holds_the_lock(self) -> bool:
        """Return False if the job's records were removed: the lock's file does not exist, or is
        another file.

        Raises:
            OSError: the file system does not answer.
        """
        try:
            return os.path.samestat(os.fstat(self._lock_file.fileno()), (self._own / "lock").stat())
        except FileNotFoundError:
            return False

    def _say_ready(self) -> None:
        self._put("state.json", {"ready": True})

    # -- the end -----------------------------------------------------------------------------------

    def _sweep_up(self) -> None:
        free_memory_of_ended(self._store, time.time())
        for name in ("socket", "bell", "supervisor.json", *ATTEMPT_FILES):
            (self._own / name).unlink(missing_ok=True)
        if self._socket_dir is not None:
            _remove(self._socket_dir)
        job_id = self._request.job_id
        if not any(map(self._store.has, (layout.JobKeys(job_id).plan, layout.JobKeys(job_id).ref))):
            # The job was removed, maybe with the store. An import that was under way may have
            # recreated the folders above Python's compiled files.
            self._store.delete(layout.JobKeys(job_id).prefix)
            self._store.remove_if_empty()


def _may_repeat(plan: Plan) -> bool:
    """True if another attempt may follow."""
    return plan.elastic_gang is not None or plan.options.retries > 0


def _is_alone(plan: Plan) -> bool:
    """True if the gang is one host, which begins without waiting for others."""
    return not _stays(plan) and plan.hosts == 1


def _stays(plan: Plan) -> bool:
    """True if agents wait for the next attempt. The only agent of a gang is forked again instead,
    which is quicker than connecting."""
    return _may_repeat(plan) and (plan.hosts > 1 or plan.elastic_gang is not None)


def _answer(fd: int, words: dict[str, Any]) -> None:
    if fd < 0:
        return
    with contextlib.suppress(OSError):
        os.write(fd, json.dumps(words).encode())
    os.close(fd)


def _is_nearly_full(folder: Path) -> bool:
    """True if the disk may not hold a few more small files."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return True
    few_files = disk.f_files > 0 and disk.f_favail < _ROOM_FILES
    return few_files or disk.f_bavail * disk.f_frsize < processes.RESERVED_BYTES


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _is_socket_path(path: Path) -> bool:
    """True if the kernel and gRPC accept a path: it is short enough, valid UTF-8, and unchanged in
    an address."""
    if not _ADDRESS_SYNTAX.isdisjoint(str(path)):
        return False
    try:
        return len(str(path).encode()) <= SOCKET_PATH_LIMIT
    except UnicodeEncodeError:
        return False
