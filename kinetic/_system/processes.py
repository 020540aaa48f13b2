"""Facts about processes from the kernel, and ways to end processes.

All functions work on Linux. On other systems, those that need Linux return values that mean
"unknown", and processes notice each other's end by their pipes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
DISK_RESERVE = "reserve"
"""Name of a file in a job's scratch folder that reserves disk space, in case the function fills the
disk. Half of the rest is then freed to write each small value, report or outcome of an attempt, and
all of it for the job's outcome."""
RESERVED_BYTES = 1 << 19
_EXEC_POLL_S, _EXEC_POLLS = 0.002, 2000


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit if it is dead already."""
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


@contextlib.contextmanager
def dying_with(parent_pid: int) -> Iterator[None]:
    """Let this process die with its parent (0: none) while the block runs, but not afterwards."""
    if parent_pid:
        die_with_parent(parent_pid)
    try:
        yield
    finally:
        if parent_pid and _LINUX:
            _prctl(_PR_SET_PDEATHSIG, 0)


def exit_with(act: Callable[[], int]) -> NoReturn:
    """Run `act` in a forked process and exit with the code that it returns, or 70 after an
    exception. A fork must never return into the code of the process that forked it."""
    code = 70
    try:
        code = act()
    except BaseException:  # noqa: BLE001 - the last line of defence of a forked child
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def waking_fd(signum: int, act: Callable[[], None]) -> int:
    """Handle a signal, unblocking it if needed: call `act` in the main thread as soon as that runs
    Python code. Return a descriptor that becomes readable at once. All calls return the same
    descriptor, which may still hold bytes of earlier signals."""
    wake = _open_wake()
    signal.signal(signum, lambda *_: act())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    return wake


@functools.cache
def _open_wake() -> int:
    wake, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return wake


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent dies, so that it can be killed."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_PRECEDENCE = 5
_ordinary: list[int] = []
"""The nice value before `take_precedence`; [] if that was not called. Forks inherit it."""


def take_precedence() -> None:
    """Raise this process's priority above that of functions, if the system permits it (root,
    RLIMIT_NICE), so that the processes that watch functions do not starve."""
    if not _ordinary:
        _ordinary.append(os.getpriority(os.PRIO_PROCESS, 0))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _ordinary[0] - _PRECEDENCE)


def yield_precedence() -> None:
    """Return to the ordinary priority, in a new session, because the kernel divides processor time
    between sessions first (autogroup)."""
    os.setsid()
    for ordinary in _ordinary:
        os.setpriority(os.PRIO_PROCESS, 0, ordinary)


def set_title(title: str) -> None:
    """Show `title` in process lists instead of the command line."""
    import setproctitle

    setproctitle.setproctitle(title)


def raise_file_limit() -> None:
    """Raise the limit on open files to the hard limit, up to 65,536: a large gang has a connection
    per host."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve_disk(path: Path) -> None:
    """Reserve `RESERVED_BYTES` of disk space with a file, if the disk has room."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if sys.platform == "linux":
                os.posix_fallocate(fd, 0, RESERVED_BYTES)
        finally:
            os.close(fd)


def free_half(path: Path) -> None:
    """Free half of the reserved disk space. Other hosts may need the rest."""
    with contextlib.suppress(OSError):
        os.truncate(path, path.stat().st_size // 2)


def _prctl(option: int, value: int) -> None:
    from kinetic._system.libc import LIBC  # Few processes need it.

    LIBC.prctl(option, value, 0, 0, 0)


def threads(pid: int) -> int:
    """Return the number of threads of a process; 0 if it has ended, or is unknown."""
    return len(_list_threads(pid))


def _list_threads(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def children(pid: int) -> list[int]:
    """Return the direct children of a process, of all its threads; [] if it has ended."""
    pids: list[int] = []
    for thread in _list_threads(pid):
        with contextlib.suppress(OSError):
            pids += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return pids


def descendants(pid: int, without: Collection[int] = ()) -> list[int]:
    """Return all processes below a process, parents first, but none of `without` or below them."""
    pids, todo = [], [pid]
    while todo:
        below = [child for child in children(todo.pop()) if child not in without]
        pids += below
        todo += below
    return pids


def kill(pid: int, signum: int) -> bool:
    """Send a signal, and return True if the process received it."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_thread(pid: int, thread: int, signum: int) -> bool:
    """Send a signal to one thread of a process, and return True if the thread received it."""
    from kinetic._system.libc import LIBC

    return bool(LIBC.tgkill(pid, thread, signum) == 0)


