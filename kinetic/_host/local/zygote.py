"""The zygote: a process that has imported all modules of supervisors, agents and workers, and forks
supervisors that start without importing.

The local backend starts it with a socket's descriptor and the modules to import, and sends it
requests over the socket. It lives as long as its caller. It starts no thread and no backend of JAX,
so that its forks can start both.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator

from kinetic._core import layout
from kinetic._host import agents
from kinetic._host.local import supervisor
from kinetic._host.worker import interpreter, jaxworld
from kinetic._host.worker import process as worker
from kinetic._pickling import library_settings
from kinetic._system import processes

LATE = (
    "setproctitle",
    *worker.PRELOADED,
    "kinetic._host.agent.loop",
    "kinetic._host.leader",
    *("asyncio", "grpc", "grpc.aio", "grpc._channel", "grpc.experimental"),
    *agents.GANG_MODULES,
    "kinetic._host.worker.fingerprints",
)
"""Modules that a small job's processes can start without, in the order in which the processes need
them: worker, agent, leader. The zygote imports them when it is idle, because otherwise every
process of every job would import them again."""
IDLE_S = 0.25
"""Time without a request after which the first small job must have ended, so that imports cannot
slow it."""
HURRIED = 4
"""Number of jobs in a row that are started before the late imports; after that, importing once is
cheaper."""


def main() -> None:
    """Import, then serve until the caller has ended."""
    fd, *modules = sys.argv[1:]
    if not jaxworld.is_fork_safe() and interpreter.PLAIN not in sys.path:
        # Restart without the user's sitecustomize, whose threads no fork would have.
        paths = os.pathsep.join([interpreter.PLAIN, os.environ["PYTHONPATH"]])
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONPATH": paths})
    caller = socket.socket(fileno=int(fd))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Supervisors need not be reaped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _end_with(caller):
        jaxworld.preload(tuple(modules))
    library_settings.mark_handlers()
    if not jaxworld.is_fork_safe():
        names = ", ".join(modules) or "the modules of .pth files"
        sys.exit(f"importing {names} started threads: a fork would not be safe")
    serve(caller, hurried=0 if modules else HURRIED)


@contextlib.contextmanager
def _end_with(caller: socket.socket) -> Iterator[None]:
    """Exit as soon as the caller ends, even during the imports in this block."""

    def end_without_caller(*_: object) -> None:
        with contextlib.suppress(BlockingIOError):
            if not caller.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                os._exit(0)

    flags = fcntl.fcntl(caller, fcntl.F_GETFL)
    before = signal.signal(signal.SIGIO, end_without_caller)
    fcntl.fcntl(caller, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(caller, fcntl.F_SETFL, flags | os.O_ASYNC)
    end_without_caller()  # The caller may have ended before the handler was set.
    yield
    fcntl.fcntl(caller, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, before)


def serve(caller: socket.socket, *, hurried: int) -> None:
    """Fork a supervisor for each request (a line of JSON), and pass its answer to the caller.

    The first `hurried` requests do not wait for the late imports.
    """
    _import_late(caller if hurried else None)
    requests = caller.makefile("rb")
    while line := requests.readline():
        if not line.endswith(b"\n"):
            return  # The caller died while writing.
        if names := json.loads(line).get("import"):
            _import_libraries(names)
            library_settings.mark_handlers()
            continue
        answer = _fork_supervisor(line, caller)
        with contextlib.suppress(OSError):  # The caller may have died; that does not stop the job.
            caller.sendall(answer + b"\n")
        hurried -= 1
        if hurried <= 0 or not _has_request(caller, IDLE_S):
            _import_late()


def _fork_supervisor(line: bytes, caller: socket.socket) -> bytes:
    """Fork a supervisor, and return its answer, or an error if it dies before it answers."""
    ours, theirs = os.pipe()
    if processes.fork() == 0:
        os.close(ours)
        os.close(caller.detach())  # `close` would not close it while `requests` is open.
        os.setsid()
        gc.enable()
        supervisor.main(supervisor.Request(**json.loads(line)), theirs)
    os.close(theirs)
    with open(ours, "rb") as answer:
        return answer.read() or json.dumps({"error": _explain_silence(line)}).encode()


def _explain_silence(line: bytes) -> str:
    """Return why a supervisor ended without an answer, with the last line of its log if any."""
    request, text = json.loads(line), ""
    folder = f"{request['store']}/{layout.JobKeys(request['job_id']).prefix}/local"
    with contextlib.suppress(OSError):
        fd = os.open(f"{folder}/supervisor.log", os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb", buffering=0) as log:
            text = (log.read() or b"").decode(errors="replace").strip()
    end, last_line = "it ended before it took over the job", text.rpartition("\n")[2]
    return f'{end}; the last line of its log is "{last_line}"' if last_line else end


def _import_late(caller: socket.socket | None = None) -> None:
    """Import the remaining late modules; with a caller, stop when it sends a request."""
    for name in LATE:
        if caller is not None and _has_request(caller, 0.0):
            break
        importlib.import_module(name)
    # Workers also clear this cache; a full one would have its pages copied in each worker.
    sys.path_importer_cache.clear()
    gc.freeze()  # Otherwise the first collection in a child would copy every page.


def _import_libraries(names: list[str]) -> None:
    """Import libraries for the functions of the next jobs, once for all their hosts."""
    for name in names:
        with contextlib.suppress(Exception):  # A function that imports it gets the error.
            importlib.import_module(name)
    if not jaxworld.is_fork_safe():
        sys.exit(f"importing {', '.join(names)} started threads: a fork would not be safe")
    sys.path_importer_cache.clear()
    gc.freeze()


def _has_request(caller: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([caller], [], [], timeout_s)[0])
