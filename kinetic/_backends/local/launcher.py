"""Starts supervisors through zygotes: child processes that have imported the modules of hosts, and
fork. This process keeps a zygote for each set of modules and variables until it ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from kinetic._core.variables import READ_AT_START
from kinetic._store import files
from kinetic._system import pipes, processes
from kinetic.errors import KineticError, StoreFull, SubmitError

_lock = threading.Lock()
_zygotes: dict[tuple[object, ...], Zygote] = {}
MOST_ZYGOTES = 6  # Each value of a variable that is read at imports needs its own zygote.
_lost: list[Zygote] = []  # Freeing them would close descriptors that other files may have now.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_SILENT = {
    "GRPC_VERBOSITY": "NONE",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
    "PYTHONSAFEPATH": "1",
    "SPT_NOENV": "1",
}

_READ_BY_ZYGOTES = (
    *(*READ_AT_START, "LANG", "TZ", "JAX_", "XLA_", "TMPDIR", "HOME"),
    *("KERAS_", "FLAX_", "EQX_", "ORBAX_", "TF_"),
    *("SSL_", "REQUESTS_CA_", "CURL_CA_", "GOOGLE_", "CLOUDSDK_", "STORAGE_", "HF_"),
)
_PROGRAM = str(Path(__file__).resolve().parents[2] / "_host" / "local" / "__main__.py")
"""The zygote's program, started by its path: `python -m` would import more."""


class _ZygoteDied(Exception):
    """The zygote died; another zygote may be able to start the supervisor. The exception's text is
    the last output of the dead one."""


