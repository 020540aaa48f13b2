"""The preparation of an attempt in the worker: set up the process as the function expects it, and
unpickle the function."""

from __future__ import annotations

import _thread
import contextlib
import hashlib
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

from kinetic._core.exits import Exit
from kinetic._host.channel import Channel, Message, WorkerEvent
from kinetic._host.worker import (
    breakpoints,
    forks,
    home,
    jaxworld,
    kept_state,
    libraries,
    report,
    signals,
    streams,
)
from kinetic._host.worker import call as calling
from kinetic._host.worker.call import Call
from kinetic._host.worker.interpreter import customize
from kinetic._host.worker.start import Start
from kinetic._host.worker.startup.kinetic_awaiting import act_when_imported
from kinetic._store import files
from kinetic._system import processes
from kinetic.errors import CorruptRecord, KineticError


class _NoValueError(Exception):
    """The function cannot be called; `message` is the last message for the agent."""

    def __init__(self, detail: str, event: Exit = Exit.SETUP_FAILED, **more: Any) -> None:
        super().__init__(detail)
        self.message: Message = {"event": event, "detail": detail, **more}


def prepare(channel: Channel, start: Start, *, is_first: bool = True) -> Call | Message:
    """Set up this process, and return the call to make; or the last message for the agent if that
    fails. `is_first` is False in a process that has ended a call of its session."""
    try:
        func, args, kwargs = _prepare(channel, start, is_first=is_first)
        _meet_debugger(channel, start)
    except _NoValueError as ended:
        return ended.message | {"leftover_threads": report.leftover_threads()}
    return _wrap_for_losses(func, start), args, kwargs


def _wrap_for_losses(func: Any, start: Start) -> Any:
    """Wrap a function so that it is called again after the loss of a slice, if this process (a
    single controller) survives that. A program of `kinetic run` is not wrapped."""
    slices, code = start.elastic, getattr(func, "__code__", None)
    if slices is None or (code is not None and code.co_filename == report.SENT_CODE):
        return func

    def call(*args: Any, **kwargs: Any) -> Any:
        from kinetic._host.worker.controller import Controller

        reform_file = start.env["KINETIC_REFORM_FILE"]
        controller = Controller(slices.rules, start.world, reform_file, os.environ.update)
        return controller.call(calling.call_and_await, func, args, kwargs)

    return call


def _prepare(channel: Channel, start: Start, *, is_first: bool) -> Call:
    from kinetic._pickling import call as payload
    from kinetic._pickling import envelope

    try:
        data = files.content(start.payload)
        function = files.content(start.function) if start.function else b""
    except OSError as error:
        raise _NoValueError(f"The stored call cannot be read: {error}.") from error
    if hashlib.sha256(data).hexdigest() != start.payload_digest:
        detail = (
            "The stored call is damaged (its SHA-256 differs), so the function was not run. Submit "
            "the job again."
        )
        raise _NoValueError(detail, damaged=start.payload_digest)
    header = envelope.read_header(data)
    captured = header.env_vars
    if is_first:
        _mount_data(start)
        captured |= _move_in(start)
        _start_stacks_thread(channel)
    _join_world(channel, start, captured, is_first=is_first)
    kept_state.choose_main(header.function_digest)
    try:
        call: Call = forks.run(
            payload.unpack,
            data,
            function,
            main=vars(sys.modules["__main__"]),
            source_map=_map_source(start),
            external=start.places,
            when_imported=act_when_imported,
            loaded=kept_state.functions if start.keeps else None,
        )
    except CorruptRecord as error:  # The payload was verified, so the function's record is damaged.
        raise _NoValueError(str(error), damaged=header.function_digest) from error
    except Exception as error:
        if isinstance(error.__cause__, signals.Terminated):
            raise error.__cause__ from None
        described = report.describe_error(error, start)
        raise _NoValueError(str(error), Exit.UNPICKLE_FAILED, **described) from error
    _adopt_script(call[0], start)
    return call


def _join_world(
    channel: Channel, start: Start, captured: dict[str, str], *, is_first: bool
) -> None:
    """Set up the environment, then join the world of JAX."""
    try:
        _enter(start, captured)
        if is_first:
            # Forked from one parent, all hosts would draw the same random numbers.
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()
            jaxworld.enter(start.world, start.joins_jax, start.elastic)
        else:
            jaxworld.enter_again(start.world)
            _drop_changed_modules(start)
        _set_jax_options(start)
        _watch_programs(channel, start)
    except (KineticError, OSError, RuntimeError, ValueError) as error:
        detail = f"The host could not be prepared: {type(error).__name__}: {error}"
        raise _NoValueError(detail, **report.describe_error(error, start)) from error


