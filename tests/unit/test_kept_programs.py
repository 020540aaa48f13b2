"""JAX's compilation cache on simulated hosts, which private interfaces of JAX set up: any process
writes to it, and a truncated file is replaced. The tests use real processes.
"""

from __future__ import annotations

import os
import signal
import tempfile
import textwrap
from pathlib import Path

import pytest
from forks import Forks

IMPORTS = """
import os, sys
import jax
from jax._src import distributed
from kinetic._host.worker import joining
"""
AS_WORKERS_END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
"""The end of each program: `os._exit`, because a thread may still be closing a client of JAX."""


@pytest.fixture(scope="module")
def forks():
    with Forks(IMPORTS, JAX_PLATFORMS="cpu", JAX_ENABLE_PREEMPTION_SERVICE="0") as running:
        yield running


@pytest.fixture
def begin(forks, tmp_path):
    """Return `begin`: it starts a program and returns `end`, which waits and returns (out, err)."""
    running = []

    def begin(code, *args):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        pid = forks.start(textwrap.dedent(code) + AS_WORKERS_END, folder, *args)
        running.append(pid)

        def end():
            code = forks.wait(pid)
            running.remove(pid)
            out, err = ((folder / name).read_text() for name in ("out", "err"))
            assert code == 0, err
            return out, err

        return end

    yield begin
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        forks.wait(pid)


COMPILES_AS_PROCESS_1 = """
    distributed.global_state.process_id = 1
    folder = sys.argv[1]
    print(joining.keep_compiled(folder), joining.keep_compiled(folder))
    jax.jit(lambda x: x + 1)(1.0)
    print(any(name.endswith("-cache") for name in os.listdir(folder)))
"""


@pytest.mark.starts_processes
def test_any_process_keeps_what_it_compiles(begin, tmp_path):
    """Process 1 writes to the cache, although JAX reserves that to process 0."""
    output, _ = begin(COMPILES_AS_PROCESS_1, str(tmp_path))()
    assert output.split() == ["True", "True", "True"]


def test_what_a_killed_process_was_writing_is_compiled_again_without_a_warning(begin, tmp_path):
    begin(COMPILES_AS_PROCESS_1, str(tmp_path))()
    last = max(tmp_path.glob("*-cache"), key=lambda path: path.stat().st_mtime_ns)
    whole = last.stat().st_size
    os.truncate(last, whole // 2)
    _, warnings = begin(COMPILES_AS_PROCESS_1, str(tmp_path))()
    assert not warnings
    assert last.stat().st_size > whole // 2
