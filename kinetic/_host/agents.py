"""The agents that one process has forked: starts them, reaps them, explains their deaths.

Agents must not outlive the process that forked them: they read end-of-file from a pipe that only
that process holds open.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import re
import select
import shutil
import signal
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._core import layout
from kinetic._core.documents import from_document, to_document
from kinetic._core.exits import ProgramCode
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.plan import Plan
from kinetic._host.agent.worker_process import WorkerProcess
from kinetic._host.fork_server import ForkServer
from kinetic._host.identity import Identity
from kinetic._store.base import Store, folder_of
from kinetic._system import processes
from kinetic.errors import KineticError

if TYPE_CHECKING:
    from kinetic._core.outcome import HostReport

GANG_MODULES = ("kinetic._host.agent.loop", "kinetic._host.leader_runtime", "kinetic._rpc.client")
"""Modules with which a gang's processes communicate; importing them takes longer than a small
job."""
WORKER_LOST = "Its worker process was killed while it waited for the next attempt."
_MOST_WORDS_BYTES = 1 << 16
_RAISED = "raised: "
"""Prefix of the line with the exception that ended an agent, in its last words."""
_CRASH = re.compile(
    r"^Current thread.*\n"
    r'  File "(?:[^"]*/)?(?P<file>[^"/]+/[^"/]+)", line (?P<line>\d+) in (?P<function>\S+)',
    re.MULTILINE,
)
"""The innermost frame of a process that a fatal signal ended, as faulthandler prints it."""
_CRASHING = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""The signals that faulthandler handles. With any other signal, the last frame is no crash site."""


