"""What every test gets: a home of its own, and a look at what it left running.

In: pytest's requests. Out: fixtures. Called by pytest.

No test touches the developer's own jobs, cache or settings: `KINETIC_HOME` and its relatives point
into one folder that goes away at the end. Its path is short, because Unix sockets lie in job
folders and a socket's path has at most 107 bytes.
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

# A shell that starts the tests in the background lets them ignore Ctrl-C, nohup the end of a
# terminal, and every program that they start inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine makes an example slow, not wrong. Each run draws other examples: many runs find
# what one with many would.
hypothesis.settings.register_profile(
    "patient",
    max_examples=50,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("patient")

SETTLE_S = 3.0
"""How long what a test started may take to be gone, where nothing resists: the promise itself."""
POLL_S = 0.05

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 8 << 30
"""Four times what a run of all tests leaves until its end."""

_numbers = itertools.count()


def pytest_configure() -> None:
    """Let `tmp_path` lie where `playground` does."""
    if _is_in_memory():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: they took a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _is_in_memory() -> bool:
    """Whether what tests write is to lie in memory: there is plenty, and nobody said where else."""
    named = os.environ.keys() & {"TMPDIR", "KINETIC_TEST_KUBECONFIG"}  # Pods have their own memory.
    return not named and _has_room(MEMORY, MEMORY_BYTES)


def _has_room(folder: Path, size: int) -> bool:
    """Whether this folder and memory have this much to spare."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        stat = os.statvfs(folder)
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return size <= min(stat.f_bavail * stat.f_frsize, free_kib * 1024)
    return False


@pytest.fixture(scope="session")
def playground() -> Iterator[Path]:
    """The folder below which everything lies that the tests of this run make. Its path marks every
    process that they start.

    Jobs make and remove some 200,000 small files, and ext4 needs a millisecond for a new one where
    many were removed within the last minute: they lie in memory, where there is plenty.
    """
    folder = Path(tempfile.mkdtemp(prefix="kn-", dir=MEMORY if _is_in_memory() else None))
    (folder / "tmp").mkdir()
    yield folder
    for job in folder.glob("*/*/jobs/*"):
        memory_folder.remove(job.name)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, playground: Path) -> Iterator[Path]:
    """A home without jobs, made when something writes to it; no setting of the developer's
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
        # reaches every process that is started, also those that get no KINETIC_ variable
        "TMPDIR": str(playground / "tmp"),
    }
    yield folder / "home"
    if not folder.is_relative_to(playground):
        for job in folder.glob("*/jobs/*"):
            memory_folder.remove(job.name)
        shutil.rmtree(folder, ignore_errors=True)
    os.environ.clear()
    os.environ |= before
    # What interrupted tests would say at the end of this process.
    if "kinetic._client.board.console" in sys.modules:
        atexit.unregister(sys.modules["kinetic._client.board.console"]._print_unless_shown)


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest, playground: Path) -> Callable[[], None]:
    """A check that no process of the test's own still runs, which ends those that do.

    They may run for `SETTLE_S` more, which is what users are promised after any death. What takes
    longer for a reason (a function that is cancelled and resists has its grace period) says so:
    `@pytest.mark.settles_within(seconds)`. How long it took is reported as the property
    `settled_s`. Waiting ends at once when nothing is left; and only time in which this process
    itself ran counts, so that a machine that is slow or held up makes the limit longer, not the
    test fail.
    """
    mark = request.node.get_closest_marker("settles_within")

    def check() -> None:
        left, took_s = _settled(playground, mark.args[0] if mark else SETTLE_S)
        request.node.user_properties.append(("settled_s", round(took_s, 2)))
        for pid in left:  # so that it does not also fail every test after this one
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if left:
            pytest.fail(
                "still running after the test:\n"
                + "\n".join(f"  {pid}: {line}" for pid, line in sorted(left.items()))
            )

    return check


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """A folder as `tmp_path`, in which data can be mounted: that may lie below /dev."""
    with tempfile.TemporaryDirectory(prefix="kn-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_leftovers(
    request: pytest.FixtureRequest, home: Path, nothing_left: Callable[[], None]
) -> Iterator[None]:
    """Fail a system test after which a process of its own still runs."""
    yield
    if "system" in request.path.parts:
        nothing_left()


def _settled(playground: Path, limit_s: float) -> tuple[dict[int, str], float]:
    """What still runs once it had the time to end, and how long that took. Waits by the clock: it
    watches real processes."""
    begun, counted_s = time.monotonic(), 0.0
    while (left := marked_processes(playground)) and counted_s < limit_s:
        while any(map(_runs, left)) and counted_s < limit_s:
            looked_at = time.monotonic()
            time.sleep(POLL_S)
            counted_s += min(time.monotonic() - looked_at, 2 * POLL_S)
    return left, time.monotonic() - begun


def _runs(pid: int) -> bool:
    """Whether a process has not ended; one that is not reaped yet has no command line."""
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def marked_processes(playground: Path) -> dict[int, str]:
    """Processes that carry the playground's path in their environment, or in the command line if
    nobody else has started them, who may look at a file there. Without this one and what starts
    processes for it: its zygote, the double of a cluster."""
    mark = os.fsencode(playground)
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            inherits = mark in (entry / "environ").read_bytes()
            is_ours = inherits or (mark in command and _parent(entry) in (1, os.getpid(), *found))
            if is_ours and not _is_own(entry, command):
                found[int(entry.name)] = (
                    command.replace(b"\0", b" ").decode(errors="replace").strip()
                )
        except OSError:  # it ended while we looked, or is somebody else's
            continue
    # a zombie has no command line: it has ended
    return {pid: line for pid, line in found.items() if line}


def _is_own(entry: Path, command: bytes) -> bool:
    """Whether this starts the test process's hosts, and lives as long as it: the zygote of its
    jobs, the container runtimes of its clusters."""
    parent = _parent(entry)
    if b"tests/doubles/cluster/shim.py" in command:
        return os.getpid() in (parent, _parent(Path("/proc", str(parent))))
    return parent == os.getpid() and b"kinetic/_host/local/__main__.py" in command


def _parent(entry: Path) -> int:
    return int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
