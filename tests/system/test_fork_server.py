"""A fork server forks for a process that has threads and must not fork; the new processes are
children of that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from gangs import wait_until

ROOT = Path(__file__).resolve().parents[2]

STORY = """
import os, resource, signal, threading, time
from kinetic._host.fork_server import ForkServer
from kinetic._system import processes

processes.adopt_orphans()
held, other = os.pipe()

def run(request, fds):
    os.write(fds[0], f"{request['n']} {os.getppid()}".encode())
    return request["n"]

fork_server = ForkServer(run, "kinetic-forks test", without=[held, other])
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
for n in (3, 4):
    read_end, write_end = os.pipe()
    pid = fork_server.fork({"n": n}, [write_end])
    os.close(write_end)
    assert os.read(read_end, 100) == f"{n} {os.getpid()}".encode(), "its parent is who asked"
    assert os.read(read_end, 100) == b"", "nobody else holds the descriptor"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == n
def fork(n):
    read_end, write_end = os.pipe()
    pid = fork_server.fork({"n": n}, [write_end])
    assert pid in processes.children(os.getpid()), "whoever has its id can wait for it"
    os.close(write_end)
    assert os.read(read_end, 100) == f"{n} {os.getpid()}".encode(), "the answer is of the child"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == n

def limit_files(pid, most):
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    return resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))
taken = set(map(int, os.listdir(f"/proc/{fork_server.pid}/fd")))
free = [fd for fd in range(100) if fd not in taken]
before = limit_files(fork_server.pid, free[1] + 1)
try:
    fork(3)
except OSError as error:
    assert "forked: Too many open files" in str(error), error
else:
    raise AssertionError("it has room for two descriptors, and needs three")
limit_files(fork_server.pid, before[0])
for n in range(5, 25):
    fork(n)
assert set(processes.children(os.getpid())) == {fork_server.pid}, "nothing else stays"
os.kill(fork_server.pid, signal.SIGKILL)
os.waitpid(fork_server.pid, 0)
try:
    fork_server.fork({"n": 8})
except OSError as error:
    print("refused")
fork_server.close()
again = ForkServer(run, "kinetic-forks test")
print(again.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_children_of_a_stem_belong_to_who_asks():
    done = subprocess.run(
        [sys.executable, "-c", STORY],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    refused, pid = done.stdout.split()
    assert refused == "refused"
    title = Path(f"/proc/{pid}/cmdline")
    wait_until(
        lambda: not title.exists() or b"kinetic-forks" not in title.read_bytes(),
        "it does not die with its owner",
    )
