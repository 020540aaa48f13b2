"""The supervisor: runs one simulated gang on this machine, from the fork of its agents to the
verdict.

In: a request (store, job, environment, secrets). Out: agents, events.jsonl, outcome.json. It has
its own session, so it outlives the caller; the lock is free exactly when it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kinetic._core import layout, record
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.exits import Exit
from kinetic._core.gang.machine import Gang, GangSpec
from kinetic._core.outcome import HostReport, Outcome, Verdict, judge
from kinetic._core.plan import Plan
from kinetic._datasets import cached_copy
from kinetic._host.agent.identity import Identity
from kinetic._host.agent.loop import ALONE_S, Agent
from kinetic._host.agent.mountpoints import Mountpoints
from kinetic._store import footprints
from kinetic._store.local import LocalStore
from kinetic._system import processes
from kinetic.errors import KineticError, StoreFull

if TYPE_CHECKING:
    from kinetic._rpc.server import Coordinator

SPEAKING = ("kinetic._rpc.server", "kinetic._rpc.client")
"""What a gang's processes need to speak with one another; importing it takes longer than a small
job."""
SOCKET_PATH_LIMIT = 100
"""Bytes of a Unix socket's path; the kernel takes 107."""
RESERVE_BYTES = 1 << 16
"""Kept on disk so that the verdict can be written when the disk is full."""
LEAVE_S = 3.0
"""How long agents may take to go, once everything has been reported."""
CANCELLED = "The job was cancelled before its next attempt. The last one:"
PEERS_S = 0.3
"""How long a host may take to fail as another one just did, so that both are named."""
LOOK_EVERY_S = 0.5
"""How often the supervisor looks whether the job's records are still there."""


@dataclass(frozen=True)
class Request:
    """What a supervisor is started with.

    Attributes:
        store: root folder of the store.
        job_id: the job; its plan is in the store.
        base_env: environment that the workers start from.
        secrets: values of the plan's secrets; never written to disk.
        attempt: which start of the gang this is, from 1.
        failed_before: why the attempt before this one failed; "" for the first.
        heartbeat_s: between two heartbeats of an agent.
        heartbeat_timeout_s: after this silence an agent counts as lost.
        unreachable_after_s: an agent that cannot reach the coordinator for so long ends its worker
            and goes.
    """

    store: str
    job_id: str
    base_env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    attempt: int = 1
    failed_before: str = ""
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 10.0
    unreachable_after_s: float = 30.0


def main(request: Request, caller: socket.socket | None = None) -> NoReturn:
    """Run the gang and leave. Never returns into the code of the process that forked.

    `caller` is told this process's id as soon as the job's lock is held, and then closed.
    """
    code = 70
    try:
        code = Supervisor(request).run(caller)
    except BaseException:  # noqa: BLE001 - the last line of defence of a forked child
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


