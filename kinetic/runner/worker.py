"""The worker: the process in which the user's function runs.

In: messages from the agent (`start`, `exit`), a payload. Out: messages to the agent (`armed`, `started`, then one end), the
pickled value or exception as a file. Called by the agent in a freshly forked process. Nothing that must survive a death
lives here: a report is sent before the interpreter winds down, because JAX may abort the process on its way out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import hashlib
import importlib
import io
import os
import signal
import sys
import threading
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kinetic.errors import KineticError, PicklingError
from kinetic.job.outcome import Exit
from kinetic.runner import jaxworld, processes
from kinetic.runner.channel import Channel, Message

STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Makes the worker write its Python stacks; works while native code blocks."""
REPR_LIMIT = 20_000
IMPORTED_AHEAD = ("cloudpickle", "kinetic.packaging.payload", "kinetic.packaging.raised", "kinetic.packaging.homecoming")
_OWN_CODE = (str(Path(__file__).parent) + os.sep, "<kinetic>")
"""Where code of ours comes from that a user's traceback need not show; "<kinetic>" is what `kinetic run` sends."""


@dataclass(frozen=True)
class Start:
    """What the agent tells the worker when the whole gang is ready.

    Attributes:
        payload: file of the pickled call.
        payload_digest: its SHA-256, verified before anything is unpickled.
        function: file of the pickled function, where the payload holds only arguments and the function's SHA-256; else "".
        env: the whole environment, without what the payload carries.
        cwd: working directory.
        sys_path: entries that go before the interpreter's own.
        scratch: folder for the value or the exception.
        world: this process's place among the processes of JAX.
        joins_jax: whether JAX is initialised before the function starts.
        name: of the function, for people.
        tree: where the source tree lies on this host.
        client_root: where it lies on the caller's machine; tracebacks name files there.
        cells: source that lies in no file, so that tracebacks can show it.
        debugger: port and window of the job's debugger, or None when nobody debugs.
        places: where each declared data lies.
        mounts: what has to be mounted for that; see `mounts.Mount`.
    """

    payload: str
    payload_digest: str
    function: str
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    scratch: str
    world: dict[str, Any]
    joins_jax: bool
    name: str
    tree: str
    client_root: str
    cells: list[dict[str, str]] = field(default_factory=list)
    debugger: dict[str, Any] | None = None
    places: list[str] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)


class _Ended(Exception):
    """The function did not return: carries the message for the agent."""

    def __init__(self, message: Message) -> None:
        super().__init__(message["event"])
        self.message = message


def main(channel: Channel, out: int, err: int, stacks_fd: int, parent_pid: int) -> NoReturn:
    """Run one call and leave. Never returns into the code of the process that forked."""
    code = 70
    try:
        _settle(channel, out, err, stacks_fd, parent_pid)
        channel.send({"event": "armed"})
        _import_ahead()
        message = channel.receive()
        if message is not None:
            code = _serve(channel, Start(**message["start"]))
    except SystemExit as stopped:  # SIGTERM outside the function: nothing is left to unwind, and nothing to complain of.
        code = stopped.code if isinstance(stopped.code, int) else code
    except BaseException:  # noqa: BLE001 - the last line of defence of a forked child
        _print_own_failure()
    finally:
        _flush_streams()
        os._exit(code)


def _import_ahead() -> None:
    """Import what unpickling needs while the gang gathers; nothing of the user's."""
    for name in IMPORTED_AHEAD:
        importlib.import_module(name)


def _print_own_failure() -> None:
    import traceback

    with contextlib.suppress(Exception):
        traceback.print_exc()


def _settle(channel: Channel, out: int, err: int, stacks_fd: int, parent_pid: int) -> None:
    """Take the process over: own group, own streams, no descriptor of anybody else."""
    os.setpgid(0, 0)
    processes.die_with_parent(parent_pid)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    keep = sorted({channel.fileno(), stacks_fd})
    low = 3
    for fd in [*keep, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 20 else 1 << 16]:
        os.closerange(low, fd)
        low = fd + 1
    _open_streams()
    _reset_signals()
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)


def _open_streams() -> None:
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = open(fd, mode + "b", closefd=False)
        errors = "backslashreplace" if fd else "replace"
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _terminate(signum: int, frame: types.FrameType | None) -> None:
    """Unless the function handles SIGTERM itself, unwind it, so that `finally` and context managers run."""
    raise SystemExit(128 + signum)


def _serve(channel: Channel, start: Start) -> int:
    # The message is sent before the interpreter winds down; then the agent says when to go.
    message = _attempt(channel, start)
    _flush_streams()
    channel.send(message)
    reply = channel.receive()
    if reply is None or not reply.get("exit"):
        return 1
    return _wind_down(jaxworld.World(**start.world), leave=bool(reply.get("leave")))


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)  # What native code printed waits in the C library's own buffers.


