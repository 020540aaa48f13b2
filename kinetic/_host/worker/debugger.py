"""The debugger of a job: it listens in the leader's worker, and every host waits until a client has
attached or the window has passed. No other module uses debugpy.

    leader's worker  ── listening(port) ──> its agent ── record: waiting ──> caller (kinetic.debug)
                     ── attached(bool)  ──>           ── record: released ─> other agents
                                                                          ── go ──> their workers
"""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetic._core import layout
from kinetic._core.debug_address import Debugger, DebuggerState
from kinetic._core.gang.messages import Activity
from kinetic._host.channel import WorkerEvent
from kinetic._system import peers
from kinetic.errors import KineticError, SetupFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kinetic._core.plan import Plan
    from kinetic._host.channel import Channel, Message
    from kinetic._host.identity import Identity
    from kinetic._store.base import Store

_log = logging.getLogger("kinetic.runner")
EVENTS = frozenset(
    {
        WorkerEvent.DEBUGGER_LISTENING,
        WorkerEvent.DEBUGGER_ATTACHED,
        WorkerEvent.DEBUGGER_HELD,
    }
)
POLL_S = 0.25
"""Seconds between a waiting host's reads of the record of the leader's debugger."""
_AGAIN_S = 0.05
BEYOND_S = 60.0
"""Seconds after the window for which the other hosts still wait for the leader."""
ENVIRON = {
    "KINETIC_DEBUG": "1",
    "PYTHONBREAKPOINT": "debugpy.breakpoint",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
"""Variables of a worker in a debug job. The last one silences a warning about the interpreter's own
frozen modules."""


# -- in workers ------------------------------------------------------------------------------------


def serve(channel: Channel, port: int, window_s: float, folder: str, job_id: str) -> None:
    """Listen, and return once a debugger is ready or the window has passed. With `port` 0, use any
    free port.

    Raises:
        SetupFailed: debugpy is not installed on this host, or the port is in use.
    """
    try:
        import debugpy
    except ImportError as error:
        raise SetupFailed(
            "debug=True needs the package debugpy on the hosts. Add it to the project's "
            "requirements, or to the image; for a simulated slice run `pip install debugpy` here."
        ) from error
    try:
        # subProcess=False: otherwise debugpy would stop each child of the function, too. Its
        # adapter accepts any connection, and clients can run code: the guard checks the user.
        debugpy.configure(subProcess=False, python=str(_write_guard(Path(folder))))
        _, port = debugpy.listen(("127.0.0.1", port))
    except Exception as error:
        raise SetupFailed(
            f"The debugger could not listen on port {port} of the leader: {error}"
        ) from error
    channel.send({"event": WorkerEvent.DEBUGGER_LISTENING, "port": port})
    if window_s > 0:
        _say(
            f"the function waits for a debugger for up to {window_s:g} s: "
            f"`kinetic jobs debug {job_id}` opens its port on your machine."
        )
    attached = _wait(debugpy, window_s)
    if not attached:
        _say(
            f"no debugger attached within {window_s:g} s; the function starts without one. You can "
            "still attach one."
        )
    channel.send({"event": WorkerEvent.DEBUGGER_ATTACHED, "attached": attached})


def _say(words: str) -> None:
    print(f"kinetic: {words}", file=sys.stderr, flush=True)  # noqa: T201 - the job's output


def _write_guard(folder: Path) -> Path:
    """Write a program that runs debugpy's adapter and accepts only connections of this user."""
    program = folder / "debug-adapter"
    command = shlex.join([sys.executable, "-P", str(Path(peers.__file__).resolve())])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o700)
    return program


def _wait(debugpy: Any, window_s: float) -> bool:
    if window_s > 0:
        done = threading.Event()
        expiry = threading.Thread(
            target=_expire, args=(debugpy, window_s, done), name="kinetic-debug-window", daemon=True
        )
        expiry.start()
        try:
            debugpy.wait_for_client()  # Returns once the client has set its breakpoints.
        finally:
            done.set()
            expiry.join()
    return bool(debugpy.is_client_connected())


