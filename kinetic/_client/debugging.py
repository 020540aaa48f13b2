"""Attaching a debugger to a running job: a local port that forwards to the job's debugger, and
instructions for the editor."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kinetic._backends.base import Backend, Connection, Tunnels
from kinetic._config import settings
from kinetic._core import layout
from kinetic._core.debug_address import Debugger, DebuggerState, launch_configuration
from kinetic._core.ref import JobRef
from kinetic._store import attempts
from kinetic._store.base import Store
from kinetic._system import peers
from kinetic._system.connection import SocketConnection, pump
from kinetic.errors import CorruptRecord, KineticError, NotFound, UsageError, UsageTypeError

_log = logging.getLogger("kinetic.debug")
DEFAULT_PORT = 5678
POLL_EVERY_S = 0.1
CHECK_EVERY_S = 1.0
_HOW_TO = "Set debug=True in @kinetic.run(...), and call the function again."


class PortForward:
    """A port of this machine that forwards to a job's debugger.

    It has the methods of a `subprocess.Popen`, for scripts that expect the process of `kubectl
    port-forward`.

    Attributes:
        port: The port of this machine.
        instructions: How to attach an editor.
        returncode: None while it forwards, then 0.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], Connection],
        ended: Callable[[], bool],
        *,
        check_every_s: float = CHECK_EVERY_S,
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.instructions = ""
        self._listener = listener
        self._connect = connect
        self._ended = ended
        self._check_every_s = check_every_s
        self._closing, self._over = threading.Event(), threading.Event()
        self._open: set[Connection] = set()
        self._far: set[Connection] = set()
        threading.Thread(target=self._serve, name="kinetic-port-forward", daemon=True).start()

    def __repr__(self) -> str:
        return f"<PortForward 127.0.0.1:{self.port}{'' if self.poll() is None else ' (ended)'}>"

    @property
    def returncode(self) -> int | None:
        """None while the port is forwarded, then 0."""
        return self.poll()

    def poll(self) -> int | None:
        """Return None while the port is forwarded, then 0."""
        return 0 if self._over.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until forwarding ends: the job has ended, or `terminate` was called.

        Raises:
            subprocess.TimeoutExpired: `timeout` seconds have passed.
        """
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(repr(self), timeout or 0.0)
        return 0

    def terminate(self) -> None:
        """Stop forwarding and close open connections. The job keeps running. Idempotent."""
        self._closing.set()
        for side in list(self._open):
            side.end()

    kill = terminate

    def _serve(self) -> None:
        self._listener.settimeout(POLL_EVERY_S)
        next_check = time.monotonic() + self._check_every_s
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._over.set)
            at_end.enter_context(self._listener)
            while not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    self._accept()
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + self._check_every_s
                    # Check the job only without open connections, so that the debugger's last
                    # bytes arrive. A failed check is repeated.
                    with contextlib.suppress(KineticError):
                        if not self._open & self._far and self._ended():
                            self.terminate()

    def _accept(self) -> None:
        caller, _ = self._listener.accept()
        caller.settimeout(None)
        near = SocketConnection(caller)
        if not peers.is_own(caller):
            _log.warning(
                "refused a connection to the job's debugger from another user of this machine"
            )
            near.close()
            return
        try:
            far = self._connect()
        except (OSError, KineticError) as error:
            _log.warning(
                "cannot connect to the job's debugger; attach your editor again. The error: %s",
                error,
            )
            near.close()
            return
        self._open |= {near, far}
        self._far.add(far)
        for source, target in ((near, far), (far, near)):
            threading.Thread(
                target=self._pump, args=(source, target), name="kinetic-port-forward", daemon=True
            ).start()

    def _pump(self, source: Connection, target: Connection) -> None:
        pump(source, target)
        self._open.discard(source)
        if target not in self._open:  # Both directions have ended.
            self._far -= {source, target}
            source.close()
            target.close()


def cleanup_port_forward(process: Any) -> None:
    """Stop a port forward that `JobHandle.debug_attach` returned, and wait up to 5 seconds for its
    end. None, or a forward that has ended, is ignored."""
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()


def attach(
    backend: Backend,
    store: Store,
    ref: JobRef,
    *,
    local_port: int = DEFAULT_PORT,
    working_dir: str | None = None,
    ended: Callable[[], bool],
    pause: Callable[[float], object] = time.sleep,
) -> PortForward:
    """Wait until the job's debugger listens, and forward `local_port` to it (0: any free port).

    Raises:
        UsageError: the job has no debugger, the port is in use, or the backend cannot reach ports
            of its hosts; then the message says where the debugger listens.
        NotFound: the job has ended.
    """
    if not ref.debug:
        raise UsageError(f"{ref.job_id} has no debugger. {_HOW_TO}")
    if not isinstance(backend, Tunnels):
        raise UsageError(
            _explain_ssh(ref, _wait_for_debugger(store, ref, ended, pause), local_port, working_dir)
        )
    listener = _open_listener(local_port)
    try:
        debugger = _wait_for_debugger(store, ref, ended, pause)
    except BaseException:
        listener.close()
        raise
    forward = PortForward(listener, lambda: backend.connect(ref, 0, debugger.port), ended)
    forward.instructions = instructions(
        ref, debugger, forward.port, working_dir or "", now=time.time()
    )
    return forward


def instructions(ref: JobRef, debugger: Debugger, port: int, local_root: str, *, now: float) -> str:
    """Return the text that tells a user the debugger's address and the entry for launch.json."""
    name = f"kinetic: {ref.display_name} ({ref.job_id})"
    document = json.dumps(
        launch_configuration(debugger, name=name, port=port, local_root=local_root), indent=2
    )
    left_s = max(debugger.closes_at - now, 0.0)
    waits = (
        f"its function starts once you have attached, or in {left_s:.0f} s"
        if debugger.state is DebuggerState.WAITING
        else "its function is running"
    )
    return (
        f"kinetic: the debugger of {ref.job_id} listens on 127.0.0.1:{port}; {waits}.\n"
        f"In Visual Studio Code, put this into .vscode/launch.json and press F5:\n{document}"
    )