def _wind_down(world: jaxworld.World, *, leave: bool) -> int:
    """End as a script ends, except that threads that will not end do not keep the host."""
    import atexit

    with contextlib.suppress(Exception):
        if leave:
            jaxworld.leave(world)
        atexit._run_exitfuncs()
    _flush_streams()
    return 0


def _attempt(channel: Channel, start: Start) -> Message:
    try:
        func, args, kwargs = _prepare(start)
        _meet_debugger(channel, start)
        channel.send({"event": "started", "time": time.time()})
        value = _call(func, args, kwargs, start)
        return _returned(value, start)
    except _Ended as ended:
        return ended.message | {"leftover_threads": _leftover_threads()}


def _prepare(start: Start) -> tuple[Any, Any, Any]:
    from kinetic.packaging import payload

    try:
        data = Path(start.payload).read_bytes()
        function = Path(start.function).read_bytes() if start.function else b""
    except OSError as error:
        raise _Ended({"event": Exit.SETUP_FAILED, "detail": f"The payload cannot be read: {error}."}) from error
    if hashlib.sha256(data).hexdigest() != start.payload_digest:
        detail = "The payload is not what was submitted (its SHA-256 differs); nothing of it was run."
        raise _Ended({"event": Exit.SETUP_FAILED, "detail": detail})
    _see_data(start)
    try:
        _enter(start, payload.read_header(data).env_vars)
        _join(start)
    except (KineticError, OSError, RuntimeError, ValueError) as error:
        detail = f"The host could not be prepared: {type(error).__name__}: {error}"
        raise _Ended({"event": Exit.SETUP_FAILED, "detail": detail} | _describe(error, start)) from error
    try:
        call: tuple[Any, Any, Any] = payload.unpack(data, function, source_map=_source_map(start))
    except Exception as error:
        raise _Ended({"event": Exit.UNPICKLE_FAILED, "detail": str(error)} | _describe(error, start)) from error
    _adopt_main(call[0], start)
    return call


def _adopt_main(func: Any, start: Start) -> None:
    """Let `__main__` have what the caller's script has: plain pickle, and so multiprocessing, looks functions up there by name.

    Where the script itself was shipped, processes that multiprocessing spawns can import it as they do on the caller's machine.
    """
    while isinstance(func, functools.partial):
        func = func.func
    code = getattr(func, "__code__", None)
    if code is None or func.__module__ != "__main__":
        return
    main = sys.modules["__main__"]
    vars(main).update({name: value for name, value in func.__globals__.items() if not name.startswith("__")})
    script = code.co_filename.replace(f"{start.client_root}/", f"{start.tree}/", 1) if start.client_root else ""
    if script.startswith(f"{start.tree}/") and Path(script).is_file():
        main.__file__ = script


def _see_data(start: Start) -> None:
    """Mount the declared data, and let the call find it. No thread has been started yet."""
    from kinetic.packaging import delivery

    delivery.expect(start.places)
    if not start.mounts:
        return
    from kinetic.runner import mounts

    try:
        mounts.enter([mounts.Mount(**each) for each in start.mounts], scratch=f"{start.scratch}/cover")
    except KineticError as error:
        raise _Ended({"event": Exit.SETUP_FAILED, "detail": str(error)}) from error
    processes.die_with_parent(os.getppid())  # The kernel forgets that for a process that changes its rights.


def _source_map(start: Start) -> tuple[str, str] | None:
    """Where code that travelled by value shall say that it comes from: the tree on this host, for a debugger and for tracebacks.

    Where the caller's own files are at hand their names stay, so that all hosts of a simulated slice run the same code.
    """
    is_leader = start.world["process"] == 0
    wanted = start.client_root and ((start.debugger and is_leader) or not Path(start.client_root).is_dir())
    return (start.client_root, start.tree) if wanted else None


def _meet_debugger(channel: Channel, start: Start) -> None:
    """In a debug job: the leader waits for a debugger, the other hosts for the leader."""
    if start.debugger is None:
        return
    from kinetic.runner import debugger

    try:
        if start.world["process"] == 0:
            debugger.serve(channel, **start.debugger)
        else:
            debugger.hold(channel)
    except (KineticError, SystemExit) as error:  # SystemExit: the job was stopped meanwhile.
        raise _Ended({"event": Exit.SETUP_FAILED, "detail": str(error)}) from error


