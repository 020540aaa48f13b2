"""Processes of a job on one machine: their number, and the priority of kinetic's own threads for
CPU time over those of the user's function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from kinetic._system import processes

pytestmark = pytest.mark.starts_processes

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")

FAMILY = """
import json, os, sys
from kinetic._system import processes

def nice():
    return os.getpriority(os.PRIO_PROCESS, 0)

told = [nice()]
processes.take_precedence()
told.append(nice())
if os.fork() == 0:
    processes.take_precedence()  # An agent, forked by a supervisor.
    told.append(nice())
    if os.fork() == 0:
        processes.yield_precedence()
        print(json.dumps([*told, nice(), os.getsid(0) == os.getpid()]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
    os._exit(0)
os.wait()
"""

AT_THE_LIMIT = """
import os, resource, threading
from kinetic._system import processes

resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
os.setgroups([])
os.setuid(65534)
for act in (processes.fork, processes.check_threads):
    try:
        act()
    except BlockingIOError as error:
        print(error)
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def may_be_nicer():
    code = "import os; os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode == 0


def test_the_threads_of_the_check_have_ended_when_it_returns():
    """Threads that still end would take the place of gRPC's, which then crashes."""
    before = threading.active_count()
    for _ in range(50):
        processes.check_threads()
        assert threading.active_count() == before


def test_agents_run_before_the_threads_of_functions_which_run_as_their_caller_does():
    ordinary, supervisor, agent, worker, has_own_session = json.loads(run(FAMILY))
    assert supervisor == agent == (ordinary - 5 if may_be_nicer() else ordinary)
    assert worker == ordinary
    assert has_own_session


@AS_ROOT
def test_the_limit_that_allows_no_more_processes_or_threads_is_named():
    fork, threads = run(AT_THE_LIMIT).splitlines()
    named = ": the limit of processes and threads (ulimit -u) is 1"
    assert fork == f"[Errno 11] Resource temporarily unavailable{named}"
    assert threads == f"[Errno 11] can't start new thread{named}"


STUCK = """
import signal, threading
from kinetic._system import processes

processes.STUCK_S = 1
with processes.dying_when_stuck():
    pass
signal.sigtimedwait([], 1.5)  # The process is still alive.
print("lives", flush=True)
with processes.dying_when_stuck():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
"""


def test_a_process_that_gets_stuck_below_python_is_ended_by_the_kernel():
    command = [sys.executable, "-c", STUCK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("lives\n", -signal.SIGALRM)
