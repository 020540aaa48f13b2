"""What every test gets: a home of its own, and a look at what it left running.

In: pytest's requests. Out: fixtures. Called by pytest.

No test touches the developer's own jobs, cache or settings: `KINETIC_HOME` and its relatives point into one folder that goes away
at the end. Its path is short, because Unix sockets lie in job folders and a socket's path has at most 107 bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SETTLE_S = 12.0
"""How long what a test started may take to be gone: a cancelled function has 5 s of grace, and a death is noticed soon after."""

_numbers = itertools.count()


@pytest.fixture(scope="session")
def playground() -> Iterator[Path]:
    """The folder below which everything lies that the tests of this run make. Its path marks every process that they start."""
    folder = Path(tempfile.mkdtemp(prefix="kn-"))
    (folder / "tmp").mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def home(playground: Path) -> Iterator[Path]:
    """A home without jobs, made when something writes to it; no setting of the developer's environment remains."""
    before = dict(os.environ)
    folder = playground / str(next(_numbers))
    for name in [n for n in os.environ if n.startswith("KINETIC_") or n == "GOOGLE_CLOUD_PROJECT"]:
        del os.environ[name]
    os.environ |= {
        "KINETIC_HOME": str(folder / "home"),
        "KINETIC_CACHE_DIR": str(folder / "cache"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "TMPDIR": str(playground / "tmp"),  # reaches every process that is started, also those that get no KINETIC_ variable
    }
    yield folder / "home"
    os.environ.clear()
    os.environ |= before


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest, playground: Path, home: Path) -> Iterator[None]:
    """Fail a system test after which a process of its own still runs."""
    yield
    if "system" not in request.path.parts:
        return
    left = _settled(playground)
    for pid in left:  # so that it does not also fail every test after this one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        pytest.fail("still running after the test:\n" + "\n".join(f"  {pid}: {line}" for pid, line in sorted(left.items())))


def _settled(playground: Path) -> dict[int, str]:
    """What still runs once it had the time to end. Waits by the clock, because it watches real processes."""
    deadline = time.monotonic() + SETTLE_S
    while (left := marked_processes(playground)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def marked_processes(playground: Path) -> dict[int, str]:
    """Processes that carry the playground's path in their environment or command line, without this one and its own preloader."""
    mark = os.fsencode(playground)
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self/environ").exists() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if (mark in command or mark in (entry / "environ").read_bytes()) and not _own_preloader(entry, command):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended while we looked, or is somebody else's
            continue
    return {pid: line for pid, line in found.items() if line}  # a zombie has no command line: it has ended


def _own_preloader(entry: Path, command: bytes) -> bool:
    """Whether this is the preloader of the test process, which lives as long as its caller and serves all of its jobs."""
    parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
    return int(parent) == os.getpid() and b"kinetic.runner.preload" in command
