"""Children that a function forks behave as in plain Python: they inherit no signal handler, hook or
descriptor that kinetic's worker has set up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from forking import (
    Forks,
    ForksWhenPickled,
    answer_of,
    ask_to_join_in_a_child,
    child_of,
    compute_with_joblib,
    end_in_the_middle_of_fork,
    fork_at_the_end,
    handle_it,
    ignore_it,
    leave_a_checkpointer,
    leave_a_tracker_that_stands_still,
    open_files,
    sets_of_signals,
    sleep_in_a_semaphore,
)

import kinetic
from kinetic._host.agent import reporter
from kinetic._host.worker.virtual_slices import _Turns
from kinetic._system import processes

PATIENCE_S = 200
CRASHES = {signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL}
"""Signals on which the worker, or its child, prints a Python traceback before it dies."""

INTERNAL = {32, 33}
"""Signals that the C library uses for its own threads. From Python 3.13 on, programs that Python
starts ignore them."""


def run(function, *args, **options):
    handle = kinetic.run(accelerator="cpu", **options)(function).run_async(*args)
    value = handle.result(timeout=PATIENCE_S, stream_logs=False)
    return value, handle.logs()


# -- signals ---------------------------------------------------------------------------------------


PLAIN = """
import json, os
from pathlib import Path
def sets_of_signals():
    rows = dict(l.split(":\\t") for l in Path("/proc/self/status").read_text().splitlines())
    return [rows[name].strip() for name in ("SigCgt", "SigIgn", "SigBlk")]
if os.fork() == 0:
    print(json.dumps(sets_of_signals()), flush=True)
    os._exit(0)
os.wait()
"""


def without_crashes(sets):
    caught, ignored, blocked = (int(each, 16) & ~set_of(INTERNAL) for each in sets)
    return caught & ~set_of(CRASHES), ignored, blocked


def set_of(signums):
    return sum(1 << (signum - 1) for signum in signums)


def test_a_child_has_the_signals_of_plain_python():
    signals, _ = run(lambda: (answer_of(sets_of_signals), sets_of_signals()))
    plain = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, check=True)
    child, parent = map(without_crashes, signals)
    assert child == without_crashes(json.loads(plain.stdout))
    assert parent[2] == 0, "the function's own process holds signals back after a fork"


def test_a_child_that_sleeps_in_a_semaphore_dies_of_sigterm():
    status, _ = run(lambda: child_of(sleep_in_a_semaphore))
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_sigterm_in_the_middle_of_fork_is_not_lost():
    status, _ = run(end_in_the_middle_of_fork)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_handler_of_the_function_goes_on_in_its_children():
    status, _ = run(handle_it)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_signal_that_the_function_ignores_is_ignored_by_its_children():
    assert run(ignore_it)[0] == 0


def test_children_of_exit_handlers_die_of_sigterm():
    """Exit handlers run after the worker has restored its signal handlers: SIGTERM ends a child
    that they have forked."""
    _, logs = run(fork_at_the_end)
    assert "ended by -15" in logs
    assert "exit handler" not in logs


def test_a_child_has_no_hook_of_the_worker():
    assert run(lambda: answer_of(lambda: sys.unraisablehook is sys.__unraisablehook__))[0]


# -- descriptors -----------------------------------------------------------------------------------


def test_a_child_holds_nothing_of_the_worker_open():
    (child, parent), _ = run(lambda: (list(answer_of(open_files).items()), open_files()))
    ours = {file for fd, file in parent.items() if fd > 2}
    assert any(file.startswith("socket:") for file in ours), parent
    assert any("kinetic-stacks" in file for file in ours), parent
    held = [file for fd, file in child if int(fd) > 2]
    assert not [file for file in held if file.startswith("socket:") or "kinetic-stacks" in file]
    assert {0, 1, 2} <= {int(fd) for fd, _ in child}


# -- children that come back -----------------------------------------------------------------------


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("exit", 3)])
def test_a_child_of_a_module_does_not_pass_for_the_host(how, code):
    def function(of_fork):
        print("the function is called", flush=True)
        return of_fork

    value, logs = run(function, Forks(how))
    assert value == code
    assert logs.count("the function is called") == 1


def test_a_child_of_the_value_does_not_pass_for_the_host():
    value, logs = run(ForksWhenPickled)
    assert value == 0
    assert "file descriptors" not in logs


# -- locks of threads ------------------------------------------------------------------------------


def test_a_child_uses_arrays_while_a_thread_of_its_parent_replaces_lost_ones():
    turns, begun, over = _Turns(), threading.Event(), threading.Event()

    def replace():
        begun.set()
        over.wait(PATIENCE_S)

    threading.Thread(target=turns.act_alone, args=(replace,)).start()
    begun.wait(PATIENCE_S)
    pid = os.fork()
    if pid == 0:
        os._exit(turns.wrap(lambda: 7)())
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    finally:
        over.set()


def test_a_child_that_asks_to_join_is_refused_while_its_parent_joins(tmp_path):
    remote = kinetic.run("tpu-v6e-8", joins_jax="lazy", all_hosts=True)(ask_to_join_in_a_child)
    answer = remote.run_async(str(tmp_path)).results(timeout=PATIENCE_S)[1]
    assert "of this host has already joined the other hosts" in answer


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_child_does_not_end_the_checkpointer_of_its_parent(tmp_path):
    value, logs = run(leave_a_checkpointer, str(tmp_path))
    assert value == (5, True, ("persistent",))
    assert "and this process is a fork" in logs


# -- pools of libraries ----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [compute_with_joblib, leave_a_tracker_that_stands_still])
def test_processes_that_pools_keep_are_ended_without_a_word(function):
    value, logs = run(function)
    assert value == (None if function is leave_a_tracker_that_stands_still else [0, 1, 4, 9])
    assert "still running" not in logs


def test_processes_that_pools_keep_are_named_where_more_is_asked_for(monkeypatch):
    monkeypatch.setenv("KINETIC_LOG_LEVEL", "DEBUG")
    assert "kinetic: processes of pools were killed: " in run(leave_a_tracker_that_stands_still)[1]


def test_a_process_that_is_just_ending_was_not_left_running():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert processes.command_line(child) == b"", "the kernel has taken its memory"
    assert reporter.ends_quietly(child)
    os.waitpid(child, 0)
    assert not reporter.ends_quietly(os.getpid())
