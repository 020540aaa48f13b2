"""The worker process: it calls the function once, and exits.

The agent sends `start` and `exit`; the worker sends `armed`, then the messages of the attempt. All
that must survive is sent before the interpreter winds down, because JAX may abort the process
during that.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from typing import NoReturn

from kinetic._core.exits import Exit
from kinetic._host.channel import Channel, Message, WorkerEvent
from kinetic._host.worker import (
    attempt,
    compilation_cache,
    forks,
    interpreter,
    jaxworld,
    kept_state,
    libraries,
    report,
    signals,
    streams,
)
from kinetic._host.worker import call as calling
from kinetic._host.worker.call import Call
from kinetic._host.worker.start import Start
from kinetic._system import processes
from kinetic.errors import text_of

STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""The signal with which the worker writes its Python stacks, even while native code blocks."""
PRELOADED = (
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


def main(channel: Channel, out: int, err: int, stacks_fd: int, parent_pid: int) -> NoReturn:
    """Run one call, and exit. Never returns into the code of the process that forked it.

    Args:
        channel: messages to and from the agent.
        out, err: descriptors that become the standard streams.
        stacks_fd: descriptor to which the Python stacks are written on the signal for them.
        parent_pid: the process with which this one dies.
    """
    code, call = report.BROKEN_CODE, None
    try:
        _init_process(channel, out, err, stacks_fd, parent_pid)
        channel.send({"event": WorkerEvent.ARMED})
        for name in PRELOADED:  # Import early, while other hosts start.
            importlib.import_module(name)
        is_first, before = True, {*sys.modules}
        while (message := channel.receive()) is not None:
            start = Start.from_json(message["start"])
            call = forks.run(attempt.prepare, channel, start, is_first=is_first)
            reply = _serve(channel, start, call, before)
            if isinstance(call, dict) and call["event"] == Exit.SETUP_FAILED:
                break  # What earlier calls left, such as open files, may fail each later call.
            if reply is None or "keep" not in reply:
                code = 1
                if reply is not None and "exit" in reply:
                    code = _wind_down(leave="leave" in reply)
                break
            call, is_first = None, False
            if reply.get("has_failed"):
                jaxworld.await_computations()
            kept_state.end_call(start.tree)
            channel.send({"event": WorkerEvent.IDLE})
    except SystemExit as stopped:
        if call is None:
            code = stopped.code if isinstance(stopped.code, int) else code
            channel.send(report.report_early_stop(stopped))
    except BaseException as error:  # noqa: BLE001 - the last line of defence of a forked child
        if call is None:
            _report_own_failure(channel, error)
        else:  # The function has broken this process; the agent reports its exit code.
            with contextlib.suppress(BaseException):
                words = f"{type(error).__name__}: {text_of(error)}"
                streams.say(
                    "kinetic: this process ends because of an error outside of your function, "
                    "perhaps in a hook that the function has set (sys.settrace, for example): "
                    f"{words}"
                )
    finally:
        streams.flush()
        os._exit(code)


def _report_own_failure(channel: Channel, error: BaseException) -> None:
    """Report an error in kinetic's own code, so that the function is not blamed."""
    import traceback

    with contextlib.suppress(Exception):
        trace = "".join(traceback.format_exception(error))
        channel.send(
            {
                "event": Exit.SETUP_FAILED,
                "detail": "kinetic's own code failed; this is not the function's fault: "
                f"{processes.name_limit(error)}\n{trace}",
            }
        )


def _init_process(channel: Channel, out: int, err: int, stacks_fd: int, parent_pid: int) -> None:
    """Detach from the parent: own streams, descriptors and signal handlers."""
    processes.die_with_parent(parent_pid)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    limit = min(os.sysconf("SC_OPEN_MAX"), 1 << 16)
    low = 3
    for fd in [*sorted({channel.fileno(), stacks_fd}), limit]:
        os.closerange(low, fd)
        low = fd + 1
    streams.renew()
    signals.reset()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
    signals.end_in_forks()
    forks.end_descriptors(channel, stacks_fd, STACKS_SIGNAL)


def _serve(
    channel: Channel, start: Start, call: Call | Message, before: set[str]
) -> Message | None:
    """Make the call, and send the message about its end; return the agent's reply. The message is
    sent before the interpreter winds down."""
    message = call if isinstance(call, dict) else forks.run(calling.run, channel, call, start)
    if start.compares and message["event"] == Exit.RETURNED:
        from kinetic._host.worker import fingerprints

        fingerprints.finish(waits=not start.keeps)
    streams.flush()
    imports = libraries.list_imports(start, before)
    channel.send(message | compilation_cache.take_savings() | imports)
    if message["event"] != Exit.RETURNED:
        interpreter.flush_files()  # A failed gang may be killed before it winds down.
    return channel.receive()


def _wind_down(*, leave: bool) -> int:
    """Run exit handlers as at the end of a script, but do not wait for threads that never end. With
    `leave`, first leave JAX's world together with all hosts."""
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