def _enter(start: Start, captured: dict[str, str]) -> None:
    """Put on the caller's environment, folder and import path."""
    os.environ.clear()
    os.environ.update(start.env | captured)
    time.tzset()
    os.chdir(start.cwd)
    sys.path[:0] = [p for p in start.sys_path if p not in sys.path]
    sys.path_importer_cache.clear()
    sys.argv = [start.name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    if start.cells:
        from kinetic.packaging import cells

        cells.remember(start.cells)
    if "numpy.random" in sys.modules:  # Forked from one parent, all hosts would draw the same numbers.
        sys.modules["numpy.random"].seed()
    os.umask(0o022)


def _join(start: Start) -> None:
    world = jaxworld.World(**start.world)
    if not start.joins_jax or world.processes == 1:
        jaxworld.configure_preloaded(world)
    elif jaxworld.is_installed():
        jaxworld.join(world)
        signal.signal(signal.SIGTERM, _terminate)
    elif world.process == 0:
        print("kinetic: JAX is not installed, so the hosts are not joined: pip install 'kinetic-sdk[jax]'.", file=sys.stderr)  # noqa: T201


def _call(func: Any, args: Any, kwargs: Any, start: Start) -> Any:
    try:
        value = func(*args, **kwargs)
        return _await(value) if hasattr(value, "__await__") else value
    except SystemExit as error:
        return _exited(error, start)
    except BaseException as error:
        raise _Ended({"event": Exit.RAISED} | _describe(error, start)) from error


def _await(value: Any) -> Any:
    import asyncio

    async def outer() -> Any:
        return await value

    return asyncio.run(outer())


def _exited(error: SystemExit, start: Start) -> None:
    if error.code in (None, 0):
        return
    code = error.code if isinstance(error.code, int) else 1
    if not isinstance(error.code, int):
        print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    detail = f"The function called sys.exit({error.code!r})."
    raise _Ended({"event": Exit.SYS_EXIT, "exit_code": code, "detail": detail} | _describe(error, start)) from error


def _describe(error: BaseException, start: Start) -> Message:
    """The exception as text and, where possible, as a pickle file."""
    import traceback

    from kinetic.packaging import payload

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Nothing is left to unwind; what there is to tell shall be told whole.
    _drop_own_frames(error)
    told: Message = {
        "type_name": _qualified_name(type(error)),
        "message": _text(error),
        "traceback": _as_seen_by_caller("".join(traceback.format_exception(error)), start),
        "consequence": start.world["processes"] > 1 and jaxworld.is_consequence(error),
    }
    places = (start.tree, start.client_root) if start.client_root else None
    with contextlib.suppress(BaseException):  # Pickling runs the user's code, which may do anything, exiting included.
        told["error_file"] = _save(start, "error.pkl", payload.pack_exception(error, source_map=places))[0]
    return {"error": told}


def _as_seen_by_caller(text: str, start: Start) -> str:
    if start.cells:
        from kinetic.packaging import cells

        text = cells.titled(text, start.cells)
    return text.replace(start.tree, start.client_root) if start.client_root else text


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - the user's __str__ may do anything
        return f"<the exception's __str__ raised {type(broken).__name__}>"


def _qualified_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def _drop_own_frames(error: BaseException) -> None:
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
        at = at.tb_next
    if at is not None:
        error.__traceback__ = at


def _save(start: Start, name: str, data: bytes) -> tuple[str, str, int]:
    path = Path(start.scratch) / name
    path.write_bytes(data)
    return str(path), hashlib.sha256(data).hexdigest(), len(data)


def _returned(value: Any, start: Start) -> Message:
    threads = _leftover_threads()
    if threads:
        print(f"kinetic: still running after the function returned, and ended: threads {', '.join(threads)}", file=sys.stderr)  # noqa: T201
    message: Message = {"event": Exit.RETURNED, "leftover_threads": threads}
    if start.world["process"] != 0:
        return message
    from kinetic.packaging import payload

    try:
        path, digest, size = _save(start, "result.pkl", payload.pack_value(value))
    except OSError as error:
        detail = f"The value could not be written on the host: {error}."
        return message | {"event": Exit.RESULT_UNPICKLABLE, "detail": detail, "repr": _short_repr(value)}
    except (PicklingError, Exception, RecursionError) as error:  # noqa: BLE001 - pickling runs the user's code
        detail = f"The function returned a {_qualified_name(type(value))}, which cannot be pickled: {error}"
        return message | {"event": Exit.RESULT_UNPICKLABLE, "detail": detail, "repr": _short_repr(value)}
    return message | {"result_file": path, "result_digest": digest, "result_size_bytes": size}


def _short_repr(value: Any) -> str:
    try:
        return repr(value)[:REPR_LIMIT]
    except Exception as error:  # noqa: BLE001 - the user's __repr__ may do anything
        return f"<repr raised {type(error).__name__}>"


def _leftover_threads() -> list[str]:
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and t.is_alive() and not t.daemon]
    return [t.name for t in others if not _is_idle(t)]


def _is_idle(thread: threading.Thread) -> bool:
    """Whether it is a pool's, and waits for work: its innermost Python frame is then the pool's own loop."""
    loop = getattr(sys.modules.get("concurrent.futures.thread"), "_worker", None)
    frame = sys._current_frames().get(thread.ident or 0)
    return loop is not None and frame is not None and frame.f_code is loop.__code__
