"""A fork server: a process without threads that forks children for a process that has threads.

gRPC starts threads, and a fork copies the locks that they hold. So the fork server is forked before
the first thread, and forks on request; its forks become children of the requesting process.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kinetic._system import processes

Run = Callable[[dict[str, Any], Sequence[int]], int]
"""The body of a child: takes a request and the descriptors sent with it; returns an exit code."""
_ANSWER_S = 10.0
_MOST_BYTES, _MOST_FDS = 1 << 18, 8  # Linux sends no message of this length.


class ForkServer:
    """Forks children for its owner, which must have called `adopt_orphans`: each child's parent
    ends at once, so the kernel gives the child to the owner. A killed fork server is not replaced.

    Attributes:
        pid: process id of the fork server.
    """

    def __init__(self, run: Run, title: str, *, without: Sequence[int] = ()) -> None:
        """Fork the server, whose children call `run`; it closes the descriptors in `without`."""
        owner = os.getpid()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = processes.fork()
        if self.pid == 0:
            for fd in (self._requests.fileno(), *without):
                os.close(fd)
            processes.exit_with(functools.partial(_serve, theirs, run, title, owner))
        theirs.close()
        self._requests.settimeout(_ANSWER_S)
        # Unlike the process id, it stays valid when another thread has reaped the server.
        self._pidfd = os.pidfd_open(self.pid)
        self._is_preparing = False

    def fork(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Return the process id of a new child that runs this request, with its own copies of
        `fds`.

        Raises:
            OSError: the fork server has died, or the system has no room for a process.
        """
        try:
            socket.send_fds(self._requests, [json.dumps(request).encode()], fds)
            answer = self._requests.recv(1024).decode()
        except OSError as error:
            raise OSError(f"the fork server does not answer: {error}") from error
        if not answer.isdecimal():
            raise OSError(answer or "the fork server has ended")
        return int(answer)

    def prepare(self, request: dict[str, Any]) -> None:
        """Run a request in the fork server itself. Do not fork before it `is_ready` again."""
        with contextlib.suppress(OSError):  # It has died, or the request is too long.
            self._requests.send(json.dumps({"prepare": request}).encode())
            self._is_preparing = True

    def is_ready(self) -> bool:
        """True unless a request of `prepare` is running."""
        if self._is_preparing and select.select([self._requests], [], [], 0)[0]:
            self._is_preparing = False
            with contextlib.suppress(OSError):  # It has died.
                self._requests.recv(1024)
        return not self._is_preparing

    def close(self) -> None:
        """Kill the fork server; its children live on."""
        self._requests.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)


def _serve(requests: socket.socket, run: Run, title: str, owner: int) -> int:
    processes.die_with_parent(owner)
    processes.set_title(title)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_FDS)
        if not data:
            return 0
        request = json.loads(data)
        if "prepare" in request:
            run(request, fds)
            requests.send(b"ready")
            continue
        freed = held = -1
        try:
            freed, held = os.pipe()
            between = processes.fork()
        except OSError as error:
            requests.send(f"no process could be forked: {error.strerror}".encode())
        else:
            if between == 0:
                os.close(held)
                act = functools.partial(run, request, fds)
                _fork_on(
                    requests, functools.partial(_run_once_adopted, requests, freed, act, owner)
                )
            os.waitpid(between, 0)
        for fd in (*fds, *(fd for fd in (freed, held) if fd >= 0)):
            os.close(fd)


def _fork_on(requests: socket.socket, act: Callable[[], int]) -> NoReturn:
    """Fork the child and exit, so that the kernel makes it a child of the owner."""
    try:
        child = processes.fork()
    except OSError as error:
        requests.send(f"no process could be forked: {error.strerror}".encode())
        os._exit(1)
    if child == 0:
        processes.exit_with(act)
    os._exit(0)


def _run_once_adopted(
    requests: socket.socket, freed: int, run: Callable[[], int], owner: int
) -> int:
    """Answer with this process's id once the owner has adopted it, then run. The fork server closes
    `freed` when the intermediate process is reaped: only then can the owner wait for this one."""
    os.read(freed, 1)
    os.close(freed)
    if os.getppid() != owner:
        return 1  # The fork server was killed.
    try:
        requests.send(str(os.getpid()).encode())
    except OSError:
        return 1  # The owner has closed its end.
    requests.close()
    return run()
