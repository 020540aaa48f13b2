"""Fixtures of all tests: a home folder for each test, and a check for processes that a test leaves.

No test touches the developer's own jobs, cache or settings: `KINETIC_HOME` and similar variables
point into one folder that is removed at the end. Its path is short, because job folders contain
Unix sockets, and a socket's path has at most 107 bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
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

# A busy machine makes an example slow, not wrong, so examples have no deadline. Each run draws new
# examples, so that many short runs find as much as one long run.
hypothesis.settings.register_profile(
    "patient",
    max_examples=50,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")

SETTLE_S = 3.0
"""Seconds within which all processes of a test must end, as users are promised."""
POLL_S = 0.05

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 8 << 30
"""Free bytes in memory that a run needs: four times the size of all files of the whole suite."""

_numbers = itertools.count()


def pytest_configure() -> None:
    """Put `tmp_path` on the same file system as `playground`."""
    if _is_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """Keep imported objects out of garbage collections, which took a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _is_in_memory() -> bool:
    """True if tests write to memory: enough of it is free, and no variable names another folder."""
    named = os.environ.keys() & {"TMPDIR", "KINETIC_TEST_KUBECONFIG"}  # not in pods
    return not named and _has_room(MEMORY, MEMORY_BYTES)


def _has_room(folder: Path, size: int) -> bool:
    """True if the folder's file system and the machine's memory have `size` bytes free."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        stat = os.statvfs(folder)
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return size <= min(stat.f_bavail * stat.f_frsize, free_kib * 1024)
    return False


@pytest.fixture(scope="session")
def playground() -> Iterator[Path]:
    """The folder of all files of this run. Its path marks every process that the tests start.

    Jobs create and remove some 200,000 small files. ext4 is slow at that: a new file takes it a
    millisecond after many removals. So the folder is in memory if enough is free.
    """
    folder = Path(tempfile.mkdtemp(prefix="kn-", dir=MEMORY if _is_in_memory() else None))
    (folder / "tmp").mkdir()
    yield folder
    for job in folder.glob("*/*/jobs/*"):
        memory_folder.remove(job.name)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, playground: Path) -> Iterator[Path]:
    """The path of a home folder without jobs, which need not exist yet. All settings in the
    developer's environment are removed for the test."""
    before = dict(os.environ)
    folder = playground / str(next(_numbers))
    on_pods = any(map(request.node.get_closest_marker, ("kubernetes", "double")))
    if on_pods and folder.is_relative_to(MEMORY):
        folder = Path(tempfile.mkdtemp(prefix="kn-", dir="/tmp"))  # Pods have another /dev/shm.
    others = {"GOOGLE_CLOUD_PROJECT", "TERM"}
    for name in [n for n in os.environ if n.startswith("KINETIC_") or n in others]:
        del os.environ[name]
    os.environ |= {
        "KINETIC_HOME": str(folder / "home"),
        "KINETIC_CACHE_DIR": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        # TMPDIR reaches every process, even those that get no KINETIC_ variable.
        "TMPDIR": str(playground / "tmp"),
    }
    yield folder / "home"
    if not folder.is_relative_to(playground):
        for job in folder.glob("*/jobs/*"):
            memory_folder.remove(job.name)
        shutil.rmtree(folder, ignore_errors=True)
    os.environ.clear()
    os.environ |= before
    # Forget the consoles of interrupted tests: they would be printed at the end of this process.
    if "kinetic._client.board.console" in sys.modules:
        atexit.unregister(sys.modules["kinetic._client.board.console"]._print_unless_shown)


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest, playground: Path) -> Callable[[], None]:
    """A function that kills all processes of the test which still run, and fails if there are any.

    Processes may take `SETTLE_S` to end, as users are promised after any death. A test marked with
    `@pytest.mark.settles_within(seconds)` allows more time, for example the grace period of a
    cancelled function. The JUnit property `settled_s` is the time taken in seconds. Only time in
    which this process itself ran counts towards the limit, so that a slow machine fails no test.
    """
    mark = request.node.get_closest_marker("settles_within")

    def check() -> None:
        running, took_s = _await_processes(playground, mark.args[0] if mark else SETTLE_S)
        request.node.user_properties.append(("settled_s", round(took_s, 2)))
        for pid in running:  # Left running, they would fail every later test.
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
    """A folder on a disk, in which data can be mounted; `tmp_path` may be below /dev."""
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
    """Wait until all marked processes have ended, or for `limit_s`. Return the command lines of
    those that still run, by pid, and the seconds waited."""
    begun, counted_s = time.monotonic(), 0.0
    while (running := marked_processes(playground)) and counted_s < limit_s:
        while any(map(_runs, running)) and counted_s < limit_s:
            slept_at = time.monotonic()
            time.sleep(POLL_S)
            counted_s += min(time.monotonic() - slept_at, 2 * POLL_S)
    return running, time.monotonic() - begun


def _runs(pid: int) -> bool:
    """True if a process has not ended. Ended processes have no command line, even before their
    parent has reaped them."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def marked_processes(playground: Path) -> dict[int, str]:
    """Return the command lines of processes that belong to the tests, by process id.

    Such a process has the playground's path in its environment, or in its command line if the tests
    have started it: a developer's own command may name a file of the playground. Servers of this
    process are left out: the zygote of its jobs, the double of a cluster.
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
        except OSError:  # It has just ended, or is another user's.
            continue
    # Leave out processes that have ended and are not yet reaped: they have no command line.
    return {pid: line for pid, line in commands.items() if line}


def _is_server(entry: Path, command: bytes) -> bool:
    """True if the process starts hosts for the test process and lives as long as the tests: the
    zygote of local jobs, or a container runtime of test clusters."""
    parent = _parent(entry)
    if b"tests/doubles/cluster/shim.py" in command:
        return os.getpid() in (parent, _parent(Path("/proc", str(parent))))
    return parent == os.getpid() and b"kinetic/_host/local/__main__.py" in command


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
