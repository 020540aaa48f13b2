"""Functions that fork on a host, and describe to the test what their children observe. Hosts import
this module instead of the tests: importing pytest would take longer than the job."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import kinetic

PATIENCE_S = 200


def child_of(act):
    """Run `act` in a forked child; return the child's wait status, as `os.waitpid` does."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def answer_of(act):
    """Run `act` in a forked child; return its value, which must fit into JSON and a pipe."""
    ours, theirs = os.pipe()
    status = child_of(lambda: os.write(theirs, json.dumps(act()).encode()))
    assert status == 0, status
    os.close(theirs)
    with open(ours, "rb") as answer:
        return json.loads(answer.read())


def sets_of_signals():
    """Return the signals that this process catches, ignores and blocks, as hexadecimal masks."""
    rows = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    return [rows[name].strip() for name in ("SigCgt", "SigIgn", "SigBlk")]


def sleep_in_a_semaphore():
    """Block the main thread in a semaphore, and send SIGTERM to another thread: this process must
    end although no signal wakes the semaphore."""
    semaphore = multiprocessing.get_context("fork").Semaphore(0)
    main_thread = threading.get_ident()

    def end():
        while "futex" not in Path(f"/proc/self/task/{os.getpid()}/wchan").read_text():
            if Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2][1] == "S":
                break
        assert threading.get_ident() != main_thread
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    threading.Thread(target=end).start()
    semaphore.acquire()


def end_in_the_middle_of_fork():
    """Fork a child that gets SIGTERM before any Python code runs in it; return its wait status."""
    kind = ctypes.CFUNCTYPE(None)
    strike = kind(lambda: os.kill(os.getpid(), signal.SIGTERM))
    atfork = ctypes.CDLL(None).__register_atfork
    atfork(kind(), kind(), strike, None)
    return child_of(lambda: time.sleep(PATIENCE_S))


def handle_it():
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    return child_of(lambda: os.kill(os.getpid(), signal.SIGTERM) or signal.pause())


def ignore_it():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return child_of(lambda: os.kill(os.getpid(), signal.SIGTERM))


def fork_at_the_end():
    import atexit

    def end():
        child = multiprocessing.get_context("fork").Process(target=sleep_in_a_semaphore)
        child.start()
        child.join()
        print("ended by", child.exitcode, flush=True)

    atexit.register(end)


def open_files():
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own descriptor
            pass
    return files


def fork_while_unpickling(how):
    if os.fork() == 0:
        if how == "raise":
            raise ValueError("of the fork")
        if how == "exit":
            sys.exit(3)
        return "the fork"
    return os.waitstatus_to_exitcode(os.wait()[1])


class Forks:
    """An object that forks when it is unpickled, like a module that starts a helper when it is
    imported."""

    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        return fork_while_unpickling, (self.how,)


class ForksWhenPickled:
    """An object that forks when it is pickled; parent and child both finish the pickle."""

    def __reduce__(self):
        if os.fork() == 0:
            return str, ("the fork",)
        return int, (os.waitstatus_to_exitcode(os.wait()[1]),)


def ask_to_join_in_a_child(folder):
    """Fork on host 1 while its JAX waits for host 0, and call `jax.distributed.initialize` in the
    child; return the error that the child gets."""
    import jax

    over = Path(folder, "over")
    if os.environ["KINETIC_HOST_INDEX"] == "0":
        while not over.exists():
            time.sleep(0.01)
        return jax.device_count()
    joining = threading.Thread(target=jax.devices)
    joining.start()
    file = Path(json.loads(os.environ["KINETIC_WORLD"])["file"])
    # Read the file in children: closing it in this process would free the process's lock on it.
    while not (file.exists() and answer_of(file.read_text).startswith("joining")):
        time.sleep(0.01)

    def ask():
        try:
            jax.distributed.initialize()
        except RuntimeError as refused:
            return str(refused)

    try:
        return answer_of(ask)
    finally:
        over.touch()
        joining.join()


def leave_a_checkpointer(folder):
    """Fork within the `with` block of a Checkpointer: the child may not save, and its exit from the
    block must not release the parent's checkpoints."""
    import numpy as np

    owner = Path(folder, "kinetic-owner.json")
    with kinetic.Checkpointer(folder, every=1, local_every=None) as checkpoints:
        state, first = checkpoints.restore({"a": np.zeros(3)})
        checkpoints.save(first, state)
        checkpoints.wait()
        before = owner.read_text()
        pid = os.fork()
        if pid == 0:
            try:
                checkpoints.save(first + 1, state)
            except kinetic.errors.UsageError as refused:
                print(refused, flush=True)
            sys.exit(5)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code, before == owner.read_text() != "", checkpoints.save(first + 1, state)


def square(x):
    return x * x


def compute_with_joblib():
    from joblib import Parallel, delayed

    return Parallel(n_jobs=2)(delayed(square)(x) for x in range(4))


def leave_a_tracker_that_stands_still():
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGSTOP)


def leave_the_family(marker):
    """Start processes outside of the worker's session, one of which has lost its parent; then
    wait."""
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.Popen(["sh", "-c", "setsid sh -c 'sleep 1000 & sleep 1000' & sleep 0.1"]).wait()
    Path(marker).touch()
    time.sleep(1000)