def kill_descendants(
    limit_s: float = 2.0, keep: Iterable[int] = (), trees: Collection[int] = ()
) -> int:
    """Kill and reap all descendants of this process until none remains or the time is up. Return
    the number that remains.

    The caller must have called `adopt_orphans`, so that orphans stay among the descendants.

    Args:
        limit_s: the time, in seconds.
        keep: ids of processes to spare. Their ended children do not count as remaining, because
            only these processes can reap them.
        trees: ids of processes to spare with all their descendants.
    """
    spared = set(keep)
    deadline = time.monotonic() + limit_s
    while True:
        below = [pid for pid in descendants(os.getpid(), trees) if pid not in spared]
        remaining = [pid for pid in below if not _is_left_by(spared, pid)]
        if not remaining or time.monotonic() > deadline:
            return len(remaining)
        for pid in remaining:
            kill(pid, signal.SIGKILL)
        _reap(remaining)
        time.sleep(0.001)


def _is_left_by(parents: set[int], pid: int) -> bool:
    """True if a process has ended, and one of these parents has not reaped it."""
    fields = _read_stat(pid)
    return len(fields) > 1 and fields[0] in "ZX" and int(fields[1]) in parents


def await_leaving(
    limit_s: float, keep: Iterable[int] = (), trees: Collection[int] = ()
) -> list[int]:
    """Wait until the descendants of this process have ended, or the time is up; return the ids of
    those that remain. Processes in `keep`, and whole `trees` of processes, do not count."""
    spared = set(keep)
    deadline = time.monotonic() + limit_s
    while True:
        below = [pid for pid in descendants(os.getpid(), trees) if pid not in spared]
        _reap(below)
        remaining = [pid for pid in below if state(pid) not in ("", "Z", "X")]
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.002)


def state(pid: int) -> str:
    """Return the kernel's letter for a process's state ("R", "S", "Z"); "" if it was reaped."""
    fields = _read_stat(pid)
    return fields[0] if fields else ""


def read_start(pid: int) -> str:
    """Return when a process started, in ticks since boot; "" if it has ended. Process id and start
    together identify a process."""
    fields = _read_stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on; [] if the process has been reaped."""
    with contextlib.suppress(OSError):
        return _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()
    return []


def _read(path: str) -> bytes:
    """Return the content of a file in /proc, in a third of the time of `Path.read_text`."""
    with open(path, "rb", buffering=0) as file:
        return file.read()


def name(pid: int) -> str:
    """Return the kernel's name of a process, up to 15 bytes as in `ps`; "" if it was reaped."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def age_s(pid: int) -> float:
    """Return the seconds since a process started; 0.0 if unknown."""
    fields = _read_stat(pid)
    with contextlib.suppress(OSError, ValueError):
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    return 0.0


def owner(pid: int) -> int:
    """Return the id of the user who owns a process.

    Raises:
        OSError: the process has been reaped.
    """
    return Path(f"/proc/{pid}").stat().st_uid


