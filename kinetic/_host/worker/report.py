"""The worker's last message to the agent: the function's value or exception as a pickle, the rest
as text.

This module calls methods of the user's objects (`__str__`, `__repr__`, `__reduce__`), which may
raise anything, including SystemExit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import sys
import threading
import weakref
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any

from kinetic._core.exits import Exit, Leaving
from kinetic._host.channel import Message, WorkerEvent
from kinetic._host.worker import jaxworld, signals, streams
from kinetic._host.worker.signals import Terminated
from kinetic._host.worker.start import Start
from kinetic.errors import PicklingError, text_of

REPR_LIMIT = 20_000
TEXT_LIMIT = 100_000
"""Longest message or traceback, in characters; the pickled exception has the whole text."""
THREADS_NAMED = 10
_DECORATED_NAMES = frozenset({"run_async", "run_async_map", "aio", "plan", "local", "with_options"})
"""Attributes that only decorated functions have."""
BROKEN_CODE = 70
"""Exit code of a worker whose own code failed, for example without Python's builtins."""
ENCLOSED_BYTES = 1 << 16
"""Largest pickle, in bytes, that is sent in the message itself. That needs no free descriptor, disk
space or write permission."""
ENCLOSED_AT_MOST_BYTES = 64 << 20
"""Largest pickle, in bytes, to send in the message if no file can be written: the agent has to hold
it in memory."""
SENT_CODE = "<kinetic>"
"""File name of the code that `kinetic run` sends to start a program."""
earlier_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that earlier calls have left in this kept process."""
_OWN_CODE = (str(Path(__file__).parents[2]) + "/", SENT_CODE)
"""Files of kinetic's own code, left out of users' tracebacks."""
_MACHINERY = (*_OWN_CODE, str(Path(os.__file__).parent / "asyncio") + "/", "<frozen ")
"""Files of frames between kinetic's and the user's: the event loop of an async function, the import
system."""
_KERAS_ERRORS = ("passed to device_put is not the same on each process", "auto_shard_dataset")
_KERAS_ADVICE = (
    "On several hosts Keras needs two lines: keras.utils.set_random_seed(0) before the model is "
    "made, and DataParallel(..., auto_shard_dataset=False), where each host passes its own part of "
    'the data. With @kinetic.run(..., controller="single") it needs neither.'
)


class ProgramExited(SystemExit):
    """The exit of the program of `kinetic run`.

    Attributes:
        code: see `SystemExit`.
        detail: a sentence about the exit.
    """

    def __init__(self, code: Any, detail: str) -> None:
        super().__init__(code)
        self.detail = detail


def report_value(value: Any, start: Start) -> Message:
    """Return the message about a value. Only the leader's message has the pickled value, unless the
    values of all hosts were requested."""
    threads = leftover_threads()
    if threads:
        names = ", ".join(threads[:THREADS_NAMED]) + (
            " and others" if len(threads) > THREADS_NAMED else ""
        )
        fate = "stay with the kept process" if start.keeps else "were ended"
        streams.say(
            f"kinetic: threads still running after the function returned {fate}: {names}. Join "
            "threads before returning."
        )
    is_first = jaxworld.process_index(start.world) == 0
    message: Message = {"event": Exit.RETURNED, "leftover_threads": threads, "is_first": is_first}
    if not is_first and not start.all_hosts:
        return message
    from kinetic._pickling import results

    try:
        data = results.pack_value(value)
    except BaseException as error:  # noqa: BLE001 - pickling runs the user's code
        failed = (
            f"The returned value ({_qualified_name(type(value))}) cannot be pickled: "
            f"{type(error).__name__}: {text_of(error)}"
        )
        detail = text_of(error) if isinstance(error, PicklingError) else failed
        return message | {
            "event": Exit.RESULT_UNPICKLABLE,
            "detail": detail,
            "repr": short_repr(value),
        }
    try:
        sent = _enclose_pickle(start, "result", data)
    except OSError as error:
        detail = f"The value ({len(data):,} bytes) could not be written on the host: {error}."
        return message | {
            "event": Exit.RESULT_UNPICKLABLE,
            "detail": detail,
            "repr": short_repr(value),
        }
    return (
        message
        | sent
        | {"result_digest": hashlib.sha256(data).hexdigest(), "result_size_bytes": len(data)}
    )


def has_succeeded(error: BaseException | None) -> bool:
    """True if the function returned, or called `sys.exit` with 0."""
    if isinstance(error, SystemExit) and not isinstance(error, Terminated):
        return error.code in (None, 0)
    return error is None


def report_error(error: BaseException, start: Start) -> Message:
    """Return the message about an exception, `sys.exit` and `kinetic.reform` included."""
    if isinstance(error, Leaving):
        return {"event": Exit.REFORMED, "detail": "The function ended, so that a slice can join."}
    if isinstance(error, SystemExit) and not isinstance(error, Terminated):
        return _report_exit(error, start)
    if isinstance(error, Terminated):
        ended: Message = {
            "event": Exit.SIGNAL,
            "signal": 15,
            "detail": "The worker process received SIGTERM.",
        }
    else:
        ended = {"event": Exit.RAISED}
    return ended | describe_error(error, start) | {"leftover_threads": leftover_threads()}


def _report_exit(error: SystemExit, start: Start) -> Message:
    if error.code in (None, 0):
        return report_value(None, start) | {"by_exit": True}
    code = int(error.code) if isinstance(error.code, int) else 1  # sys.exit(True) is 1
    if not isinstance(error.code, int):
        streams.say(text_of(error.code))  # Like the interpreter.
    elif code.bit_length() > 31:
        code = 255  # Like the interpreter, which exits with -1.
    ended = {"event": Exit.SYS_EXIT, "exit_code": code, "detail": exit_detail(error)}
    if isinstance(error, ProgramExited):  # The caller has no such class.
        error = SystemExit(error.code).with_traceback(error.__traceback__)
    return ended | describe_error(error, start) | {"leftover_threads": leftover_threads()}


def exit_detail(error: SystemExit) -> str:
    """Return a sentence that says what has called `sys.exit`."""
    if isinstance(error, ProgramExited):
        return error.detail
    return f"The function called sys.exit({short_repr(error.code)})."


def report_early_stop(error: SystemExit) -> Message:
    """Return the message about SIGTERM, or `sys.exit` in one of the user's modules, before the
    function was called."""
    if isinstance(error, Terminated):
        return {
            "event": Exit.SIGNAL,
            "signal": 15,
            "detail": "The worker process received SIGTERM before the function began.",
        }
    return {
        "event": Exit.UNPICKLE_FAILED,
        "detail": f"sys.exit({short_repr(error.code)}) was called while the function and its "
        "modules were loaded.",
    }


def describe_error(error: BaseException, start: Start) -> Message:
    """Return the message's part about an exception: its text and, if possible, its pickle."""
    from kinetic._pickling import results

    signals.silence()  # No signal may interrupt the report.
    explain(error)
    details: Message = {
        "type_name": _qualified_name(type(error)),
        "message": _short(text_of(error)),
        "traceback": _short(_as_seen_by_caller(traceback_of(error), start)),
        "consequence": start.world.processes > 1 and jaxworld.is_consequence(error),
    }
    places = (start.tree, start.client_root) if start.client_root else None
    # Pickling runs the user's code, which may do anything, exiting included.
    with contextlib.suppress(BaseException):
        details |= _enclose_pickle(start, "error", results.pack_exception(error, source_map=places))
    return {"error": details}


