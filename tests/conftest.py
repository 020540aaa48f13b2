"""Fixtures of all tests: a home for each test, and a check for processes that it left running.

No test touches the developer's own jobs, cache or settings: `KINETIC_HOME` and similar variables
point into one folder that is removed at the end. Its path is short, because job folders contain
Unix sockets, and a socket's path has at most 107 bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from kinetic._system import memory_folder

pytest_plugins = ["doubles.cluster.fixtures", "doubles.ray_fixtures"]

# A shell makes background processes ignore Ctrl-C, and nohup makes them ignore the end of a
# terminal. All programs that the tests start would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine makes an example slow, not wrong. Each run draws other examples, so that many short
# runs find as much as one long run.
hypothesis.settings.register_profile(
    "patient",
    max_examples=50,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")

SETTLE_S = 3.0
"""Seconds in which processes of a test must end unless they resist, as promised to users."""
POLL_S = 0.05

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 8 << 30
"""Four times the size of the files of a run of all tests."""

_numbers = itertools.count()


def pytest_configure() -> None:
    """Put `tmp_path` on the same file system as `playground`."""
    if _is_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collections, which took a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _is_in_memory() -> bool:
    """True if tests write to memory: it has room, and no variable names another folder."""
    named = os.environ.keys() & {"TMPDIR", "KINETIC_TEST_KUBECONFIG"}  # Pods have their own memory.
    return not named and _has_room(MEMORY, MEMORY_BYTES)


def _has_room(folder: Path, size: int) -> bool:
    """True if the folder and memory have this many free bytes."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        stat = os.statvfs(folder)
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return size <= min(stat.f_bavail * stat.f_frsize, free_kib * 1024)
    return False


@pytest.fixture(scope="session")
def playground() -> Iterator[Path]:
    """The folder of all files of this run. Its path marks every process that the tests start.

    Jobs create and remove some 200,000 small files, and ext4 needs a millisecond for a new file if
    many were removed within the last minute. So the folder is in memory if it has room.
    """
    folder = Path(tempfile.mkdtemp(prefix="kn-", dir=MEMORY if _is_in_memory() else None))
    (folder / "tmp").mkdir()
    yield folder
    for job in folder.glob("*/*/jobs/*"):
        memory_folder.remove(job.name)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, playground: Path) -> Iterator[Path]:
    """The path of a home without jobs, which need not exist yet. No setting of the developer's
    environment remains."""
    before = dict(os.environ)
    folder = playground / str(next(_numbers))
    on_pods = any(map(request.node.get_closest_marker, ("kubernetes", "double")))
    if on_pods and folder.is_relative_to(MEMORY):
        folder = Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp"))  # Pods mount their own memory.
    others = {"GOOGLE_CLOUD_PROJECT", "TERM"}
    for name in [n for n in os.environ if n.startswith("KINETIC_") or n in others]:
        del os.environ[name]
    os.environ |= {
        "KINETIC_HOME": str(folder / "home"),
        "KINETIC_CACHE_DIR": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        # This reaches every process, even those that get no KINETIC_ variable.
        "TMPDIR": str(playground / "tmp"),
    }
    # Jobs get the handlers of their caller, and a library in another test may have added one.
    for handler in logging.root.handlers[:]:
        if not type(handler).__module__.startswith("_pytest"):
            logging.root.removeHandler(handler)
    yield folder / "home"
    if not folder.is_relative_to(playground):
        for job in folder.glob("*/jobs/*"):
            memory_folder.remove(job.name)
        shutil.rmtree(folder, ignore_errors=True)
    os.environ.clear()
    os.environ |= before
    # Interrupted tests would print their consoles at the end of this process.
    if "kinetic._client.board.console" in sys.modules:
        atexit.unregister(sys.modules["kinetic._client.board.console"]._print_unless_shown)


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest, playground: Path) -> Callable[[], None]:
    """A check that kills all processes of the test that still run, and fails if there are any.

    They may run for `SETTLE_S` more, which is the promise to users after any death. A test whose
    processes may take longer (a cancelled function that resists has its grace period) is marked
    with `@pytest.mark.settles_within(seconds)`. The property `settled_s` reports the time taken.
    Only time in which this process itself ran counts, so that a slow machine makes the limit
    longer, and does not fail the test.
    """
    mark = request.node.get_closest_marker("settles_within")

    def check() -> None:
        running, took_s = _await_processes(playground, mark.args[0] if mark else SETTLE_S)
        request.node.user_properties.append(("settled_s", round(took_s, 2)))
        for pid in running:  # They would fail every later test as well.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if running:
            pytest.fail(
                "still running after the test:\n"
                + "\n".join(f"  {pid}: {line}" for pid, line in sorted(running.items()))
            )

    return check


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder in which data can be mounted, unlike `tmp_path`, which may be below /dev."""
    with tempfile.TemporaryDirectory(prefix="kn-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_leftovers(
    request: pytest.FixtureRequest, home: Path, nothing_left: Callable[[], None]
) -> Iterator[None]:
    """Fail a system test whose processes still run after it."""
    yield
    if "system" in request.path.parts:
        nothing_left()


def _await_processes(playground: Path, limit_s: float) -> tuple[dict[int, str], float]:
    """Wait until all marked processes have ended or the time is up. Return those that still run,
    and the seconds waited."""
    begun, counted_s = time.monotonic(), 0.0
    while (running := marked_processes(playground)) and counted_s < limit_s:
        while any(map(_runs, running)) and counted_s < limit_s:
            slept_at = time.monotonic()
            time.sleep(POLL_S)
            counted_s += min(time.monotonic() - slept_at, 2 * POLL_S)
    return running, time.monotonic() - begun


def _runs(pid: int) -> bool:
    """True if a process has not ended. One that has not been reaped has no command line."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def marked_processes(playground: Path) -> dict[int, str]:
    """Return the command lines of processes that belong to the tests, by process id.

    Such a process has the playground's path in its environment, or in its command line if the
    tests have started it; a developer's own command may name a file of the playground. This process
    and its servers are left out: its zygote, the double of a cluster.
    """
    mark = os.fsencode(playground)
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            inherits = mark in (entry / "environ").read_bytes()
            starters = (1, os.getpid(), *commands)
            is_marked = inherits or (mark in command and _parent(entry) in starters)
            if is_marked and not _is_server(entry, command):
                commands[int(entry.name)] = (
                    command.replace(b"\0", b" ").decode(errors="replace").strip()
                )
        except OSError:  # The process has just ended, or is another user's.
            continue
    # A zombie has ended, and has no command line.
    return {pid: line for pid, line in commands.items() if line}


def _is_server(entry: Path, command: bytes) -> bool:
    """True if the process starts hosts for the test process and lives as long as that: the zygote
    of its jobs, or a container runtime of its clusters."""
    parent = _parent(entry)
    if b"tests/doubles/cluster/shim.py" in command:
        return os.getpid() in (parent, _parent(Path("/proc", str(parent))))
    return parent == os.getpid() and b"kinetic/_host/local/__main__.py" in command


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
