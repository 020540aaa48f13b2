"""The container runtime: programs that `containers.Runtime` starts, and that start containers.

A message on the first socket has the socket of a cluster, or requests a host: see `start`. Each
message on a cluster's socket is the path of a JSON file (argv, env, cwd) with two pipes, for output
and for news. The program writes lines of JSON to the second pipe: `{"pid": n}` or `{"error":
text}`, then `{"exit": code, "signal": n}`.

Each cluster has a process, and each container has a small one that adopts all its descendants. They
all end with the container's first process, as in a pid namespace, or if the tests are killed. This
program imports the modules of kinetic's hosts, and those named when it starts, once: the first
process of such a pod is then a fork instead of a new program. A host is started as a program if its
variables take effect during imports, or if it executes the next attempt.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)

RUNNER = "kinetic.runner"
ROOT = str(Path(__file__).resolve().parents[3])
PRELOADED = ("kinetic._host.program", "kinetic._host.worker.process", "kinetic._rpc.client")
READ_AT_IMPORT = ("JAX_", "XLA_", "GRPC_", "LD_", "MALLOC_", "OMP_", "OPENBLAS_", "PYTHON")
OBEYED = {("PYTHONPATH", ROOT), ("PYTHONDONTWRITEBYTECODE", "1")}


def main():
    """Fork a shim for each cluster, until the tests have ended."""
    del sys.path[0]  # Hosts must not import the modules of this folder.
    clusters = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    import_ahead(sys.argv[2:])
    while True:
        message, fds, _, _ = socket.recv_fds(clusters, 1 << 17, 8)
        if not message:
            return
        if os.fork() == 0:
            try:
                clusters.close()
                if len(fds) == 1:
                    serve(socket.socket(fileno=fds[0]))
                else:
                    start(json.loads(message), *fds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)


def import_ahead(modules):
    import setproctitle

    from kinetic._host.worker import jaxworld

    for module in PRELOADED:
        importlib.import_module(module)
    jaxworld.preload(modules)
    setproctitle.getproctitle()  # This must run before variables are set.
    assert jaxworld.is_fork_safe()
    gc.freeze()


def serve(wire):
    """Start the containers of a cluster until its socket is closed."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
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


def start(wanted, output, news, *kept):
    """Become the host that `containers.Program` requests. Unlike in a container, descendants stay
    alive if this process is killed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted["blocked"])
    os.write(news, str(os.getpid()).encode())
    become(wanted, output, news, kept)


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


def become(wanted, output, failing, kept=()):
    try:
        os.setsid()
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
                signal.signal(number, signal.SIG_DFL)
        if wanted["deaf"]:  # Signals have no default effect for PID 1.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.chdir(wanted["cwd"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in set(range(3, 256)) - {failing, *kept}:
            os.closerange(fd, fd + 1)
        for fd in kept:
            os.set_inheritable(fd, True)
        if not needs_no_interpreter(wanted):
            os.execvpe(wanted["argv"][0], wanted["argv"], wanted["env"])
    except BaseException as error:
        os.write(failing, str(error).encode())
        os._exit(128)
    os.close(failing)
    run_here(wanted)


def needs_no_interpreter(wanted):
    """True for a host of kinetic that can be a fork of this program, with its imported modules."""
    is_host = wanted["argv"] == [sys.executable, "-m", RUNNER]
    rest = dict(wanted["env"].items() - OBEYED)
    return is_host and not any(name.startswith(READ_AT_IMPORT) for name in rest)


def run_here(wanted):
    """Run the command in this process, as a newly started interpreter would."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.path[:0] = [wanted["cwd"], *([ROOT] if "PYTHONPATH" in os.environ else [])]
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    sys.argv[1:] = []
    code = 1
    try:
        runpy.run_module(RUNNER, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    os._exit(code)


def tell(news, what):
    try:
        os.write(news, json.dumps(what).encode() + b"\n")
    except OSError:
        pass


def kill_all():
    """End every descendant. Orphans become children of this process, so it kills its children."""
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