class Zygote:
    """A child process that has imported the modules of hosts, and forks supervisors on request."""

    def __init__(self, modules: tuple[str, ...], environ: Mapping[str, str]) -> None:
        _fill_standard_descriptors()
        ours, theirs = socket.socketpair()
        self._errors = _spool()
        try:
            self._process = self._start(theirs, modules, environ)
        except OSError as error:
            ours.close()
            self._errors.close()
            limit, advice = "", "Repair this Python environment"
            if isinstance(error, BlockingIOError):
                limit, advice = f" ({processes.find_limit()})", "End other programs"
            raise SubmitError(
                f"The Python that runs simulated hosts, {error.filename or sys.executable}, could "
                f"not be started: {error.strerror}{limit}. {advice}, then try again."
            ) from error
        finally:
            theirs.close()
        self._socket, self._inode = ours, os.fstat(ours.fileno()).st_ino
        self.owner = os.getpid()
        self.imports: set[str] = set()

    def _start(
        self, theirs: socket.socket, modules: tuple[str, ...], environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        # `env` hides the child from a debugger, which would change the path to kinetic.
        wrapper = ["/usr/bin/env"] if "pydevd" in sys.modules else []
        return subprocess.Popen(
            [*wrapper, sys.executable, _PROGRAM, str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            cwd="/",
            env={
                **environ,
                **_SILENT,
                "KERAS_BACKEND": "jax",  # as on hosts, for libraries imported early
                **(_ONE_THREAD if modules else {}),
                "PYTHONPATH": _python_path(environ),
            },
        )

    @property
    def is_open(self) -> bool:
        """True if the descriptor is still the zygote's socket: if the program closed it, another
        file may have its number now."""
        return pipes.is_same(self._socket.fileno(), self._inode)

    def launch(self, request: dict[str, Any]) -> int:
        """Fork a supervisor; wait until it holds the job's lock, and return its process id.

        Raises:
            StoreFull: there is no space for the supervisor's first files.
            SubmitError: the supervisor could not begin for another reason.
            _ZygoteDied: the zygote died.
        """
        line = json.dumps(request).encode() + b"\n"
        # A suspended zygote (SIGSTOP) would never answer.
        self._process.send_signal(signal.SIGCONT)
        try:
            self._socket.sendall(line)
            answer = self._read_line()
        except ConnectionError:
            answer = b""
        # After Ctrl-C, or an exception of a signal handler, the zygote must not start this job
        # later, nor send this answer to the next request.
        except BaseException:
            self.close()
            raise
        if not answer:
            lines = self._read_output().splitlines()
            errors = [line for line in lines if line.partition(": ")[0].endswith("rror")]
            raise _ZygoteDied("; ".join(errors) or lines[-1])
        reply = json.loads(answer)
        if "error" in reply:
            raise _refusal(request["job_id"], reply["error"], reply.get("errno"))
        return int(reply["pid"])

    def import_ahead(self, libraries: Sequence[str]) -> None:
        """Tell the zygote to import libraries, each once, before it forks the next supervisor."""
        missing = [name for name in libraries if name not in self.imports]
        self.imports.update(missing)
        if missing:
            with contextlib.suppress(ConnectionError):  # `launch` notices its death.
                self._socket.sendall(json.dumps({"import": missing}).encode() + b"\n")

    def _read_line(self) -> bytes:
        data = b""
        while not data.endswith(b"\n"):
            more = self._socket.recv(4096)
            if not more:
                return b""
            data += more
        return data

    def _read_output(self) -> str:
        """End the zygote. Return the last lines of its output, to append to an error message."""
        self._end()
        with self._errors:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()[-8:]
        return ":\n" + "\n".join(lines) if lines else "."

    def try_out(self, limit_s: float) -> str:
        """Let the zygote import everything and end; return the error as text, "" on success."""
        self.import_ahead(["sys"])  # Without a request the zygote would not complete its imports.
        self._socket.shutdown(socket.SHUT_WR)
        try:
            code = self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        output = self._read_output()
        if code == 0:
            return ""
        return (
            f"it ended with code {code}{output}"
            if code is not None
            else f"it was not ready after {limit_s:g} s{output}"
        )

    def close(self) -> None:
        """End the process, even while it imports. Supervisors that it forked keep running."""
        self._process.kill()
        self._end()
        with contextlib.suppress(OSError):  # The program may have closed the file.
            self._errors.close()

    def disconnect(self) -> None:
        """Close this process's end of the socket, without ending the zygote."""
        if self.is_open:
            self._socket.close()

    def _end(self) -> None:
        self.disconnect()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.2)
            return
        self._process.kill()
        self._process.wait()


def launch(request: dict[str, Any], *, modules: tuple[str, ...], environ: Mapping[str, str]) -> int:
    """Start a supervisor through the zygote for these modules, and return its process id. Start the
    zygote if there is none; replace a dead one once.

    Raises:
        StoreFull: there is no space for the supervisor's first files.
        SubmitError: no zygote could be started, or the supervisor could not begin.
    """
    with _lock:
        first = _zygote_for(modules, environ)
        try:
            return first.launch(request)
        except _ZygoteDied:
            _forget(first)
        zygote = _zygote_for(modules, environ)
        zygote.imports |= first.imports  # Skip imports that may have killed it.
        try:
            return zygote.launch(request)
        except _ZygoteDied as death:
            _forget(zygote)
            raise SubmitError(_explain_death(str(death), modules)) from None


def _explain_death(last_line: str, modules: tuple[str, ...]) -> str:
    words = last_line.rstrip(".")
    cause = f'"{words}"' if words else "it printed nothing"
    imports = f" or `python -c 'import {', '.join(modules)}'`" if modules else ""
    advice = f"Run `kinetic doctor`{imports} to see more."
    return f"The process that starts simulated slices died: {cause}. {advice}"


def _refusal(job_id: str, why: str, number: int | None) -> KineticError:
    """Return the error for a supervisor that could not begin."""
    text = f'The process that supervises {job_id} could not begin: "{why}".'
    if number in files.FULL:
        return StoreFull(f"{text} Free some space, or set KINETIC_HOME to a folder elsewhere.")
    return SubmitError(text)


def warm_up(
    modules: tuple[str, ...], environ: Mapping[str, str], *, libraries: Sequence[str] = ()
) -> None:
    """Start the zygote for these modules: it imports them and `libraries` before a call is sent."""
    with _lock:
        _zygote_for(modules, environ).import_ahead(libraries)


def try_out(modules: tuple[str, ...], environ: Mapping[str, str], *, limit_s: float = 60.0) -> str:
    """Start a zygote, let it import these modules, and end it. Return the error; "" on success."""
    try:
        return Zygote(modules, environ).try_out(limit_s)
    except SubmitError as error:
        return str(error)


def _zygote_for(modules: tuple[str, ...], environ: Mapping[str, str]) -> Zygote:
    key = (os.getpid(), sys.executable, modules, _settings_of_zygote(environ))
    if key not in _zygotes or not _zygotes[key].is_open:
        if not _zygotes:
            atexit.register(_close_all)
        _lost.extend(_zygotes.pop(k) for k, z in [*_zygotes.items()] if not z.is_open)
        own = [k for k, zygote in _zygotes.items() if zygote.owner == os.getpid()]
        for oldest in own[: 1 - MOST_ZYGOTES]:
            _zygotes.pop(oldest).close()
        _zygotes[key] = Zygote(modules, environ)
    return _zygotes[key]


def _spool() -> IO[bytes]:
    """Open an unnamed file, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("kinetic-zygote"), "w+b")
    from tempfile import TemporaryFile

    return TemporaryFile()


def _settings_of_zygote(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that matter to a zygote: those read when modules are imported, and those
    by which agents fetch data. Callers share a zygote only if these are equal."""
    return tuple(
        sorted(
            (k, v)
            for k, v in environ.items()
            if k.startswith(_READ_BY_ZYGOTES) or k.lower().endswith("_proxy")
        )
    )


def _fill_standard_descriptors() -> None:
    """Open /dev/null in place of closed standard streams, so that no other file gets their
    descriptors. Programs that this process starts still find the streams closed.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # gets the lowest free descriptor: `fd`


def _forget(zygote: Zygote) -> None:
    for key in [k for k, p in _zygotes.items() if p is zygote]:
        del _zygotes[key]


def _reset_in_fork() -> None:
    """After a fork, replace the lock, which a thread of the parent may hold. Disconnect from the
    parent's zygotes, which end with the parent."""
    global _lock
    _lock = threading.Lock()
    for zygote in _zygotes.values():
        zygote.disconnect()


os.register_at_fork(after_in_child=_reset_in_fork)


def _close_all() -> None:
    for zygote in list(_zygotes.values()):
        # A forked copy of this process must not end its parent's zygotes.
        if zygote.owner == os.getpid():
            zygote.close()
    _zygotes.clear()


def _python_path(environ: Mapping[str, str]) -> str:
    """Return a PYTHONPATH with which a child process imports this copy of kinetic."""
    own = str(Path(__file__).resolve().parents[3])
    rest = environ.get("PYTHONPATH", "")
    return f"{own}{os.pathsep}{rest}" if rest else own