def explain(error: BaseException) -> None:
    """Add notes with advice to errors that only occur in a job: a decorated function is the plain
    function, a debugger has no terminal, and hosts share neither seeds nor data."""
    if "keras" in sys.modules and any(words in text_of(error) for words in _KERAS_ERRORS):
        error.add_note(_KERAS_ADVICE)
    if type(error).__name__ == "BdbQuit":
        from kinetic._host.worker import breakpoints

        error.add_note(f"A debugger was called: {breakpoints.ADVICE}")
    if type(error) is AssertionError and not error.args and (note := _describe_assert(error)):
        error.add_note(note)
    if (
        isinstance(error, AttributeError)
        and isinstance(error.obj, FunctionType)
        and (error.name in _DECORATED_NAMES or hasattr(error.obj, "run_async"))
    ):
        called = error.obj.__name__
        error.add_note(
            f"If {called} is decorated with @kinetic.run: in a job it is the plain function, and a "
            f"job cannot submit other jobs. {called}(...) runs it on this host; to run it "
            "elsewhere, submit it from the script that submitted this job."
        )


def _describe_assert(error: AssertionError) -> str:
    """Return the text of a failed `assert` without a message, with the values of its variables; ""
    if unknown. Hosts run tests without pytest's rewriting, so the values would be missing."""
    import linecache
    import reprlib
    from traceback import walk_tb

    *_, (frame, line) = walk_tb(error.__traceback__)
    statement = linecache.getline(frame.f_code.co_filename, line).strip()
    names = [name for name in re.findall(r"[^\W\d]\w*", statement) if name in frame.f_locals]
    plain = {n: v for n in names if type(v := frame.f_locals[n]).__module__ == "builtins"}
    values = ", ".join(f"{name} = {reprlib.repr(value)}" for name, value in plain.items())
    return f"{statement}, with {values}" if values and statement.startswith("assert") else ""


