"""The worker: the process in which the user's function runs.

In: messages from the agent (`start`, `exit`), a payload. Out: messages to the agent (`armed`,
`started`, then one end), the pickled value or exception as a file. Nothing that must survive its
death lives here: the report is sent before the interpreter winds down, because JAX may abort the
process on its way out.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import functools
import hashlib
import importlib
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from kinetic import _shadows
from kinetic._core.exits import Exit
from kinetic._host.channel import Channel, Message, WorkerEvent
from kinetic._host.start import Start
from kinetic._host.worker import (
    forks,
    home,
    interpreter,
    jaxworld,
    report,
    script,
    signals,
    staying,
    streams,
)
from kinetic._host.worker.staying import Call, RetainedCall, Unblocker
from kinetic._store import files
from kinetic._system import processes
from kinetic.errors import CorruptRecord, KineticError

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
REPORT_TRIES = 4
"""How often reporting the end is tried: the function's tracers and threads may interrupt it."""
FREED = "The function was freed from a world that has lost a host."


_End = tuple[Any, BaseException | None]
_NOTHING: _End = (None, None)


class _NoValueError(Exception):
    """The function did not return: carries the message for the agent."""

    def __init__(self, message: Message) -> None:
        super().__init__(message["event"])
        self.message = message


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
        message, kept = forks.run(_attempt, channel, freedom, start, before)
        streams.flush()
        if not channel.is_whole():
            report.save_message(start, message)
            return _wind_down(leave=False)
        channel.send(message)
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
    streams.flush()
    return 0


def _attempt(
    channel: Channel, freedom: Unblocker, start: Start, before: tuple[Start, RetainedCall] | None
) -> tuple[Message, RetainedCall | None]:
    """Run the function; `before` is how it was started, and with what, in this process's attempt
    before."""
    kept = None if before is None else before[1]
    try:
        if before is None:
            call = _prepare(channel, freedom, start)
            _meet_debugger(channel, start)
            kept = RetainedCall(call) if freedom.may_stay else None
        else:
            _take_place(start, functools.partial(_enter_again, before[0], start))
            call = before[1].again()
    except _NoValueError as ended:
        return ended.message | {"leftover_threads": report.leftover_threads()}, kept
    channel.send({"event": WorkerEvent.STARTED, "time": time.time()})
    freedom.begin(start)
    func, args, kwargs = call
    return _run(channel, freedom, (_wrap_for_losses(func, start), args, kwargs), start), kept


def _wrap_for_losses(func: Any, start: Start) -> Any:
    """Have a function called again when a slice was lost, where that needs no other process. A
    program has its own way: one that knows Pathways calls its training again itself."""
    slices, code = start.elastic, getattr(func, "__code__", None)
    if slices is None or (code is not None and code.co_filename == report.SENT_CODE):
        return func

    def call(*args: Any, **kwargs: Any) -> Any:
        from kinetic._host.worker.controller import Controller

        room_file = start.env["KINETIC_MAKES_ROOM"]
        controller = Controller(slices.rules, start.world, room_file, os.environ.update)
        return controller.call(_call_and_await, func, args, kwargs)

    return call


def _call_and_await(func: Any, args: Any, kwargs: Any) -> Any:
    value = forks.run(func, *args, **kwargs)
    return _await(value) if hasattr(type(value), "__await__") else value


def _run(channel: Channel, freedom: Unblocker, call: Call, start: Start) -> Message:
    """Call the function and report how it ended, in whatever state it left the interpreter."""
    func, args, kwargs = call
    own_pid, end = os.getpid(), [_NOTHING]
    try:
        _call(end, func, *args, **kwargs)
    except BaseException:  # noqa: BLE001 - a tracer of the function may raise here; `end` is set already
        pass
    for attempt in range(REPORT_TRIES):
        try:
            if end[0][1] is None and hasattr(type(end[0][0]), "__await__"):
                _call(end, _await, end[0][0])
            value, error = end[0]
            if os.getpid() != own_pid:
                forks.end(error)
            freedom.end()
            signals.silence()
            processes.RESERVE.release()
            if freedom.is_free and error is not None:
                return {"event": Exit.STOPPED, "detail": FREED}
            if channel.is_whole():
                channel.send(report.ends_with(error, value))
            return (
                report.report_value(value, start)
                if error is None
                else report.report_error(error, start)
            )
        except BaseException as broken:  # noqa: BLE001 - a tracer or a thread of the function's can raise anywhere
            if attempt == REPORT_TRIES - 1:
                return report.report_failed(end[0][1], broken)
            interpreter.disarm_tracers()
    raise AssertionError  # for the type checker: the last turn returns


