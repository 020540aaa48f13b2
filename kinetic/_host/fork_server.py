"""A fork server: a process without threads, from which a process that has threads gets children.

In: a function to run in each child, small requests, descriptors. Out: process ids. gRPC starts
threads, and a fork copies the locks that they hold: so a fork server is forked before the first
thread, and forks when it is asked. What it forks are children of the process that asked. One that
is killed is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from kinetic._system import processes

Run = Callable[[dict[str, Any], Sequence[int]], int]
"""Takes a request and the descriptors that came with it; returns an exit code."""
_ANSWER_S = 10.0
_MOST_BYTES, _MOST_FDS = 1 << 16, 8
_BECOME = "become"
"""A request that is not for `run`: the spare takes the place of the fork server, whose title is
given, and forks another spare, which gets its requests from the descriptor that comes with this
one."""
_SPARE = "spare-"


class _Gone(OSError):
    """A fork server that was asked does not answer any more."""


class _Line(NamedTuple):
    """A fork server, and the owner's end of the connection to it."""

    pid: int
    pidfd: int
    """Names this process also when somebody has waited for it, and its id is another's."""
    socket: socket.socket


class ForkServer:
    """Forks children for its owner, which must have called `adopt_orphans`: the kernel gives them
    to it because their own parent ends at once.

    A spare stands by: whoever has threads cannot fork a new one, and that one can.
    """

    def __init__(self, run: Run, title: str, *, without: Sequence[int] = ()) -> None:
        """Fork it and its spare; `without` are descriptors that they must not hold open."""
        self._lines: list[_Line] = []
        self._title = title
        owner = os.getpid()
        for title_now in (title, _SPARE + title):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for fd in (ours.fileno(), *(line.socket.fileno() for line in self._lines)):
                    os.close(fd)
                for fd in without:
                    os.close(fd)
                serve = functools.partial(_serve, theirs, run, title_now, owner)
                processes.exit_with(serve)
            theirs.close()
            self._add(pid, ours)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of itself, and of the one that stands by."""
        return tuple(line.pid for line in self._lines)

    def fork(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Return the process id of a new child that runs this request.

        Raises:
            OSError: it and its spare are gone, or the system has no room for a process.
        """
        while self._lines:
            try:
                return _ask(self._lines[0], request, fds)
            except _Gone:
                self._replace()
        raise OSError("the process that forks for this one has ended, and so has its spare")

    def close(self) -> None:
        """End them; their children live on."""
        while self._lines:
            self._drop_first()

    def _add(self, pid: int, ours: socket.socket) -> None:
        ours.settimeout(_ANSWER_S)
        with contextlib.suppress(ProcessLookupError):
            self._lines.append(_Line(pid, os.pidfd_open(pid), ours))

    def _replace(self) -> None:
        """Have the spare take the place of the fork server, and fork another spare."""
        self._drop_first()
        if not self._lines:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError), theirs:
            request = {_BECOME: self._title}
            self._add(_ask(self._lines[0], request, [theirs.fileno()]), ours)

    def _drop_first(self) -> None:
        line = self._lines.pop(0)
        line.socket.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(line.pidfd, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, line.pidfd, os.WEXITED)
        os.close(line.pidfd)


def _ask(line: _Line, request: dict[str, Any], fds: Sequence[int]) -> int:
    try:
        socket.send_fds(line.socket, [json.dumps(request).encode()], fds)
        answer = line.socket.recv(1024).decode()
    except OSError as error:
        raise _Gone(str(error)) from error
    if not answer:
        raise _Gone("it has ended")
    if not answer.isdecimal():
        raise OSError(answer)
    return int(answer)


def _serve(requests: socket.socket, run: Run, title: str, owner: int) -> int:
    processes.die_with_parent(owner)
    processes.set_title(title)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_FDS)
        if not data:
            return 0
        freed = held = -1
        try:
            freed, held = os.pipe()
            between = os.fork()
        except OSError as error:
            requests.send(f"no process could be forked: {error.strerror}".encode())
        else:
            request = json.loads(data)
            if (now := request.get(_BECOME)) is not None:
                processes.set_title(now)
            if between == 0:
                os.close(held)
                act = functools.partial(run, request, fds)
                if now is not None:
                    spare = socket.socket(fileno=fds[0])
                    act = functools.partial(_serve, spare, run, _SPARE + now, owner)
                _fork_on(
                    requests, functools.partial(_run_once_adopted, requests, freed, act, owner)
                )
            os.waitpid(between, 0)
        for fd in (*fds, *(fd for fd in (freed, held) if fd >= 0)):
            os.close(fd)


def _fork_on(requests: socket.socket, act: Callable[[], int]) -> NoReturn:
    """Fork again and end, so that the child becomes one of the owner."""
    try:
        child = os.fork()
    except OSError as error:
        requests.send(f"no process could be forked: {error.strerror}".encode())
        os._exit(1)
    if child == 0:
        processes.exit_with(act)
    os._exit(0)


def _run_once_adopted(
    requests: socket.socket, freed: int, run: Callable[[], int], owner: int
) -> int:
    """Answer only once the fork server has waited for the process between, and so closed the other
    end of `freed`: before, the owner has no child of this id to wait for, and if the fork server is
    killed the owner gets the process between, too."""
    os.read(freed, 1)
    os.close(freed)
    if os.getppid() != owner:
        return 1  # the fork server was killed: the spare is asked again
    try:
        requests.send(str(os.getpid()).encode())
    except OSError:
        return 1  # nobody waits for it any more
    requests.close()
    return run()