class Agents:
    """The agents of hosts on this machine, children of this process."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan = plan
        self._store = store
        self._alive = -1
        self._fork_server: ForkServer | None = None
        self.pids: dict[int, int] = {}
        """Host of each agent that has not been reaped, by process id."""
        self._last_words: dict[int, int] = {}
        """File in which the latest agent of a host writes its last words, by host."""

    def fork(self, identities: Iterable[Identity], *, may_repeat: bool = False) -> None:
        """Fork an agent for each identity. This process must not have started a thread yet (gRPC
        does). With `may_repeat`, `fork_again` can start hosts again."""
        # SIGCHLD stays blocked until a gang is served; `await_signal` takes it. SIGCONT stays
        # pending until an agent can act on it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGCONT])
        read_end, write_end = os.pipe()
        if may_repeat:
            identities = list(identities)
            self._fork_server = self._make_fork_server(identities, read_end, write_end)
        for identity in identities:
            words = self._open_last_words(identity.host)
            pid = processes.fork()
            if pid == 0:
                os.close(write_end)
                processes.exit_with(functools.partial(self._be_agent, identity, read_end, words))
            self.pids[pid] = identity.host
        os.close(read_end)
        # However this process dies, the kernel closes the pipe, and the agents read end-of-file.
        self._alive = write_end

    def _make_fork_server(
        self, identities: Sequence[Identity], alive: int, write_end: int
    ) -> ForkServer:
        indices = {identity.index: identity for identity in identities}

        def run(request: dict[str, Any], fds: Sequence[int]) -> int:
            identity = replace(indices[request["index"]], start=request["start"])
            if document := request["place"]:
                place = from_document(HostAssignment, document, "The assignment of a host")
                identity = identity.take_place(place)
            return self._be_agent(identity, alive, fds[0])

        return ForkServer(run, f"kinetic-forks {self._plan.job_id}", without=[write_end])

    def fork_again(self, index: int, place: HostAssignment | None = None, start: int = 1) -> None:
        """Restart a host that has ended, as its start number `start`. Without an assignment in
        `place`, its agent waits for one.

        Raises:
            OSError: no process could be forked.
        """
        if self._fork_server is None:
            raise OSError("the hosts of this job cannot be started again")
        request = {"index": index, "start": start, "place": place and to_document(place)}
        self.pids[self._fork_server.fork(request, [self._open_last_words(index)])] = index

    def end(self, indices: Collection[int]) -> None:
        """Kill the agents of these hosts and all their descendants, and forget them."""
        for pid in [pid for pid, host in self.pids.items() if host in indices]:
            del self.pids[pid]
            for victim in (pid, *processes.descendants(pid)):
                processes.kill(victim, signal.SIGKILL)

    def end_orphans(self) -> None:
        """Kill the orphans of killed agents, which this process has adopted."""
        own = {*self.pids, *(() if self._fork_server is None else (self._fork_server.pid,))}
        for pid in processes.children(os.getpid()):
            if pid not in own:
                processes.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Free the descriptors; agents that still run end."""
        for fd in (self._alive, *self._last_words.values()):
            os.close(fd)

    def _open_last_words(self, host: int) -> int:
        """Return a new file for the last words of a host's next agent."""
        if (before := self._last_words.pop(host, None)) is not None:
            os.close(before)
        self._last_words[host] = os.memfd_create("kinetic-last-words")
        return self._last_words[host]

    def _be_agent(self, identity: Identity, alive: int, last_words: int) -> int:
        # The only trace of a crash in gRPC's native code.
        faulthandler.enable(last_words)
        try:
            return self._run_agent(identity, alive)
        except Exception as error:
            words = f"{_RAISED}{type(error).__name__}: {processes.name_limit(error)}\n"
            os.write(last_words, words.encode())
            raise
        finally:
            # The host's program removes the folder, unless it was killed.
            if identity.is_program and select.select([alive], [], [], 0)[0]:
                shutil.rmtree(identity.scratch, ignore_errors=True)

    def cause_of_death(self, host: int, status: int) -> str:
        """Return a sentence for the wait status of a host's agent, with the exception or the crash
        site if known."""
        words = os.pread(self._last_words[host], _MOST_WORDS_BYTES, 0).decode(errors="replace")
        raised = [line for line in words.splitlines() if line.startswith(_RAISED)]
        cause = cause_of_death(status)
        if raised and os.WIFEXITED(status):
            return f"{cause[:-1]}: {raised[-1].removeprefix(_RAISED)}"
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        crashes = list(_CRASH.finditer(words)) if signum in _CRASHING else []
        if crashes:
            at = crashes[-1]
            cause = f"{cause[:-1]} at {at['file']}:{at['line']} in {at['function']}."
        if signum == signal.SIGALRM or (signum == signal.SIGABRT and " at grpc/" in cause):
            cause = f"{cause[:-1]}; {processes.find_limit()}."  # gRPC gets no threads.
        return cause

    def _run_agent(self, identity: Identity, alive: int) -> int:
        processes.set_title(f"kinetic-agent {identity.job_id} host {identity.host}")
        # SIGTERM: the host is taken away. SIGCONT: its leader listens. The agent unblocks both.
        signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGTERM, signal.SIGCONT])
        os.setpgid(0, 0)
        processes.take_precedence()
        processes.adopt_orphans()
        if identity.stays:
            from kinetic._host.agent.attempt_loop import AttemptLoop

            find_logs = functools.partial(log_files, store=self._store)
            loop = AttemptLoop(identity, self._plan, self._store, logs=find_logs, alive_fd=alive)
            return loop.run()
        # Forked before this process has threads: a fork copies the locks that they hold.
        worker = WorkerProcess(f"kinetic-worker {identity.job_id} host {identity.host}")
        from kinetic._host.agent.loop import Agent  # while the worker imports

        logs = log_files(identity, self._store)
        return Agent(identity, self._plan, self._store, worker, logs=logs, alive_fd=alive).run()

    def await_signal(self, timeout_s: float) -> int | None:
        """Wait for SIGCHLD (a child died: call `dead`) or SIGTERM, which must both be blocked.
        Return the signal, or None after `timeout_s`."""
        info = signal.sigtimedwait([signal.SIGCHLD, signal.SIGTERM], timeout_s)
        return None if info is None else info.si_signo

    def dead(self) -> Iterator[tuple[int, int]]:
        """Reap all dead children; yield host and wait status of each agent among them."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            host = self.pids.pop(pid, None)
            if host is not None:
                yield host, status

    def signal(self, signum: int, hosts: Iterable[int] | None = None) -> None:
        """Send a signal to the agents of these hosts, by default to all agents."""
        wanted = None if hosts is None else set(hosts)
        for pid, host in self.pids.items():
            if wanted is None or host in wanted:
                processes.kill(pid, signum)

    def report_left_by(self, host: int, attempt: int) -> HostReport | None:
        """Return the report that a host's agent stored, or None. The agent of a gang of one stores
        its report without delivering it."""
        from kinetic._core.outcome import HostReport

        with contextlib.suppress(KineticError, LookupError):
            key = layout.HostKeys(self._plan.job_id, attempt, host).report
            return HostReport.read(self._store.get(key))
        return None


def import_gang_modules() -> None:
    """Import the modules that need gRPC."""
    for name in GANG_MODULES:
        importlib.import_module(name)


def log_files(identity: Identity, store: Store) -> tuple[Path, Path]:
    """Return the paths of a host's log and its index in an attempt: in the store if that is a
    folder, else new files in the host's scratch folder."""
    if (folder := folder_of(store)) is not None:
        key = layout.HostKeys(identity.job_id, identity.attempt, identity.host).log
        return folder / key, folder / layout.log_index(key)
    log = Path(identity.scratch) / f"log-{identity.index}"
    own = log, log.with_name(f"{log.name}.idx")
    for file in own:  # Of an earlier attempt, whose log is already in the store.
        file.unlink(missing_ok=True)
    return own


def read_delivered_code(status: int) -> ProgramCode | None:
    """Return the exit code of an agent that delivered its report; None for any other end."""
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else ProgramCode.UNDELIVERED
    good = (ProgramCode.DELIVERED, ProgramCode.CODE_FAILED)
    return ProgramCode(code) if code in good else None


def cause_of_death(status: int) -> str:
    """Return a sentence for the wait status of an agent."""
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
    if code == ProgramCode.WORKER_LOST:
        return WORKER_LOST
    return f"Its agent process {processes.describe_end(status)}."