class Supervisor:
    """One attempt at one gang."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._store = LocalStore(Path(request.store), existing=True)
        self._job = self._store.path(layout.job(request.job_id))
        self._own = self._job / "local"
        self._scratch = self._own / "work"
        self._agents: dict[int, int] = {}
        self._socket_dir: Path | None = None
        self._removed = self._unwanted = False

    def run(self, caller: socket.socket | None) -> int:
        """Return 0 when a verdict was written."""
        self._settle()
        self._lock()
        if caller is not None:
            with (
                caller,
                contextlib.suppress(OSError),
            ):  # A caller that died meanwhile does not stop the job.
                caller.sendall(json.dumps({"pid": os.getpid()}).encode() + b"\n")
        try:
            plan = Plan.from_json(json.loads(self._store.get(layout.plan(self._request.job_id))))
            outcome = self._attempt(plan)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, the job must get a verdict
            traceback.print_exc()
            outcome = Outcome(
                Verdict.FAILED,
                reason=f"The supervisor failed: {type(error).__name__}: {error}",
                ended_at=time.time(),
            )
            plan = None
        processes.kill_descendants()
        if plan is not None:  # for agents that were killed
            Mountpoints(cached_copy.root_of(self._store)).release(plan.data)
        shutil.rmtree(self._scratch, ignore_errors=True)
        if plan is not None and _may_retry(outcome, plan.retries) and not self._removed:
            if not self._unwanted and signal.SIGTERM not in signal.sigpending():
                self._start_over(outcome)
            outcome = replace(
                outcome,
                verdict=Verdict.CANCELLED,
                blamed=(),
                reason=f"{CANCELLED} {outcome.reason}",
            )
        if self._removed and not self._store.has(layout.plan(self._request.job_id)):
            # What was written since they were removed.
            self._store.delete(layout.job(self._request.job_id))
        else:
            self._write_outcome(outcome)
            if plan is not None:
                footprints.remember(self._store, plan, outcome)
        self._sweep_up()
        return 0

    def _settle(self) -> None:
        """Take the process over: nothing of the caller's is left but the lock."""
        self._own.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.umask(0o077)
        os.chdir("/")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # Until the loop can act on it.
        log = os.open(self._own / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        processes.adopt_orphans()
        processes.raise_file_limit()
        processes.set_title(f"kinetic-supervisor {self._request.job_id}")
        processes.reserve_disk(self._own / "reserve", RESERVE_BYTES)
        self._scratch.mkdir(exist_ok=True, mode=0o700)

    def _lock(self) -> None:
        """Hold the job's lock for as long as this process lives. A record lock is this process's
        alone: its children do not inherit it, and it is kept when the process becomes the
        supervisor of another attempt."""
        self._lock_file = open(self._own / "lock", "w")
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
        self._lock_file.write("held\n")  # An empty one says that no supervisor has begun.
        self._lock_file.flush()

    def _attempt(self, plan: Plan) -> Outcome:
        token = os.urandom(16).hex()
        socket_path = self._socket_path()
        if plan.hosts > 1:
            _learn_to_speak()  # Before the fork, so that the agents need not do it each.
        else:
            self._say_ready()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        self._fork_agents(plan, f"unix:{socket_path}", token)
        self._publish(target=f"unix:{socket_path}", token=token)
        gang = Gang(_gang_spec(plan, self._request), time.monotonic())
        if plan.hosts > 1 or not self._ends_at_once(gang):
            _learn_to_speak()
            import asyncio

            asyncio.run(self._supervise(gang, token, f"unix:{socket_path}"))
        self._unwanted = gang.unwanted
        outcome = judge(
            plan.hosts,
            gang.reports,
            blamed=gang.first_failure,
            reason=gang.stop_reason,
            now=time.time(),
            attempt=self._request.attempt,
        )
        self._event(
            GangEvent(
                EventKind.ENDED,
                detail=outcome.reason,
                hosts=outcome.blamed,
                verdict=outcome.verdict,
            )
        )
        return outcome

    def _socket_path(self) -> Path:
        path = self._own / "socket"
        if not _is_socket_path(path):
            import tempfile

            self._socket_dir = Path(tempfile.mkdtemp(prefix="kinetic-"))
            path = self._socket_dir / "socket"
        path.unlink(missing_ok=True)
        return path

    def _fork_agents(self, plan: Plan, target: str, token: str) -> None:
        """Fork every agent before this process has a thread: gRPC starts some."""
        alive, ours = os.pipe()
        for host in range(plan.hosts):
            pid = os.fork()
            if pid == 0:
                os.close(ours)
                self._be_agent(plan, host, target, token, alive)
            self._agents[pid] = host
        os.close(alive)
        self._alive = (
            ours  # Closed by the kernel when this process dies, however it dies: the agents see it.
        )

    def _be_agent(self, plan: Plan, host: int, target: str, token: str, alive: int) -> NoReturn:
        code = 70
        try:
            processes.set_title(f"kinetic-agent {plan.job_id} host {host}")
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            request = self._request
            identity = Identity(
                store_uri=request.store,
                job_id=plan.job_id,
                host=host,
                hosts=plan.hosts,
                target=target,
                token=token,
                address="127.0.0.1",
                scratch=str(self._scratch),
                simulated=True,
                attempt=request.attempt,
                failed_before=request.failed_before,
                base_env=request.base_env,
                secrets=request.secrets,
                heartbeat_s=request.heartbeat_s,
                unreachable_after_s=request.unreachable_after_s,
            )
            logs = (
                self._store.path(layout.log(plan.job_id, host)),
                self._store.path(layout.log_index(plan.job_id, host)),
            )
            code = Agent(identity, plan, self._store, logs, alive).run()
        except BaseException:  # noqa: BLE001 - the last line of defence of a forked child
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _publish(self, *, target: str, token: str) -> None:
        agents = {str(host): pid for pid, host in self._agents.items()}
        told = {
            "pid": os.getpid(),
            "target": target,
            "token": token,
            "agents": agents,
            "attempt": self._request.attempt,
        }
        self._put("supervisor.json", told)

    def _put(self, name: str, data: dict[str, Any]) -> None:
        key = f"{layout.job(self._request.job_id)}/local/{name}"
        with contextlib.suppress(KineticError):  # A full disk must not end a job that runs.
            self._store.put(key, json.dumps(data).encode())

    # -- while the gang runs -----------------------------------------------------------------------

    def _ends_at_once(self, gang: Gang) -> bool:
        """Whether a gang of one host is over before its coordinator is worth its start."""
        if signal.sigtimedwait([signal.SIGCHLD], ALONE_S) is None:
            return False
        for host, status in self._dead_agents():
            report = self._report_kept(host) if status == 0 else None
            if report is None:
                gang.lost(host, _agent_death(status), time.monotonic())
            else:
                gang.join(host, str(os.getpid()), "", time.monotonic())
                gang.report(report, time.monotonic())
        for event in gang.sweep(time.monotonic()):
            self._on_event(event)
        return gang.finished

    async def _supervise(self, gang: Gang, token: str, target: str) -> None:
        import asyncio

        from kinetic._rpc.server import Coordinator

        coordinator = Coordinator(gang, token, on_event=self._on_event)
        await coordinator.start(target)
        loop = asyncio.get_running_loop()
        self._all_gone = asyncio.Event()
        loop.add_signal_handler(
            signal.SIGTERM, lambda: coordinator.cancel("The job was cancelled.")
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        loop.add_signal_handler(
            signal.SIGCHLD, lambda: self._reap(coordinator, alone=gang.spec.hosts == 1)
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        self._reap(coordinator, alone=gang.spec.hosts == 1)
        looking = asyncio.create_task(self._watch_records(coordinator))
        await coordinator.wait_finished()
        looking.cancel()
        self._kill_silent(gang)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_gone.wait(), LEAVE_S + gang.spec.grace_s)
        for pid in self._agents:
            processes.kill(pid, signal.SIGKILL)
        await coordinator.stop()
        # From here on a wish to cancel comes too late, or waits for the next attempt: it must not
        # kill who writes the verdict.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    async def _watch_records(self, coordinator: Coordinator) -> None:
        """End the job when its records are removed: nobody could find, see or cancel it any
        more."""
        import asyncio

        while self._holds_the_lock():
            await asyncio.sleep(LOOK_EVERY_S)
        self._removed = True
        coordinator.cancel("The job's records were removed while it ran.")

    def _holds_the_lock(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock_file.fileno()), (self._own / "lock").stat())
        except OSError:
            return False

    def _kill_silent(self, gang: Gang) -> None:
        """Nothing is to be expected of an agent that never joined or fell silent: do not wait for
        it to go."""
        silent = {r.host for r in gang.reports if r.exit in (Exit.NEVER_JOINED, Exit.AGENT_LOST)}
        for pid, host in self._agents.items():
            if host in silent:
                processes.kill(pid, signal.SIGKILL)

    def _reap(self, coordinator: Coordinator, *, alone: bool) -> None:
        for host, status in self._dead_agents():
            report = self._report_kept(host) if status == 0 and alone else None
            if report is not None:
                coordinator.report(report)
            elif alone or status != 0:
                coordinator.lost(host, _agent_death(status))
        if not self._agents:
            self._all_gone.set()

    def _dead_agents(self) -> Iterator[tuple[int, int]]:
        """Reap; yield host and wait status of each agent."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            host = self._agents.pop(pid, None)
            if host is not None:
                yield host, status

    def _report_kept(self, host: int) -> HostReport | None:
        """The report that the agent of a gang of one host left in the store: it need not deliver
        it."""
        with contextlib.suppress(KineticError, LookupError):
            data = record.parse(self._store.get(layout.report(self._request.job_id, host)))
            report = HostReport.from_json(data)
            return report if report.attempt == self._request.attempt else None
        return None

    def _on_event(self, event: GangEvent) -> None:
        if event.kind is EventKind.STOP:
            for pid in self._agents:  # One that was stopped (SIGSTOP) must get it too.
                processes.kill(pid, signal.SIGCONT)
        if event.kind is EventKind.READY:
            self._say_ready()
        self._event(event)

    def _say_ready(self) -> None:
        self._put("state.json", {"ready": True, "attempt": self._request.attempt})

    def _event(self, event: GangEvent) -> None:
        stamped = replace(event, time=time.time(), attempt=self._request.attempt)
        line = json.dumps(stamped.to_json()) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        with contextlib.suppress(OSError):
            fd = os.open(self._store.path(layout.events(self._request.job_id)), flags, 0o600)
            with open(fd, "a") as events:
                events.write(line)

    # -- the end -----------------------------------------------------------------------------------

    def _write_outcome(self, outcome: Outcome) -> None:
        data = json.dumps(outcome.to_json()).encode()
        try:
            self._store.put(layout.outcome(self._request.job_id), data)
        except StoreFull:
            (self._own / "reserve").unlink(missing_ok=True)
            self._store.put(layout.outcome(self._request.job_id), data)

    def _sweep_up(self) -> None:
        for name in ("reserve", "socket", "supervisor.json"):
            (self._own / name).unlink(missing_ok=True)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _start_over(self, outcome: Outcome) -> None:
        """Become the supervisor of the next attempt: same process id, same lock, nothing else
        kept."""
        self._event(GangEvent(EventKind.RETRY, detail=outcome.reason))
        self._sweep_up()
        (self._own / "state.json").unlink(missing_ok=True)
        again = asdict(self._request) | {
            "attempt": self._request.attempt + 1,
            "failed_before": outcome.reason,
        }
        spool = _in_memory(json.dumps(again).encode())
        for fd in (
            spool,
            self._lock_file.fileno(),
        ):  # Closing any descriptor of the lock file would free the lock.
            os.set_inheritable(fd, True)
        os.execv(
            sys.executable, [sys.executable, "-m", "kinetic._host.local.supervisor", str(spool)]
        )


def _in_memory(data: bytes) -> int:
    """A descriptor from which the data can be read, once: it holds secrets, so no disk sees it.

    Not a pipe: the environment may be longer than a pipe holds.
    """
    fd = os.memfd_create("kinetic-request", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(
        fd,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _learn_to_speak() -> None:
    for name in SPEAKING:
        importlib.import_module(name)


def _is_socket_path(path: Path) -> bool:
    """Whether the kernel and gRPC take it: not too many bytes, and text."""
    try:
        return len(str(path).encode()) <= SOCKET_PATH_LIMIT
    except UnicodeEncodeError:
        return False


def _gang_spec(plan: Plan, request: Request) -> GangSpec:
    limits = plan.limits
    return GangSpec(
        hosts=plan.hosts,
        start_timeout_s=limits.start_timeout_s,
        timeout_s=limits.timeout_s,
        hang_timeout_s=limits.hang_timeout_s,
        heartbeat_timeout_s=request.heartbeat_timeout_s,
        grace_s=limits.grace_s,
        peers_window_s=PEERS_S,
        attempt=request.attempt,
    )


def _may_retry(outcome: Outcome, retries: int) -> bool:
    first = outcome.first
    return (
        not outcome.ok
        and outcome.attempt <= retries
        and first is not None
        and first.exit.kind.retryable
    )


def _agent_death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"Its agent process was killed by {processes.signal_name(os.WTERMSIG(status))}."
    return f"Its agent process ended with exit code {os.WEXITSTATUS(status)}."


def _from_command_line() -> NoReturn:
    with open(int(sys.argv[1]), "rb") as spool:
        request = Request(**json.loads(spool.read()))
    main(request)  # The file is closed: agents are forked from here.


if __name__ == "__main__":
    _from_command_line()
