"""Facts about processes and ways to end them, from the kernel.

In: process ids. Out: numbers; processes that have ended. All of it works on Linux; elsewhere calls
that need Linux answer "unknown", and the pipes between the processes do the work.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
DISK_RESERVE = "reserve"
"""File in the scratch folder of a job on this machine. When the function has filled the disk, it is
freed by halves for small values, reports and outcomes of attempts; its removal makes room for the
verdict."""
RESERVED_BYTES = 1 << 19
_EXEC_POLL_S, _EXEC_POLLS = 0.002, 2000


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; end at once if the parent is already
    gone."""
    if _LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


@contextlib.contextmanager
def dying_with(parent_pid: int) -> Iterator[None]:
    """Die with the parent while the block runs; afterwards live on, to clean up. 0 means no
    parent."""
    if parent_pid:
        die_with_parent(parent_pid)
    try:
        yield
    finally:
        if parent_pid and _LINUX:
            _prctl(_PR_SET_PDEATHSIG, 0)


def exit_with(act: Callable[[], int]) -> NoReturn:
    """End this process, which was forked, with the exit code that `act` returns, or 70: never
    return into the code of the process that forked it."""
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
    """Take a signal, which may be blocked: `act` is called in the main thread as soon as that runs
    Python code; the descriptor that is returned becomes readable at once. It is always the same
    one: who takes the signal next finds what nobody has read."""
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
    """Become the parent of every descendant whose own parent dies, so that none escapes."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


_PRECEDENCE = 5
_ordinary: list[int] = []
"""The nice value before this process, or the one that it is a fork of, took precedence."""


def take_precedence() -> None:
    """Run before the threads of functions, where the system permits it (root, RLIMIT_NICE): what
    watches over them must not starve behind them."""
    if not _ordinary:
        _ordinary.append(os.getpriority(os.PRIO_PROCESS, 0))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _ordinary[0] - _PRECEDENCE)


def yield_precedence() -> None:
    """Run as what this job was started by. In a session of its own, since the kernel shares
    processors out between sessions first (autogroup)."""
    os.setsid()
    for ordinary in _ordinary:
        os.setpriority(os.PRIO_PROCESS, 0, ordinary)


def set_title(title: str) -> None:
    """Show `title` in process lists instead of the command line that the process was forked
    from."""
    import setproctitle

    setproctitle.setproctitle(title)


def raise_file_limit() -> None:
    """Raise the limit on open files to the system's: a large gang has a connection per host."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve_disk(path: Path) -> None:
    """Reserve `RESERVED_BYTES` of disk space, if there is any, until the file is removed."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if sys.platform == "linux":
                os.posix_fallocate(fd, 0, RESERVED_BYTES)
        finally:
            os.close(fd)


def free_half(path: Path) -> None:
    """Free half of what is reserved: others may need the rest."""
    with contextlib.suppress(OSError):
        os.truncate(path, path.stat().st_size // 2)


def _prctl(option: int, value: int) -> None:
    from kinetic._system.libc import LIBC  # few need it

    LIBC.prctl(option, value, 0, 0, 0)


def threads(pid: int) -> int:
    """How many threads a process has; 0 if it is gone, or unknown."""
    return len(_threads_of(pid))


def _threads_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


def children(pid: int) -> list[int]:
    """Direct children of a process, of all its threads; [] if it is gone."""
    pids: list[int] = []
    for thread in _threads_of(pid):
        with contextlib.suppress(OSError):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return pids


def descendants(pid: int) -> list[int]:
    """All processes below a process, parents first."""
    pids, todo = [], [pid]
    while todo:
        below = children(todo.pop())
        pids += below
        todo += below
    return pids


def kill(pid: int, signum: int) -> bool:
    """Send a signal; return whether the process was there."""
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_thread(pid: int, thread: int, signum: int) -> bool:
    """Send a signal to one thread of a process; return whether it was there."""
    from kinetic._system.libc import LIBC

    return bool(LIBC.tgkill(pid, thread, signum) == 0)


def kill_descendants(limit_s: float = 2.0, keep: Iterable[int] = ()) -> int:
    """Kill and reap all descendants of this process until none is left or the time is up; return
    how many are left.

    The caller must have called `adopt_orphans`, so that orphans stay among the descendants.
    """
    spared = set(keep)
    deadline = time.monotonic() + limit_s
    while True:
        remaining = [pid for pid in descendants(os.getpid()) if pid not in spared]
        if not remaining or time.monotonic() > deadline:
            return len(remaining)
        for pid in remaining:
            kill(pid, signal.SIGKILL)
        _reap(remaining)
        time.sleep(0.001)


def await_leaving(limit_s: float, keep: Iterable[int] = ()) -> list[int]:
    """Wait until this process has no living descendants but those to keep, or the time is up;
    return those left. Reaps the others."""
    spared = set(keep)
    deadline = time.monotonic() + limit_s
    while True:
        below = [pid for pid in descendants(os.getpid()) if pid not in spared]
        _reap(below)
        remaining = [pid for pid in below if state(pid) not in ("", "Z", "X")]
        if not remaining or time.monotonic() >= deadline:
            return remaining
        time.sleep(0.002)


def state(pid: int) -> str:
    """The kernel's letter for what the process does ("R", "S", "Z", ...); "" when it is gone."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def read_start(pid: int) -> str:
    """Return when the process started, in ticks since the system did: its id and this name it. ""
    when it has ended."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; [] when the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def name(pid: int) -> str:
    """The kernel's name of the process: the beginning of its program's name; "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def age_s(pid: int) -> float:
    """For how long the process has run; 0.0 if unknown."""
    fields = _stat(pid)
    with contextlib.suppress(OSError, ValueError):
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return uptime_s - int(fields[19]) / os.sysconf("SC_CLK_TCK") if fields else 0.0
    return 0.0


