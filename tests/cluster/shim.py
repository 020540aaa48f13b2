"""The container runtime: a program of its own that starts containers' processes and outlives none.

In: a socket on which each message is the path of a JSON file (argv, env, cwd), with two pipes: for
output and for news. Out: lines of JSON on the second pipe: `{"pid": n}` or `{"error": text}`, then
`{"exit": code, "signal": n}`. Started by `containers.Runtime`; uses the standard library alone.

Each container gets a small process that adopts all its descendants. When the container's first
process ends, so do they all, as in a pid namespace; also when the tests that started it are killed.
"""

import ctypes
import json
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)


def main():
    wire = socket.socket(fileno=int(sys.argv[1]))
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(wire, 65536, 2)
        if not message:
            return
        if os.fork() == 0:
            try:
                wire.close()
                contain(message.decode(), *fds)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


def contain(path, output, news):
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: end())
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    with open(path) as file:
        wanted = json.load(file)
    os.unlink(path)
    failed, failing = os.pipe()
    first = os.fork()
    if first == 0:
        become(wanted, output, failing)
    os.close(output)
    os.close(failing)
    with os.fdopen(failed) as reader:
        error = reader.read()
    tell(news, {"error": error} if error else {"pid": first})
    status = 0
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == first:
            break
    kill_all()
    if not error:
        code = os.waitstatus_to_exitcode(status)
        tell(news, {"exit": 128 - code if code < 0 else code, "signal": max(-code, 0)})
    os._exit(0)


def become(wanted, output, failing):
    try:
        os.setsid()
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        if wanted["deaf"]:  # as the first process of a container, which has no default handlers
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.chdir(wanted["cwd"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, failing)
        os.closerange(failing + 1, 256)
        os.execvpe(wanted["argv"][0], wanted["argv"], wanted["env"])
    except BaseException as error:
        os.write(failing, str(error).encode())
    os._exit(128)


def tell(news, what):
    try:
        os.write(news, json.dumps(what).encode() + b"\n")
    except OSError:
        pass


def kill_all():
    """End every descendant. Orphans come to this process, so its children are all of them in the
    end."""
    while True:
        for pid in children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def end():
    kill_all()
    os._exit(1)


if __name__ == "__main__":
    main()
