"""Functions of calls on sessions.

Hosts import this module instead of the tests: importing pytest would take longer than the job.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import kinetic

IMPORTED_BY = os.getpid()
state = []
"""State of this module: it stays in kept processes."""


def describe_process(*, fails=False):
    """Return the process id and the id of the call's job, and print a line."""
    print("spoken", flush=True)
    if fails:
        raise KeyError("own")
    return os.getpid(), os.environ["KINETIC_JOB_ID"]


def count_calls(how=""):
    """Return the process id, and how many calls this process and this module have seen."""
    kinetic.kept.calls = getattr(kinetic.kept, "calls", 0) + 1
    state.append(how)
    if how == "raise":
        raise KeyError("own")
    if how == "exit":
        os._exit(3)
    return os.getpid(), kinetic.kept.calls, len(state)


def leave_behind():
    """Leave a process and a thread running; return the process id of this process."""
    subprocess.Popen(["sleep", "60"])
    threading.Thread(target=time.sleep, args=(60,), name="straggler").start()
    return os.getpid()


def sum_squares():
    """Compute with a program of all hosts; return its value, and the number of programs that JAX
    compiled for its cache."""
    import jax
    import numpy as np

    compiled = []
    jax.monitoring.register_event_listener(
        lambda event, **_: compiled.append(event) if event.endswith("/cache_misses") else None
    )
    mesh = jax.make_mesh((len(jax.devices()),), ("all",))
    over_all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    numbers = jax.make_array_from_callback((64,), over_all, lambda part: np.ones(64)[part])
    return float(jax.jit(lambda x: (x * x).sum())(numbers)), len(compiled)


def gather_pids(dies=-1, raises=-1):
    """Return the pids of all hosts by a collective of JAX, and what this host has kept."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_index() == dies:
        os._exit(4)
    if jax.process_index() == raises:
        raise ValueError("while host 0 waits")
    pids = multihost_utils.process_allgather(np.array([os.getpid()]))
    before = getattr(kinetic.kept, "array", None)
    kinetic.kept.array = jax.numpy.zeros(3) + (0 if before is None else before[0] + 1)
    return pids.ravel().tolist(), None if before is None else float(before[0])


def touch_and_wait(mark, value=None):
    """Touch a file, and return the value once the file `mark` with ".go" exists."""
    Path(mark).touch()
    while not Path(f"{mark}.go").exists():
        time.sleep(0.01)
    return value


def wait_for_mark(mark):
    """Touch a file for this host, and wait for ever."""
    Path(f"{mark}-{os.environ['KINETIC_HOST_INDEX']}").touch()
    while True:
        time.sleep(0.01)


def fail_at_first():
    """Fail in the first attempt, return the process id in the second."""
    if kinetic.attempt() == 1:
        raise ValueError("at first")
    return os.getpid()


def import_modules(*names):
    """Import modules, and return the names of those that were imported before. Check that this
    module was imported by the process of the call."""
    assert os.getpid() == IMPORTED_BY
    before = [name for name in names if name in sys.modules]
    for name in names:
        importlib.import_module(name)
    return before


def append(path, word):
    """Append a word to a file, and return the words."""
    with open(path, "a") as file:
        file.write(f"{word} ")
    return Path(path).read_text().split()