def traceback_of(error: BaseException) -> str:
    """Return the traceback as Python prints it, without the frames that lead to the function."""
    import traceback

    _drop_own_frames(error)
    return "".join(traceback.format_exception(error))


def save(start: Start, name: str, data: bytes) -> str:
    """Write a file into the host's folder, which the function may have removed; return its path."""
    path = Path(start.scratch) / name
    # Not its parents: a job must not create a removed store anew.
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    # The function may have set a umask with which not even the agent could read the file.
    path.chmod(0o600)
    return str(path)


def _enclose_pickle(start: Start, name: str, data: bytes) -> Message:
    """Return the message's part with a pickle: the data if it is small or no file can be written,
    else the path of a file."""
    if len(data) > ENCLOSED_BYTES:
        try:
            return {f"{name}_file": save(start, f"{name}.pkl", data)}
        except OSError:
            if len(data) > ENCLOSED_AT_MOST_BYTES:
                raise
    return {f"{name}_data": base64.b64encode(data).decode()}


def ends_with(error: BaseException | None, value: object) -> Message:
    """Return the message that the function is ending. It is sent before methods of the user's
    objects are called, which may end the process."""
    return {
        "event": WorkerEvent.ENDING,
        "raised": error is not None,
        "type_name": _qualified_name(type(value if error is None else error)),
    }


def leftover_threads() -> list[str]:
    """List the threads for which a script would wait at its end, except those of idle pools and of
    earlier calls."""
    others = [
        t
        for t in threading.enumerate()
        if t is not threading.main_thread() and t.is_alive() and not t.daemon
        if t not in earlier_threads
    ]
    return [t.name for t in others if not _is_idle(t)]


def _is_idle(thread: threading.Thread) -> bool:
    """True for the thread of a pool of processes without work (joblib's too), and for a thread of a
    pool of threads that waits in the pool's loop."""
    if type(thread).__name__ == "_ExecutorManagerThread":
        return not getattr(thread, "pending_work_items", True)
    loop = getattr(sys.modules.get("concurrent.futures.thread"), "_worker", None)
    frame = sys._current_frames().get(thread.ident or 0)
    return loop is not None and frame is not None and frame.f_code is loop.__code__


def _short(whole: str) -> str:
    """Return the start and the end of a long text; the end usually has the error."""
    if len(whole) <= TEXT_LIMIT:
        return whole
    half = TEXT_LIMIT // 2
    return f"{whole[:half]}\n… {len(whole) - 2 * half:,} characters omitted …\n{whole[-half:]}"


def short_repr(value: object) -> str:
    try:
        return repr(value)[:REPR_LIMIT]
    except BaseException as error:  # noqa: BLE001 - the user's __repr__ may do anything
        return f"<repr raised {type(error).__name__}>"


def _qualified_name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _as_seen_by_caller(trace: str, start: Start) -> str:
    if start.cells:
        from kinetic._pickling import cells

        trace = cells.title_cells(trace, start.cells)
    root = start.client_root.rstrip("/")
    return trace.replace(start.tree, root) if start.client_root else trace


def _drop_own_frames(error: BaseException) -> None:
    """Remove kinetic's frames above the user's code from the exception and from all its causes,
    contexts and group members."""
    errors, visited = [error], {id(error)}
    for linked in errors:  # The loop appends linked exceptions.
        linked.with_traceback(_without_own(linked.__traceback__))
        members = linked.exceptions if isinstance(linked, BaseExceptionGroup) else ()
        for other in (*members, linked.__cause__, linked.__context__):
            if other is not None and id(other) not in visited:
                visited.add(id(other))
                errors.append(other)


def _without_own(trace: TracebackType | None) -> TracebackType | None:
    start = at = trace
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_MACHINERY):
        if at.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
            start = at.tb_next
        at = at.tb_next
    return start
