"""A stem: a process without threads, from which a process that has threads gets children.

In: a function to run in each child, small requests, descriptors. Out: process ids. gRPC starts
threads, and a fork copies the locks that they hold: so a stem is forked before the first thread,
and forks when it is asked. What it forks are children of the process that asked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kinetic._system import processes

Run = Callable[[dict[str, Any], Sequence[int]], int]
"""Takes a request and the descriptors that came with it; returns an exit code."""
_ANSWER_S = 10.0
_ADOPTED_S = 10.0
_MOST_BYTES, _MOST_FDS = 1 << 16, 8


class Stem:
    """Forks children for its owner, which must have called `adopt_orphans`: the kernel gives them
    to it because their own parent ends at once.

    Attributes:
        pid: of the stem.
    """

    def __init__(self, run: Run, title: str, *, without: Sequence[int] = ()) -> None:
        """Fork the stem; `without` are descriptors that it must not hold open."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            for fd in without:
                os.close(fd)
            processes.exit_with(functools.partial(_serve, theirs, run, title, owner))
        theirs.close()
        ours.settimeout(_ANSWER_S)
        self._socket = ours

    def fork(self, request: dict[str, Any], fds: Sequence[int] = ()) -> int:
        """Return the process id of a new child that runs this request.

        Raises:
            OSError: the stem is gone, or the system has no room for a process.
        """
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        answer = self._socket.recv(1024).decode()
        if not answer.isdecimal():
            raise OSError(answer or "the process that forks for this one has ended")
        return int(answer)

    def close(self) -> None:
        """End it; its children live on."""
        self._socket.close()
        processes.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _serve(requests: socket.socket, run: Run, title: str, owner: int) -> int:
    processes.die_with_parent(owner)
    processes.set_title(title)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_FDS)
        if not data:
            return 0
        try:
            between = os.fork()
        except OSError as error:
            requests.send(f"no process could be forked: {error.strerror}".encode())
        else:
            if between == 0:
                _fork_on(requests, functools.partial(run, json.loads(data), fds), owner)
            os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def _fork_on(requests: socket.socket, run: Callable[[], int], owner: int) -> NoReturn:
    """Fork again and end, so that the child becomes one of the owner."""
    try:
        child = os.fork()
    except OSError as error:
        requests.send(f"no process could be forked: {error.strerror}".encode())
        os._exit(1)
    if child == 0:
        requests.close()
        processes.exit_with(functools.partial(_adopted, run, owner))
    requests.send(str(child).encode())
    os._exit(0)


def _adopted(run: Callable[[], int], owner: int) -> int:
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != owner:
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.0005)
    return run()