def owner(pid: int) -> int:
    """The user whose process it is.

    Raises:
        OSError: it is gone.
    """
    return Path(f"/proc/{pid}").stat().st_uid


def all_pids() -> list[int]:
    """The ids of all processes."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return []


def environ(pid: int) -> bytes:
    """The environment that a process was started with, with zero bytes between the variables.

    Raises:
        OSError: it is gone, or another user's.
    """
    return Path(f"/proc/{pid}/environ").read_bytes()


def command_line(pid: int) -> bytes:
    """The command line of a process, with zero bytes between the words.

    Raises:
        OSError: it is gone.
    """
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def lasting_command_line(pid: int) -> bytes:
    """The command line of a process, which is empty for a moment while it becomes another program
    (exec).

    Raises:
        OSError: it is gone, or runs no program: a zombie, the kernel's own.
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
    """Fork; the error where no more processes are allowed names the limit."""
    try:
        return os.fork()
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, f"{error.strerror}: {find_limit()}") from None


def check_threads(number: int = 8) -> None:
    """Start so many threads, and end them: gRPC, which needs about as many, never answers where it
    can start none.

    Raises:
        BlockingIOError: no more threads are allowed; names the limit.
    """
    import threading

    gate = threading.Event()
    try:
        for _ in range(number):
            threading.Thread(target=gate.wait, daemon=True).start()
    except RuntimeError as error:
        raise BlockingIOError(errno.EAGAIN, name_limit(error)) from None
    finally:
        gate.set()


STUCK_S = 30


@contextlib.contextmanager
def dying_when_stuck() -> Iterator[None]:
    """Have the kernel kill this process, by SIGALRM, if the block does not end: below Python, gRPC
    may wait for ever where the system makes no threads."""
    signal.alarm(STUCK_S)
    try:
        yield
    finally:
        signal.alarm(0)


def name_limit(error: BaseException) -> str:
    """Return the text of an error; that of a thread that cannot be started names the limit."""
    text = str(error)
    return f"{text}: {find_limit()}" if text == "can't start new thread" else text


def find_limit() -> str:
    """Name the lowest limit of processes and threads that holds here, with its value."""
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
    """ "SIGKILL" for 9; "signal 70" for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_end(status: int) -> str:
    """Say what a wait status says: "was killed by SIGKILL", "ended with exit code 1"."""
    if os.WIFSIGNALED(status):
        return f"was killed by {signal_name(os.WTERMSIG(status))}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def _status_kib(pid: int, field: str) -> int:
    with (
        contextlib.suppress(OSError, ValueError, IndexError),
        open(f"/proc/{pid}/status") as status,
    ):
        for line in status:
            if line.startswith(field):
                return int(line.split()[1])
    return 0


def rss_bytes(pid: int) -> int:
    """Resident memory now; 0 if unknown."""
    return _status_kib(pid, "VmRSS:") * 1024


def high_water_bytes(pid: int) -> int:
    """Largest resident memory so far; 0 if unknown."""
    return _status_kib(pid, "VmHWM:") * 1024


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, SIGTSTP) holds the process, or a debugger does."""
    return state(pid) in ("T", "t")


def cpu_s(pid: int) -> float:
    """Processor time of the whole process so far, and of its children that have ended, user and
    system; 0.0 if unknown."""
    ticks = map(int, _stat(pid)[11:15])
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def main_thread_ns(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Time in which the main thread has run, or has waited for a processor, nanoseconds; None if
    unknown.

    A thread that sleeps or waits in native code uses exactly none; one that steps through a
    training loop always uses some, or would on a machine that is less busy.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        ran, waited, *_ = (proc / f"{pid}/task/{pid}/schedstat").read_text().split()
        return int(ran) + int(waited)
    return None


def starved_s(pid: int) -> float:
    """For how long the threads of a process have waited for a processor, all together; 0.0 if
    unknown."""
    waited_ns = 0
    for thread in _threads_of(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1])
    return waited_ns / 1e9
