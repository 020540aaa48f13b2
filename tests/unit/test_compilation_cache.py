"""JAX's compilation cache in the store, which private interfaces of JAX set up. The tests use real
processes and real compilations.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from forks import Forks

IMPORTS = """
import os, sys
import jax
from jax._src import distributed
from kinetic._host.worker import compilation_cache, joining
"""
AS_WORKERS_END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
"""The end of each program: `os._exit`, because a thread may still be closing a client of JAX."""
COMPILES = """
    store, process, *own = sys.argv[1:]
    jax.devices()  # Programs for TPUs are the same in all processes: so are these of one device.
    distributed.global_state.process_id = int(process)
    compilation_cache.attach(store, keeps_all=True)
    if own:
        jax.config.update("jax_compilation_cache_dir", own[0])
    print(float(jax.jit(lambda x: x + 1)(1.0)), compilation_cache.take_savings()["cache_hits"])
"""
"""A program of process `process` of a gang, which compiles; `own` is the user's own folder."""


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


@pytest.fixture
def store(tmp_path):
    """The folder of a store."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    return folder


def count_executables(store):
    return sum(1 for path in (store / "executables").rglob("*") if path.is_file())


@pytest.mark.starts_processes
def test_only_process_0_writes_and_all_read(begin, store):
    """Process 1 compiles and writes nothing. Process 0 does the same and writes; then both find the
    programs."""
    assert begin(COMPILES, str(store), "1")() == ("2.0 0\n", "")
    assert count_executables(store) == 0
    assert begin(COMPILES, str(store), "0")() == ("2.0 0\n", "")
    written = count_executables(store)
    assert written > 0
    for process in ("0", "1"):
        assert begin(COMPILES, str(store), process)() == (f"2.0 {written}\n", "")


def test_every_process_of_a_simulated_gang_writes(begin, store):
    """Process 1 writes to the cache, although JAX reserves that to process 0: its programs for
    processors are not those of process 0."""
    allow = "    print(joining.write_from_all_processes(), joining.write_from_all_processes())"
    assert begin(allow + COMPILES, str(store), "1")()[0] == "True True\n2.0 0\n"
    assert count_executables(store) > 0


@pytest.mark.starts_processes
def test_a_process_that_imports_jax_itself_has_the_cache(store):
    """JAX is not preloaded, as on Ray: it gets the cache while it is still being imported."""
    code = """
        import sys
        from kinetic._host.worker import compilation_cache
        from kinetic._host.worker.startup.kinetic_awaiting import Awaiting
        attach = lambda: compilation_cache.attach(sys.argv[1], keeps_all=True)
        sys.meta_path.insert(0, Awaiting("jax.distributed", attach))
        import jax
        jax.jit(lambda x: x + 1)(1.0)
    """
    program = [sys.executable, "-c", textwrap.dedent(code), str(store)]
    subprocess.run(program, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    assert count_executables(store) > 0


def test_a_folder_of_the_user_goes_first(begin, store, tmp_path):
    """The function sets a folder of its own for JAX's cache: nothing goes to the store."""
    begin(COMPILES, str(store), "0", str(tmp_path / "own"))()
    assert list((tmp_path / "own").iterdir())
    assert count_executables(store) == 0


def test_a_damaged_executable_is_compiled_again_and_replaced(begin, store):
    """An object in the store is no executable: JAX warns, compiles, and writes it anew."""
    begin(COMPILES, str(store), "0")()
    (file, *_) = sorted(p for p in (store / "executables").rglob("*") if p.is_file())
    file.write_bytes(b"damaged")
    assert begin(COMPILES, str(store), "0")()[0].startswith("2.0 ")
    assert file.read_bytes() != b"damaged"
    assert begin(COMPILES, str(store), "0")()[1] == ""


def test_a_store_that_fails_costs_one_line(begin, tmp_path):
    """The store was removed: JAX compiles, and the host says once that nothing is cached."""
    output, error = begin(COMPILES, str(tmp_path / "removed"), "0")()
    assert output == "2.0 0\n"
    assert error.count("\n") == 1
    assert "this host compiles without the cache in the store" in error
    assert not (tmp_path / "removed").exists()


def test_a_store_that_does_not_answer_stalls_no_compilation(begin, monkeypatch):
    """A bucket accepts connections and never answers: JAX compiles after the time limit, once."""
    pytest.importorskip("google.cloud.storage")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        limit = "    vars(compilation_cache).update(PATIENCE_S=0.5)\n"
        code = f"{limit}    os.environ['STORAGE_EMULATOR_HOST'] = {uri!r}{COMPILES}"
        output, error = begin(code, "gs://bucket", "0")()
    assert output == "2.0 0\n"
    assert error.count("without the cache") == error.count("did not answer within 0 s") == 1