def _expire(debugpy: Any, window_s: float, done: threading.Event) -> None:
    """Cancel the wait for a client when the window has passed."""
    done.wait(min(window_s, threading.TIMEOUT_MAX))
    while not done.is_set():
        # RuntimeError: the wait has not begun yet. Cancelling is idempotent.
        with contextlib.suppress(RuntimeError):
            debugpy.wait_for_client.cancel()
        done.wait(_AGAIN_S)


def hold(channel: Channel) -> None:
    """Wait until the agent lets the function start, on a host other than the leader."""
    channel.send({"event": WorkerEvent.DEBUGGER_HELD})
    if channel.receive() is None:
        raise SetupFailed(
            "The function did not start: its agent, the process that watches it, has died. Submit "
            "the job again."
        )


# -- in agents -------------------------------------------------------------------------------------


class Gate:
    """The agent's side of the debugger: the leader's agent writes the record, other agents poll
    it."""

    def __init__(
        self,
        identity: Identity,
        plan: Plan,
        store: Store,
        *,
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._store = plan, store
        self._key = layout.AttemptKeys(plan.job_id, identity.attempt).debugger
        self._port, self._address = port, identity.address
        self._clock = clock
        self._record: Debugger | None = None
        self._given_up_at = self._next_poll_at = 0.0
        self.holds = False
        """True while this host's worker waits for `go`."""
        self.poll_s = POLL_S
        """Interval at which to call `opens` while the worker waits."""

    @property
    def activity(self) -> Activity:
        """Activity of the host before its function starts."""
        if self._record is not None and self._record.state is DebuggerState.WAITING:
            return Activity.DEBUGGING
        return Activity.HELD if self.holds else Activity.WAITING

    def start_message(self) -> dict[str, Any]:
        """Return the debugger's part of the start message."""
        return {"port": self._port, "window_s": self._plan.limits.debug_wait_s}

    def accepts(self, message: Message) -> bool:
        """True if `take` handles the message."""
        return message["event"] in EVENTS

    def take(self, message: Message, tree: str) -> None:
        """Handle a message of the worker about its debugger: it listens, a client has attached, or
        the worker waits. `tree` is the folder of the job's source on this host."""
        if message["event"] == WorkerEvent.DEBUGGER_HELD:
            self.holds = True
            self._given_up_at = self._clock() + self._plan.limits.debug_wait_s + BEYOND_S
        elif message["event"] == WorkerEvent.DEBUGGER_LISTENING:
            closes_at = time.time() + self._plan.limits.debug_wait_s
            self._write(
                Debugger(
                    DebuggerState.WAITING,
                    message["port"],
                    tree,
                    self._plan.client_root,
                    closes_at,
                    address=self._address,
                )
            )
        elif self._record is not None:
            self._write(
                replace(self._record, state=DebuggerState.RELEASED, attached=message["attached"])
            )

    def opens(self) -> bool:
        """True if a waiting worker may go on. Reads the record at most every `POLL_S`."""
        now = self._clock()
        if not self.holds or now < self._next_poll_at:
            return False
        self._next_poll_at = now + POLL_S
        if self._is_released() or now >= self._given_up_at:
            self.holds = False
            return True
        return False

    def close(self) -> None:
        """Close the record when the leader's function has ended."""
        if self._record is not None and self._record.listens:
            self._write(replace(self._record, state=DebuggerState.CLOSED))

    def _is_released(self) -> bool:
        try:
            record = Debugger.read(self._store.get(self._key))
        except KineticError:  # Not written yet, or the store does not answer.
            return False
        return record.state is not DebuggerState.WAITING

    def _write(self, record: Debugger) -> None:
        self._record = record
        try:
            self._store.put(self._key, json.dumps(record.to_json()).encode())
        except KineticError as error:
            _log.warning(
                "the debugger's address could not be stored, so `kinetic jobs debug` cannot "
                "attach. The error: %s",
                error,
            )
