"""The worker: the process in which the function runs, once for each attempt that it stays for.

In: messages from the agent (`start`, `exit`). Out: messages to the agent (`armed`, then what an
attempt says), an exit code. Nothing that must survive its death lives here: the report is sent
before the interpreter winds down, because JAX may abort the process on its way out.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import signal
from typing import NoReturn

from kinetic._core.exits import Exit
from kinetic._host.channel import Channel, WorkerEvent
from kinetic._host.worker import (
    attempt,
    forks,
    interpreter,
    jaxworld,
    report,
    signals,
    staying,
    streams,
)
from kinetic._host.worker.start import Start
from kinetic._host.worker.staying import RetainedCall, Unblocker
from kinetic._system import processes

STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes the worker write its Python stacks; works while native code blocks."""
IMPORTED_AHEAD = (
    "cloudpickle",
    "resource",
    "traceback",
    "kinetic._pickling.call",
    "kinetic._pickling.code_pickler",
    "kinetic._pickling.results",
    "kinetic._pickling.unpickler",
    "kinetic._pickling.exceptions",
    "kinetic._pickling.result_unpickler",
)
HIGH_FD = (1 << 13) - 16
"""Where the worker's own descriptors lie: beyond those that programs close when they close "all"
descriptors, as daemons do."""


def main(
    channel: Channel, out: int, err: int, stacks_fd: int, parent_pid: int, *, free_fd: int = -1
) -> NoReturn:
    """Run one call, or one for each attempt if it has `free_fd`, and exit. Never returns into the
    code of the process that forked."""
    code = report.BROKEN_CODE
    try:
        free_fd = _init_process(channel, out, err, stacks_fd, parent_pid, free_fd=free_fd)
        channel.send({"event": WorkerEvent.ARMED})
        _import_ahead()
        message = channel.receive()
        if message is not None:
            code = _serve(channel, Unblocker(free_fd), Start.from_json(message["start"]))
    except SystemExit as stopped:  # Outside the function.
        code = stopped.code if isinstance(stopped.code, int) else code
        channel.send(report.report_early_stop(stopped))
    except BaseException as error:  # noqa: BLE001 - the last line of defence of a forked child
        _report_own_failure(channel, error)
    finally:
        streams.flush()
        os._exit(code)


def _import_ahead() -> None:
    """Import what unpickling needs while the gang gathers; no user code."""
    for name in IMPORTED_AHEAD:
        importlib.import_module(name)


def _report_own_failure(channel: Channel, error: BaseException) -> None:
    """Report a fault of kinetic as such, not as the function's."""
    import traceback

    with contextlib.suppress(Exception):
        trace = "".join(traceback.format_exception(error))
        channel.send(
            {
                "event": Exit.SETUP_FAILED,
                "detail": f"kinetic's own code failed; this is not the function's fault:\n{trace}",
            }
        )


def _init_process(
    channel: Channel, out: int, err: int, stacks_fd: int, parent_pid: int, *, free_fd: int
) -> int:
    """Detach from the parent: own process group, streams and descriptors; return where `free_fd` is
    now."""
    os.setpgid(0, 0)
    processes.die_with_parent(parent_pid)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    limit = min(os.sysconf("SC_OPEN_MAX"), 1 << 16)
    high = high_fd()
    stacks_fd = processes.lift_fd(stacks_fd, high)
    free_fd = processes.lift_fd(free_fd, high) if free_fd >= 0 else free_fd
    channel.lift(high)
    low = 3
    for fd in [*sorted({channel.fileno(), stacks_fd, free_fd} - {-1}), limit]:
        os.closerange(low, fd)
        low = fd + 1
    processes.RESERVE.hold(high)
    streams.renew()
    signals.reset()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    signals.end_in_forks()
    forks.end_descriptors(channel, {stacks_fd, free_fd} - {-1}, STACKS_SIGNAL)
    return free_fd


def high_fd() -> int:
    """The least of the worker's own descriptors."""
    return min(HIGH_FD, os.sysconf("SC_OPEN_MAX") - 16)


def _serve(channel: Channel, freedom: Unblocker, start: Start) -> int:
    # The message is sent before the interpreter winds down; then the agent says when to exit.
    before: tuple[Start, RetainedCall] | None = None
    while True:
        message, kept = forks.run(attempt.run, channel, freedom, start, before)
        streams.flush()
        if not channel.is_whole():
            report.save_message(start, message)
            return _wind_down(leave=False)
        channel.send(message)
        if message["event"] != Exit.RETURNED:
            interpreter.flush_files()  # A gang that has failed may be ended before it winds down.
        reply = channel.receive()
        if reply is None or not ("exit" in reply or "stay" in reply):
            return 1
        if "exit" in reply:
            return _wind_down(leave=bool(reply.get("leave")))
        if kept is None or (following := _stay(channel, freedom, kept)) is None:
            return 1
        before, start = (start, kept), following


def _stay(channel: Channel, freedom: Unblocker, kept: RetainedCall) -> Start | None:
    """Leave the world, and wait for the next attempt; None when there is none in this process."""
    interpreter.disarm_tracers()
    try:
        with freedom.keep_connections_shut():
            staying.leave(kept)
    except staying.CannotStay as why:
        channel.send({"event": WorkerEvent.CANNOT_STAY, "detail": str(why)})
        return None
    signals.reset()
    processes.RESERVE.hold(high_fd())
    channel.send({"event": WorkerEvent.FREE})
    message = channel.receive()
    return None if message is None else Start.from_json(message["start"])


def _wind_down(*, leave: bool) -> int:
    """Exit as a script does, but do not wait for threads that will not end."""
    with contextlib.suppress(BaseException):
        if leave:
            jaxworld.leave()
    with contextlib.suppress(BaseException):
        interpreter.end_executors()
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    interpreter.flush_files()
    streams.flush()
    return 0