def read(store: Store, ref: JobRef) -> Debugger | None:
    """Return the record of the newest attempt's debugger; None if it is missing or damaged."""
    try:
        key = layout.AttemptKeys(ref.job_id, attempts.find_newest(store, ref.job_id)).debugger
        return Debugger.read(store.get(key))
    except (NotFound, CorruptRecord):
        return None


def free_port(wanted: int = DEFAULT_PORT) -> int:
    """Return `wanted`, or 0 (any free port) if that port is in use."""
    try:
        _open_listener(wanted).close()
    except UsageError:
        return 0
    return wanted


def follow_call(submit: Callable[[], Any], abandoned: threading.Event) -> Any:
    """Submit a job, forward its debugger to this machine, and wait for the value. The function
    starts when an editor attaches. The wait ends early if another thread sets `abandoned`."""
    check_terminal(
        has_terminal=bool(sys.stdin and sys.stdin.isatty()), allowed=settings.load().no_tty_debug
    )
    handle = submit()
    with contextlib.ExitStack() as stack:
        # If the job ends before its debugger listens, `call_result` below raises the reason.
        with contextlib.suppress(NotFound):
            stack.callback(handle.debug_attach(free_port()).terminate)
        return handle.call_result(abandoned)


def check_terminal(*, has_terminal: bool, allowed: bool) -> None:
    """Refuse to wait for a debugger without a terminal: no user may be present to attach one.

    Raises:
        UsageError: there is no terminal, and KINETIC_NO_TTY_DEBUG is not set.
    """
    if not has_terminal and not allowed:
        raise UsageError(
            "A function with debug=True waits until you attach a debugger, but this is not a "
            "terminal. Set KINETIC_NO_TTY_DEBUG=1 to wait anyway, or use run_async() and "
            "JobHandle.debug_attach(). Nothing was submitted."
        )


def _explain_ssh(ref: JobRef, debugger: Debugger, port: int, working_dir: str | None) -> str:
    """Return instructions for reaching the debugger on a Ray node: nothing is forwarded there."""
    near, node = port or DEFAULT_PORT, debugger.address or "NODE"
    return (
        f"kinetic cannot forward ports of Ray nodes. {ref.job_id} keeps running; its debugger "
        f"listens on 127.0.0.1:{debugger.port} of {node}. Forward it with "
        f"`ssh -N -L {near}:127.0.0.1:{debugger.port} {node}` or, where nodes are pods, with "
        f"`kubectl port-forward POD {near}:{debugger.port}` for the pod with this address. Then:\n"
        f"{instructions(ref, debugger, near, working_dir or '', now=time.time())}"
    )


def _wait_for_debugger(
    store: Store, ref: JobRef, ended: Callable[[], bool], pause: Callable[[float], object]
) -> Debugger:
    while True:
        # Check the job before reading the record, which may outlive the debugger.
        has_ended = ended()
        debugger = read(store, ref)
        if has_ended:
            raise NotFound(
                f"{ref.job_id} has ended, so its debugger cannot be attached. `kinetic jobs result "
                f"{ref.job_id}` shows the result."
            )
        if debugger is not None and debugger.listens:
            return debugger
        pause(POLL_EVERY_S)


def _open_listener(port: object) -> socket.socket:
    if isinstance(port, bool) or not isinstance(port, int):
        raise UsageTypeError(f"local_port must be a whole number; got {port!r}.")
    if not 0 <= port < 1 << 16:
        raise UsageError(f"local_port must be between 0 and 65535; got {port}.")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise UsageError(
            f"Port {port} of this machine cannot be used ({why}). Choose another port, or 0 for "
            "any free port: `kinetic jobs debug --port 0`, or debug_attach(local_port=0)."
        ) from error
