"""The preloader: has everything imported that supervisors, agents and workers need, and forks them ready to run.

In: launch requests from one caller, over the socket that it was started with. Out: supervisors. Called as `python -m
kinetic.runner.preload` by the local backend; lives as long as its caller. It starts no thread and no JAX backend, so that
what it forks can.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import sys
from typing import Any

from kinetic.runner import jaxworld, supervisor


def main() -> None:
    """Import, then serve until the caller is gone."""
    parser = argparse.ArgumentParser(prog="kinetic.runner.preload")
    parser.add_argument("--fd", type=int, required=True, help="socket to the caller")
    parser.add_argument("modules", nargs="*", help="modules that the workers will need")
    options = parser.parse_args()
    caller = socket.socket(fileno=options.fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Supervisors are not waited for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jaxworld.preload(tuple(options.modules))
    if not jaxworld.is_fork_safe():
        sys.exit(f"importing {', '.join(options.modules)} started threads: a fork would not be safe")
    serve(caller)


def serve(caller: socket.socket) -> None:
    """Fork a supervisor for each request: one JSON line that carries the job's lock as a descriptor."""
    gc.collect()
    gc.freeze()  # Otherwise the first collection in a child would copy every page.
    while True:
        message, lock_fd = _receive(caller)
        if message is None:
            return
        pid = os.fork()
        if pid == 0:
            os.setsid()
            caller.close()
            gc.enable()
            supervisor.main(supervisor.Request(**message), lock_fd)
        os.close(lock_fd)
        caller.sendall(json.dumps({"pid": pid}).encode() + b"\n")


def _receive(caller: socket.socket) -> tuple[dict[str, Any] | None, int]:
    data, fds, _, _ = socket.recv_fds(caller, 1 << 16, 1)
    while data and not data.endswith(b"\n"):
        more = caller.recv(1 << 16)
        if not more:
            return None, -1
        data += more
    if not data or not fds:
        return None, -1
    return json.loads(data), fds[0]


if __name__ == "__main__":
    main()