def all_pids() -> list[int]:
    """Return the ids of all processes; [] if unknown."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def environ(pid: int) -> bytes:
    """Return the environment that a process was started with, with zero bytes between variables.

    Raises:
        OSError: the process has been reaped, or is another user's.
    """
    return Path(f"/proc/{pid}/environ").read_bytes()


def command_line(pid: int) -> bytes:
    """Return the command line of a process, with zero bytes between words.

    Raises:
        OSError: the process has been reaped.
    """
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def lasting_command_line(pid: int) -> bytes:
    """Return the command line of a process. Wait while it is empty, which it is for a moment during
    an exec.

    Raises:
        OSError: the process has been reaped, is a zombie, or belongs to the kernel.
    """
    for _ in range(_EXEC_POLLS):
        if command := command_line(pid):
            return command
        Path(f"/proc/{pid}/exe").readlink()
        time.sleep(_EXEC_POLL_S)
    return b""


def _reap(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def fork() -> int:
    """Fork like `os.fork`, but name the limit in the error if no more processes are allowed."""
    try:
        return os.fork()
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, f"{error.strerror}: {find_limit()}") from None


def check_threads(number: int = 8) -> None:
    """Check that the system allows this many more threads. gRPC needs about 8, and hangs if it can
    start none.

    Raises:
        BlockingIOError: the system allows no more threads; the error names the limit.
    """
    import threading

    gate, started = threading.Event(), []
    try:
        for _ in range(number):
            thread = threading.Thread(target=gate.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise BlockingIOError(errno.EAGAIN, name_limit(error)) from None
    finally:
        gate.set()
        for thread in started:  # While they live, gRPC cannot have theirs, and crashes.
            thread.join()


STUCK_S = 30


@contextlib.contextmanager
def dying_when_stuck() -> Iterator[None]:
    """Have the kernel kill this process with SIGALRM if the block takes longer than `STUCK_S`. Use
    it for gRPC, which may hang in native code if the system refuses threads."""
    signal.alarm(STUCK_S)
    try:
        yield
    finally:
        signal.alarm(0)


def name_limit(error: BaseException) -> str:
    """Return the text of an error. If no thread could be started, name the limit."""
    text = str(error)
    return f"{text}: {find_limit()}" if text == "can't start new thread" else text


def find_limit() -> str:
    """Return text with the name and value of the lowest limit on processes and threads."""
    import resource

    limits = {"ulimit -u": resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else -1}
    files = [Path("/proc/sys/kernel/threads-max")]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            folder = Path("/sys/fs/cgroup", "pids" if controllers else "", group.lstrip("/"))
            files += [each / "pids.max" for each in (folder, *folder.parents)]
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # "max" means unlimited.
            limits[str(file)] = int(file.read_text())
    value, name = min((value, name) for name, value in limits.items() if value >= 0)
    return f"the limit of processes and threads ({name}) is {value}"


def signal_name(signum: int) -> str:
    """Return "SIGKILL" for 9, or "signal 70" for a signal without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_end(status: int) -> str:
    """Describe a wait status: "was killed by SIGKILL", "ended with exit code 1"."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def _read_status_kib(pid: int, field: str) -> int:
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open(f"/proc/{pid}/status") as status,
    ):
        for line in status:
            if line.startswith(field):
                return int(line.split()[1])
    return 0


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if unknown."""
    return _read_status_kib(pid, "VmRSS:") * 1024


def high_water_bytes(pid: int) -> int:
    """Return the largest resident memory of a process so far; 0 if unknown."""
    return _read_status_kib(pid, "VmHWM:") * 1024


def is_stopped(pid: int) -> bool:
    """True if a signal (SIGSTOP, SIGTSTP) or a debugger holds the process."""
    return state(pid) in ("T", "t")


def cpu_s(pid: int) -> float:
    """Return the seconds of processor time of a process and its reaped children; 0.0 if unknown."""
    ticks = map(int, _read_stat(pid)[11:15])
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def main_thread_ns(pid: int, proc: Path = Path("/proc")) -> tuple[int, int] | None:
    """Return the nanoseconds in which the main thread has run, and in which it has waited for a
    processor; None if unknown.

    The numbers do not grow while the thread sleeps or waits in native code.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        ran, waited, *_ = _read(f"{proc}/{pid}/task/{pid}/schedstat").split()
        return int(ran), int(waited)
    return None


def starved_s(pid: int) -> float:
    """Return the total seconds that a process's threads waited for a processor; 0.0 if unknown."""
    waited_ns = 0
    for thread in _list_threads(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited_ns += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1])
    return waited_ns / 1e9
