"""The preloader: has everything imported that supervisors, agents and workers need, and forks them ready to run.

In: launch requests from one caller, over the socket that it was started with. Out: supervisors. Called as `python -m
kinetic.runner.preload FD [MODULE ...]` by the local backend; lives as long as its caller. It starts no thread and no JAX
backend, so that what it forks can.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

from kinetic.runner import jaxworld, link, supervisor, worker

LATE = ("setproctitle", "grpc._channel", "grpc.experimental", "kinetic.packaging.series", "kinetic.packaging.delivery")
"""What packages import only when they are used: after a fork, every process of every job would import it again."""


def main() -> None:
    """Import, then serve until the caller is gone."""
    fd, *modules = sys.argv[1:]
    caller = socket.socket(fileno=int(fd))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Supervisors are not waited for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jaxworld.preload(tuple(modules))
    if not jaxworld.is_fork_safe():
        sys.exit(f"importing {', '.join(modules)} started threads: a fork would not be safe")
    serve(caller)


def serve(caller: socket.socket) -> None:
    """Fork a supervisor for each request, one JSON line; the supervisor answers itself."""
    gc.collect()
    gc.freeze()  # Otherwise the first collection in a child would copy every page.
    assert link  # Imported for the agents: after a fork each of them would import it again.
    if not select.select([caller], [], [], 0)[0]:
        _import_late()
    requests = caller.makefile("rb")
    while line := requests.readline():
        if not line.endswith(b"\n"):
            return  # The caller died while it wrote.
        if os.fork() == 0:
            os.setsid()
            gc.enable()
            supervisor.main(supervisor.Request(**json.loads(line)), caller)
        _import_late()


def _import_late() -> None:
    """Import what a worker needs only once its gang is ready: the first caller shall not wait for it."""
    if worker.IMPORTED_AHEAD[0] not in sys.modules:
        for name in (*worker.IMPORTED_AHEAD, *LATE):
            importlib.import_module(name)
        gc.collect()
        gc.freeze()


if __name__ == "__main__":
    main()