def _start_stacks_thread(channel: Channel) -> None:
    """Start a thread that takes the signal for stacks, so that the function's threads do not.

    The signal's handler would interrupt some calls of the function (pause, select, sleeping in
    native code). Start the thread after the mounts, which need a single thread. It is not a
    `threading` thread, so the function neither lists nor joins it.
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
    """Mount the declared data. This process must have no other thread yet."""
    if not start.mounts:
        return
    from kinetic._host.worker import mounts

    try:
        mounts.enter(
            [mounts.Mount(**each) for each in start.mounts], scratch=f"{start.scratch}/cover"
        )
    except KineticError as error:
        raise _NoValueError(str(error)) from error
    # The kernel resets this setting when a process changes its credentials.
    processes.die_with_parent(os.getppid())


def _move_in(start: Start) -> dict[str, str]:
    """Mount this host's local folder at its path; return the variables that name it."""
    if start.home is None:
        return {}
    try:
        start.home.write_rank(start.world)
    except OSError as error:
        raise _NoValueError(start.home.explain(error)) from error
    moved_in = start.home.is_shared and home.enter(start.home)
    if moved_in:
        processes.die_with_parent(os.getppid())  # See `_mount_data`.
    return start.home.variables(moved_in=moved_in)


def _meet_debugger(channel: Channel, start: Start) -> None:
    try:
        breakpoints.set_up(channel, start)
    except (KineticError, SystemExit) as error:  # SystemExit: the job was stopped in the meantime.
        raise _NoValueError(str(error)) from error


def _enter(start: Start, captured: dict[str, str]) -> None:
    """Set up the caller's environment, working directory and import path."""
    os.environ.clear()
    os.environ.update(start.env | captured)
    time.tzset()
    customize()
    os.chdir(start.cwd)
    sys.path[:] = make_import_path(start, sys.path)
    sys.path_importer_cache.clear()
    libraries.drop_hidden(start)
    sys.argv = [start.name]
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    if start.cells:
        from kinetic._pickling import cells

        cells.cache_lines(start.cells)
    os.umask(0o022)


def _drop_changed_modules(start: Start) -> None:
    changed = kept_state.drop_changed_modules(start.tree)
    if changed and start.world.process == 0:
        names = ", ".join(changed)
        streams.say(f"kinetic: modules imported again, because their files have changed: {names}")


def _watch_programs(channel: Channel, start: Start) -> None:
    if start.programs:
        from kinetic._host.worker import programs  # few jobs have `compile_check`

        programs.record(Path(start.programs), start.tree, start.env["KINETIC_ACCELERATOR"])
    if start.compares:  # Last, because the above lowers, too.
        from kinetic._host.worker import fingerprints

        titles = {cell["file"]: cell["title"] for cell in start.cells}
        fingerprints.record(channel, titles, start.compares)


def _set_jax_options(start: Start) -> None:
    refused = jaxworld.set_options(start.jax_options)
    if refused and start.world.process == 0:
        streams.say(
            "kinetic: JAX on this host does not accept these options of the caller: "
            f"{', '.join(refused)}."
        )


def _adopt_script(func: Any, start: Start) -> None:
    """Give `__main__` the globals of the caller's script: plain pickle, and therefore
    multiprocessing, finds functions in it by name.

    If the script is in the tree, processes that multiprocessing spawns can import it as on the
    caller's machine.
    """
    from kinetic._pickling import cells, origin, uses

    func = uses.unwrap(func)
    code = getattr(func, "__code__", None)
    if code is None or func.__module__ not in origin.MAIN:
        return
    main = sys.modules["__main__"]
    vars(main).update(
        {name: value for name, value in func.__globals__.items() if not name.startswith("__")}
    )
    places = (start.client_root, start.tree) if start.client_root else None
    script = origin.map_path(code.co_filename, places)
    if script.startswith(f"{start.tree}/") and Path(script).is_file():
        main.__file__ = script
        with contextlib.suppress(OSError, ValueError):  # The function may have edited the file.
            cells.cache_lines([{"file": code.co_filename, "source": Path(script).read_text()}])


def make_import_path(start: Start, inherited: list[str]) -> list[str]:
    """Return the import path: the tree's folders, then the inherited entries. The tree's copy of an
    editable install replaces the caller's folder if that folder is inherited; otherwise the copy
    goes before the installed packages."""
    root = start.client_root.rstrip("/")
    on_this_host = {root + folder[len(start.tree) :]: folder for folder in start.editable}
    entries = [
        on_this_host.pop(os.path.realpath(entry), entry) if on_this_host and entry else entry
        for entry in inherited
    ]
    installed = (
        number for number, entry in enumerate(entries) if entry.endswith(libraries.INSTALLED)
    )
    before = next(installed, len(entries))
    # A kept process has them from its last call.
    entries[before:before] = [each for each in on_this_host.values() if each not in entries]
    return [*(folder for folder in start.sys_path if folder not in entries), *entries]


def _map_source(start: Start) -> tuple[str, str] | None:
    """Return the renaming of files for code that was sent by value: from the caller's root to the
    tree on this host, for tracebacks and a debugger.

    Return None if the caller's own files exist on this machine, so that all hosts of a simulated
    slice run the same code.
    """
    is_leader = start.world.process == 0
    wanted = start.client_root and (
        (start.debugger and is_leader) or not Path(start.client_root).is_dir()
    )
    return (start.client_root, start.tree) if wanted else None