def _call(end: list[_End], func: Any, /, *args: Any, **kwargs: Any) -> None:
    """Call, and store the end without another call: the function may have left a profiler that
    raises on calls and returns."""
    try:
        end[0] = (func(*args, **kwargs), None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the function's
        end[0] = (None, error)


def _await(value: Any) -> Any:
    import asyncio

    async def outer() -> Any:
        return await value

    return asyncio.run(outer())


def _prepare(channel: Channel, freedom: Unblocker, start: Start) -> Call:
    from kinetic._pickling import call as payload
    from kinetic._pickling import envelope

    try:
        data = files.content(start.payload)
        function = files.content(start.function) if start.function else b""
    except OSError as error:
        raise _NoValueError(
            {"event": Exit.SETUP_FAILED, "detail": f"The payload cannot be read: {error}."}
        ) from error
    if hashlib.sha256(data).hexdigest() != start.payload_digest:
        detail = (
            "The payload is not what was submitted (its SHA-256 differs); nothing of it was run. "
            "Submit the job again."
        )
        raise _NoValueError(
            {"event": Exit.SETUP_FAILED, "detail": detail, "damaged": start.payload_digest}
        )
    _mount_data(start)
    told = _move_in(start)
    _start_stacks_thread(channel)
    freedom.listen()
    _take_place(start, lambda: _enter(start, envelope.read_header(data).env_vars | told))
    try:
        call: Call = forks.run(
            payload.unpack,
            data,
            function,
            main=vars(sys.modules["__main__"]),
            source_map=script.source_map(start),
            external=start.places,
        )
    except CorruptRecord as error:  # The payload is intact, so it is the function's record.
        digest = envelope.read_header(data).function_digest
        raise _NoValueError(
            {"event": Exit.SETUP_FAILED, "detail": str(error), "damaged": digest}
        ) from error
    except Exception as error:
        if isinstance(error.__cause__, signals.Terminated):
            raise error.__cause__ from None
        raise _NoValueError(
            {"event": Exit.UNPICKLE_FAILED, "detail": str(error)}
            | report.describe_error(error, start)
        ) from error
    script.adopt(call[0], start)
    return call


def _take_place(start: Start, enter: Callable[[], None]) -> None:
    """Take this host's place in the world, once it has its variables and its folder."""
    try:
        enter()
        jaxworld.enter(start.world, start.joins_jax, start.elastic)
        _set_jax_options(start)
    except (KineticError, OSError, RuntimeError, ValueError) as error:
        detail = f"The host could not be prepared: {type(error).__name__}: {error}"
        raise _NoValueError(
            {"event": Exit.SETUP_FAILED, "detail": detail} | report.describe_error(error, start)
        ) from error


def _start_stacks_thread(channel: Channel) -> None:
    """Start a thread for the signal that dumps stacks, so that it does not disturb the function's.

    The handler restarts the calls that it interrupts, except some (pause, select, sleeping in
    native code). Not started earlier, because mounting data needs a single thread. Not a
    `threading` thread, so that it is neither listed nor joined.
    """
    asleep = _thread.allocate_lock()
    asleep.acquire()

    def stand_by() -> None:
        channel.send({"event": WorkerEvent.STANDS_BY, "thread": _thread.get_native_id()})
        started.release()
        asleep.acquire()

    started = _thread.allocate_lock()
    started.acquire()
    _thread.start_new_thread(stand_by, ())
    started.acquire()  # The channel is not thread-safe.


def _mount_data(start: Start) -> None:
    """Mount the declared data. No thread has been started yet."""
    if not start.mounts:
        return
    from kinetic._host.worker import mounts

    try:
        mounts.enter(
            [mounts.Mount(**each) for each in start.mounts], scratch=f"{start.scratch}/cover"
        )
    except KineticError as error:
        raise _NoValueError({"event": Exit.SETUP_FAILED, "detail": str(error)}) from error
    # The kernel resets this when a process changes its credentials.
    processes.die_with_parent(os.getppid())


def _move_in(start: Start) -> dict[str, str]:
    """Make this host look like a machine of its own; return the variables about it."""
    if start.home is None:
        return {}
    try:
        start.home.tell(start.world)
    except OSError as error:
        detail = f"The host's own folder (KINETIC_LOCAL_DIR) cannot be written: {error}."
        raise _NoValueError({"event": Exit.SETUP_FAILED, "detail": detail}) from error
    moved_in = start.home.is_shared and home.enter(start.home, start.scratch)
    if moved_in:
        processes.die_with_parent(os.getppid())  # As above.
    return start.home.variables(moved_in=moved_in)


def _meet_debugger(channel: Channel, start: Start) -> None:
    from kinetic._host.worker import breakpoints

    try:
        breakpoints.set_up(channel, start)
    except (KineticError, SystemExit) as error:  # SystemExit: the job was stopped in the meantime.
        raise _NoValueError({"event": Exit.SETUP_FAILED, "detail": str(error)}) from error


def _enter(start: Start, captured: dict[str, str]) -> None:
    """Set up the caller's environment, folder and import path."""
    os.environ.clear()
    os.environ.update(start.env | captured)
    time.tzset()
    os.chdir(start.cwd)
    sys.path[:] = script.import_path(start, sys.path)
    sys.path_importer_cache.clear()
    _shadows.guard(start.sys_path)
    sys.argv = [start.name]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    if start.cells:
        from kinetic._pickling import cells

        cells.remember(start.cells)
    # Forked from one parent, all hosts would draw the same random numbers.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    os.umask(0o022)


def _enter_again(before: Start, start: Start) -> None:
    """Give the function the folder and the variables of another attempt; those that it has set
    itself stay."""
    for name in before.env.keys() - start.env.keys():
        os.environ.pop(name, None)
    for name, value in start.env.items():
        if before.env.get(name) != value:
            os.environ[name] = value
    if start.home is not None:
        start.home.tell(start.world)
    os.chdir(start.cwd)
    os.umask(0o022)
    sys.argv = [start.name]


def _set_jax_options(start: Start) -> None:
    refused = jaxworld.set_options(start.jax_options)
    if refused and start.world.process == 0:
        streams.say(
            "kinetic: JAX on this host does not accept options that the caller has set: "
            f"{', '.join(refused)}."
        )
