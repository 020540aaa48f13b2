"""Functions that do their worst to the process they run in: the right value, or an error that names
the truth, and nothing left.

In: real jobs. The fixture `no_leftovers` looks for processes after each test.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from hostile_cases import OURS, PATIENCE_S, exit_with, failure_of, started, told

from kinetic import errors

# -- what a function may do to the worker, and still return ----------------------------------------


def close_low_descriptors():
    os.closerange(0, 1024)


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
    for each in (sys.path, sys.modules, sys.meta_path, sys.path_hooks, sys.path_importer_cache):
        each.clear()


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
    global kept
    kept = RaisesWhenDeleted()
    kept = [RaisesWhenDeleted()]


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
    close_low_descriptors,
    close_all_descriptors,
    replace_all_descriptors,
    write_into_all_descriptors,
    break_standard_output,
    no_standard_output,
    lower_the_recursion_limit,
    raise_from_a_tracer,
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


FATAL = [clear_the_import_system, replace_the_import_system, break_builtins]
"""These take apart what kinetic's own code needs in the process."""


STRIKING = (set_an_alarm, interrupt_afterwards)
"""These may strike while the function is still at it."""


def then_return(havoc):
    havoc()
    return {"still": "told"}


class Mine(Exception):
    pass


def then_raise(havoc):
    mine = Mine("still told")
    havoc()
    raise mine


@pytest.mark.parametrize("havoc", HARMLESS, ids=lambda h: h.__name__)
def test_a_value_comes_back_all_the_same(havoc):
    handle = started(then_return, havoc, timeout=PATIENCE_S)
    if havoc in STRIKING and not handle.wait(PATIENCE_S).ok:
        # It struck before the function was over.
        failure_of(handle, (RuntimeError, errors.UserCodeFailed))
        return
    assert handle.result(timeout=PATIENCE_S, stream_logs=False) == {"still": "told"}
    assert not any(word in told(handle) for word in OURS)


@pytest.mark.parametrize("havoc", HARMLESS, ids=lambda h: h.__name__)
def test_an_exception_comes_back_all_the_same(havoc):
    handle = started(then_raise, havoc, timeout=PATIENCE_S)
    if havoc in STRIKING:
        failure_of(handle, (Mine, RuntimeError, errors.UserCodeFailed))
    else:
        error = failure_of(handle, Mine)
        assert str(error) == "still told"
        assert "raise mine" in told(handle, error)
        assert not any(word in told(handle, error) for word in OURS)


@pytest.mark.parametrize("havoc", FATAL, ids=lambda h: h.__name__)
@pytest.mark.parametrize("then", [then_return, then_raise], ids=lambda f: f.__name__)
def test_a_function_that_takes_python_apart_gets_its_end_or_a_clear_error(havoc, then):
    handle = started(then, havoc, timeout=PATIENCE_S)
    if then is then_return and handle.wait(PATIENCE_S).result_digest:
        assert handle.result(timeout=PATIENCE_S, stream_logs=False) == {"still": "told"}
        return
    kinds = (errors.HostLost, errors.ResultUnavailable, errors.UserCodeFailed, Mine)
    with pytest.raises(kinds, match=r"took apart what|broke kinetic's own code|still told"):
        handle.result(timeout=PATIENCE_S, stream_logs=False)


# -- processes that stay behind --------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (leave_sleepers, "processes sleep ("),
        (leave_an_orphan, "processes fork of the function ("),
        (leave_many, " and others"),
        (leave_the_deaf, "processes fork of the function ("),
    ],
)
def test_processes_left_behind_are_named_and_killed_at_once(leave, named):
    def took_s():
        handle = started(leave)
        assert handle.result(stream_logs=False) == 1
        assert "still running after the function ended, and killed" in handle.logs()
        assert named in handle.logs()
        outcome = handle.outcome()
        return outcome.ended_at - outcome.reports[0].ended_at

    # It waits for no time limit, of which the shortest is 3 s: that would make every run slow, a
    # busy machine only some.
    assert any(took_s() < 2.5 for _ in range(20))


def fork_and_come_back(how):
    if os.fork() == 0:
        if how == "raise":
            raise Mine("of the fork")
        if how == "exit":
            sys.exit(0)
        return "the fork"
    os.wait()
    return "the function"


@pytest.mark.parametrize("how", ["return", "raise", "exit"])
def test_a_fork_that_comes_back_does_not_pass_for_the_function(how):
    handle = started(fork_and_come_back, how)
    assert handle.result(stream_logs=False) == "the function"
    assert ("Mine: of the fork" in handle.logs()) == (how == "raise")
    assert "/kinetic/_host/" not in handle.logs()


def hang_at_exit():
    import atexit

    atexit.register(time.sleep, 1000)
    return 1


def test_an_exit_handler_that_hangs_is_ended_and_named():
    handle = started(hang_at_exit)
    assert handle.result(timeout=PATIENCE_S, stream_logs=False) == 1
    assert "exit handler" in handle.logs()
