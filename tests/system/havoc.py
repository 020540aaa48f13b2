"""Functions that damage the process in which they run, for tests of hostile functions. Hosts import
this module instead of the tests: importing pytest would take longer than the job."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time


def exit_with(code):
    sys.exit(code)


def close_all_descriptors():
    os.closerange(3, 1 << 16)


def replace_all_descriptors():
    null = os.open(os.devnull, os.O_RDWR)
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != null:
            os.dup2(null, fd)


def write_into_all_descriptors():
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.write(fd, b"garbage without an end")
            except OSError:
                pass


def break_standard_output():
    class Broken:
        def write(self, text):
            raise KeyboardInterrupt("in write")

        def flush(self):
            raise SystemExit("in flush")

    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = Broken()


def no_standard_output():
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None


def clear_the_import_system():
    for container in (
        sys.path,
        sys.modules,
        sys.meta_path,
        sys.path_hooks,
        sys.path_importer_cache,
    ):
        container.clear()


def replace_the_import_system():
    sys.path, sys.modules, sys.meta_path = None, {}, ()


def break_builtins():
    import builtins

    for name in ("open", "print", "isinstance", "len", "dict", "str", "type", "__import__"):
        setattr(builtins, name, None)


def lower_the_recursion_limit():
    sys.setrecursionlimit(60)


def raise_from_a_tracer():
    def tracer(frame, *_):
        if "/kinetic/_host/" in frame.f_code.co_filename:
            raise ZeroDivisionError("in the tracer")

    sys.settrace(tracer)
    sys.setprofile(tracer)


def remove_the_working_folder():
    shutil.rmtree(os.getcwd())


def remove_the_hosts_folder():
    scratch = os.path.dirname(os.path.dirname(kinetic_file("tree")))
    shutil.rmtree(scratch)


def kinetic_file(part):
    return os.getcwd()[: os.getcwd().index(f"/{part}") + len(part) + 1] + "/x"


def forbid_all_in_umask():
    os.umask(0o777)


def empty_the_environment():
    os.environ.clear()


def go_elsewhere():
    os.chdir("/")


def stop_collecting():
    import gc

    gc.disable()
    gc.freeze()


def set_an_alarm():
    def handler(*_):
        raise RuntimeError("the alarm")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)


def interrupt_afterwards():
    import _thread

    def strike():
        for _ in range(200):
            _thread.interrupt_main()
            time.sleep(0.001)

    threading.Thread(target=strike, daemon=True).start()


def ignore_all_signals():
    for signum in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(signum, signal.SIG_IGN)


def exit_in_a_thread():
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()


def leave_daemon_threads_printing():
    def chatter():
        while True:
            print("chatter")

    for _ in range(5):
        threading.Thread(target=chatter, daemon=True).start()


def raise_at_exit():
    import atexit

    atexit.register(lambda: 1 / 0)
    atexit.register(exit_with, 9)


def exit_hard_at_exit():
    import atexit

    atexit.register(os._exit, 9)


class RaisesWhenDeleted:
    def __del__(self):
        raise ValueError("in __del__")


def keep_what_raises_when_deleted():
    global objects
    objects = RaisesWhenDeleted()
    objects = [RaisesWhenDeleted()]


def leave_an_event_loop():
    import asyncio

    async def endless():
        while True:
            await asyncio.sleep(0.001)

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(endless(), loop)


def leave_pools_open():
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

    global pools
    pools = ThreadPoolExecutor(2), ProcessPoolExecutor(2)
    assert [pool.submit(abs, -1).result() for pool in pools] == [1, 1]


def leave_a_pool_that_never_ends():
    from concurrent.futures import ThreadPoolExecutor

    ThreadPoolExecutor(1).submit(time.sleep, 1000)


def recurse():
    try:
        recurse()
    except RecursionError:
        pass


def leave_handlers_that_fork():
    os.register_at_fork(before=lambda: 1 / 0)


HARMLESS = [
    write_into_all_descriptors,
    break_standard_output,
    no_standard_output,
    lower_the_recursion_limit,
    remove_the_working_folder,
    remove_the_hosts_folder,
    forbid_all_in_umask,
    empty_the_environment,
    go_elsewhere,
    stop_collecting,
    set_an_alarm,
    interrupt_afterwards,
    ignore_all_signals,
    exit_in_a_thread,
    leave_daemon_threads_printing,
    raise_at_exit,
    exit_hard_at_exit,
    keep_what_raises_when_deleted,
    leave_an_event_loop,
    leave_pools_open,
    leave_a_pool_that_never_ends,
    recurse,
    leave_handlers_that_fork,
]


FATAL = [
    close_all_descriptors,
    replace_all_descriptors,
    raise_from_a_tracer,
    clear_the_import_system,
    replace_the_import_system,
    break_builtins,
]
"""Functions that destroy a part of their process which kinetic's own code in it needs."""


STRIKING = (set_an_alarm, interrupt_afterwards)
"""Functions that set an alarm or an interrupt for later: it may strike before they have
returned."""


def then_return(havoc):
    havoc()
    return {"still": "told"}


class Mine(Exception):
    pass


def then_raise(havoc):
    mine = Mine("still told")
    havoc()
    raise mine


def leave_sleepers():
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 1


def leave_an_orphan():
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(1000)
    return 1


def leave_many():
    for _ in range(60):
        if os.fork() == 0:
            os.fork()
            time.sleep(1000)
    return 1


def leave_the_deaf():
    if os.fork() == 0:
        for signum in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(signum, signal.SIG_IGN)
        time.sleep(1000)
    return 1


def fork_and_come_back(how):
    if os.fork() == 0:
        if how == "raise":
            raise Mine("of the fork")
        if how == "exit":
            sys.exit(0)
        return "the fork"
    os.wait()
    return "the function"


def hang_at_exit():
    import atexit

    atexit.register(sleep_long)
    return 1


def sleep_long():
    time.sleep(1000)


def leave_a_file_open(how):
    """Leave a file unflushed, and a pipe without a reader that has more buffered bytes than it can
    hold: closing the pipe at the end would block for ever."""
    reader, writer = os.pipe()
    pipe = open(writer, "wb", buffering=1 << 20)
    pipe.write(b"x" * 500_000)
    file = open(f"{os.environ['KINETIC_OUTPUT_DIR']}/rows", "w")
    file.write("row")
    cycle = [file, pipe, reader]
    cycle.append(cycle)
    if how == "raise":
        raise Mine("of the function")
    return "the function"


class Hung(io.RawIOBase):
    """A file whose writes block for ever, as on a file server that is down."""

    def __init__(self, path):
        self._file = open(path, "wb")

    def writable(self):
        return True

    def fileno(self):
        return self._file.fileno()

    def write(self, data):
        threading.Event().wait()


def leave_a_file_hanging():
    file = io.BufferedWriter(Hung(f"{os.environ['KINETIC_OUTPUT_DIR']}/rows"))
    file.write(b"row")
    sys.hung_file = file
    raise Mine("of the function")


def leak_descriptors():
    with contextlib.suppress(OSError):
        while True:
            os.dup(0)


def forbid_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))


def forbid_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def hide_the_scratch():
    """Replace the host's scratch folder by a file, so that nothing can be written there."""
    scratch = os.path.dirname(os.getcwd())
    os.chdir("/")
    os.rename(scratch, f"{scratch}-away")
    with open(scratch, "w"):
        pass


def change_user():
    os.setgid(65534)
    os.setuid(65534)


def change_all_ids():
    os.setresuid(65534, 65534, 65534)
