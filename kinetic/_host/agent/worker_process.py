"""The worker process from the agent's side: forked, with a channel, two output streams, and Python
stacks on request."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from kinetic._core.gang.blame import STOPPED
from kinetic._host.agent.stall import Sample
from kinetic._host.channel import Channel
from kinetic._host.fork_server import ForkServer
from kinetic._host.worker import libraries, process
from kinetic._system import processes

PIPE_BYTES = 1 << 20
STACKS_S = 1.0
"""Time that a worker has to write its stacks."""
_BYSTANDER = r"(?m)^(?:Current t|T)hread 0x[0-9a-f]+[^\n]*most recent call first\):\n\s*?\n(?=\S)"
"""Threads without frames of users, such as the thread that takes the signal for stacks."""
_OWN_FRAME = (
    r'File "(<frozen runpy>|.*/kinetic/(?:_host|_system|runner)/[\w/]+\.py|'
    r'.*/(site|dist)-packages/debugpy/.*)", line'
)


class WorkerProcess:
    """One worker process, from its fork until it is reaped.

    Attributes:
        pid: its process id, which is also its process group.
        pidfd: readable once it has ended.
        out, err: read ends of its standard streams.
        channel: messages to and from it.
        fork_server: the fork server that has forked it, or None.
        keep: process ids of the agent's fork servers; neither they nor their descendants may be
            killed with the worker.
        has_ended: it has been reaped.
        status: its wait status, once it has ended.
        stacks_thread: id of its thread that only writes stacks; 0 before it has one.
        is_kept: it has ended a call of its session, and waits for the next one.
        leader: the leader's address in the world of JAX, as sent to the worker; "" if none was.
        ports: sockets that reserve the ports in that address.
    """

    def __init__(self, title: str, fork_server: ForkServer | None = None) -> None:
        """Fork the worker from this process, which must have no threads; or from a fork server that
        was made to run `serve` in its children."""
        agent_end, worker_end = socket.socketpair()
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        for fd in (out, err):
            _widen(fd)
        self._stacks = os.memfd_create("kinetic-stacks")
        fds = (worker_end.fileno(), out, err, self._stacks)
        self.fork_server, self.keep = fork_server, tuple[int, ...]()
        if fork_server is not None:
            self.pid = fork_server.fork({"title": title}, fds)
        else:
            parent = os.getpid()
            self.pid = processes.fork()
            if self.pid == 0:
                _be_worker(title, fds, parent)
        worker_end.close()
        os.close(out)
        os.close(err)
        self.channel = Channel(agent_end)
        self.pidfd = os.pidfd_open(self.pid)
        self.stacks_thread = 0
        self.is_kept, self.leader = False, ""
        self.ports: list[socket.socket] = []
        self.has_ended = False
        self.status = 0
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the worker or of its largest descendant, such as a command's process."""
        return (
            self._peak_bytes
            if self.has_ended
            else max(self._peak_bytes, processes.high_water_bytes(self.pid))
        )

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the worker now."""
        return 0 if self.has_ended else processes.rss_bytes(self.pid)

    def sample(self, log_bytes: int, row_bytes: int, saving_step: int | None) -> Sample:
        """Read the worker's counters; the agent passes those of its output, metrics and saves."""
        descendants = processes.descendants(self.pid)
        self._peak_bytes = max([self._peak_bytes, *map(processes.high_water_bytes, descendants)])
        below = sum(map(processes.cpu_s, descendants))
        used, main_ns = processes.cpu_s(self.pid) + below, processes.main_thread_ns(self.pid)
        starved_s = sum(map(processes.starved_s, (self.pid, *descendants)))
        now = time.monotonic()
        return Sample(now, used, main_ns, log_bytes, row_bytes, saving_step, starved_s)

    def terminate(self) -> None:
        """Send SIGTERM to the worker."""
        if not self.has_ended:
            processes.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the worker and its process group."""
        if self.has_ended:
            return  # The kernel may have reused the pid.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        processes.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait for the end of the worker, which must be near."""
        _, self.status, usage = os.wait4(self.pid, 0)
        self._peak_bytes = max(self._peak_bytes, usage.ru_maxrss * 1024)
        self.has_ended = True

    def stacks(self) -> str:
        """Return the worker's Python stacks without kinetic's own frames; works even while native
        code blocks."""
        if self.has_ended:
            return ""
        if processes.is_stopped(self.pid):
            return STOPPED
        text = self._dump(self.stacks_thread)
        return re.sub(
            _BYSTANDER,
            "",
            "\n".join(line for line in text.splitlines() if not re.search(_OWN_FRAME, line)),
        )

    def _dump(self, thread: int) -> str:
        """Send the signal for stacks to a thread, 0 for the main one; return the stacks."""
        before = os.fstat(self._stacks).st_size
        if not thread or not processes.kill_thread(self.pid, thread, process.STACKS_SIGNAL):
            processes.kill(self.pid, process.STACKS_SIGNAL)
        size, deadline = before, time.monotonic() + STACKS_S
        while time.monotonic() < deadline:
            time.sleep(0.02)
            size, last = os.fstat(self._stacks).st_size, size
            if size == last > before:
                break
        return os.pread(self._stacks, size - before, before).decode(errors="replace")

    def close(self) -> None:
        """Free the descriptors of a worker that has ended."""
        self.channel.close()
        for port in self.ports:
            port.close()
        for fd in (self.out, self.err, self.pidfd, self._stacks):
            os.close(fd)


def serve(request: dict[str, Any], fds: Sequence[int]) -> int:
    """Run as the worker, in a child that the agent's fork server has forked; or import libraries
    in the fork server itself."""
    if "prepare" in request:
        return libraries.preload(request["prepare"])
    _be_worker(request["title"], fds, os.getppid())


def _be_worker(title: str, fds: Sequence[int], parent: int) -> NoReturn:
    processes.yield_precedence()  # Before an exec, which forgets the precedence to restore.
    if os.environ.get("PYTHONHASHSEED") == "random":  # A fork would share its parent's seed.
        for fd in fds:
            os.set_inheritable(fd, True)
        line = [sys.executable, "-P", "-m", "kinetic._host.worker", title]
        os.execv(line[0], [*line, *map(str, (*fds, parent))])
    channel, out, err, stacks = fds
    processes.set_title(title)
    process.main(Channel(socket.socket(fileno=channel)), out, err, stacks, parent)


def _widen(fd: int) -> None:
    """Give a pipe a large buffer, so that a burst of output does not block the worker."""
    import fcntl

    with contextlib.suppress(OSError, AttributeError):
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
