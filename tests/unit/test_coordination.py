"""The private interfaces of JAX that hosts join one world after the other with: whether this JAX
has them, and what they do.

In: this JAX, and one that has changed; real processes. Out: why it is unknown; worlds that are
joined, left and joined again.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import textwrap
from pathlib import Path

import pytest
from forks import Forks

from kinetic._host.worker import coordination

IMPORTS = """
import os, signal, sys, threading
import jax
from jax._src import distributed, xla_bridge
from jax.experimental import multihost_utils
from kinetic._host.worker import coordination, joining, jaxworld

limits = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 100}
"""
JOINS_TWICE = """
    process, *addresses = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    sums = []
    for address in addresses:
        coordination.connect(address, 2, int(process), limits)
        sums.append(multihost_utils.process_allgather(jax.numpy.ones(1)).sum().item())
        coordination.leave()
    print(sums, jax.process_count(), flush=True)
    os._exit(0)  # As workers do: a thread that ends XLA's client late would abort the process.
"""
WAITS = """
    process, address = sys.argv[1:]
    coordination.connect(address, 2, int(process), limits)
    if process == "1":
        signal.pause()
    else:
        threading.Timer(0.1, coordination.hang_up).start()
        try:
            distributed.global_state.client.wait_at_barrier("nobody else comes", 100_000)
        except Exception as error:
            print("raised", "CANCELLED" in str(error))
"""

CALLS_BETWEEN_WORLDS = """
    def call():
        begun.set()
        jax.numpy.ones(1)
        ended.set()

    jax.devices()
    coordination.hold_backends()
    coordination.leave()
    begun, ended = threading.Event(), threading.Event()
    threading.Thread(target=call).start()
    begun.wait()
    print(ended.wait(1.0), coordination.has_backends())
    alone = joining.World("127.0.0.1:1", 1, 0, 3, "cpu", True)
    jaxworld.enter(alone, "lazy")
    print(ended.wait(), jax.device_count())
"""

LEAVES_ALL = """
    jax.config.update("jax_num_cpu_devices", 2)
    jax.set_mesh(jax.make_mesh((2,), ("x",)))
    jax.config.update("jax_default_device", jax.devices()[1])

    def show(x):
        if x:
            raise ValueError(x)

    @jax.jit
    def fail(x):
        jax.debug.callback(show, x)
        return x

    @jax.jit
    def tell(x):
        jax.debug.print("{}", x, ordered=True)
        return x

    try:
        fail(1.0).block_until_ready()
    except Exception:
        pass
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        tell(0)
    print(coordination.count_shared_arrays(), end=" ")
    coordination.forget_effects()
    print(coordination.count_shared_arrays(), end=" ")
    coordination.leave()
    print(coordination.has_backends(), jax.sharding.get_mesh().empty, jax.config.jax_default_device)
"""


AS_WORKERS_END = """
import os, sys
sys.stdout.flush()
os._exit(0)
"""
"""Without Python's own end, which a thread that still ends a client would not survive."""


def free_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(scope="module")
def forks():
    with Forks(IMPORTS, JAX_PLATFORMS="cpu", JAX_ENABLE_PREEMPTION_SERVICE="0") as running:
        yield running


@pytest.fixture
def begin(forks, tmp_path):
    """Begin a program; return what waits for its end and returns what it printed."""
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
def serve(begin):
    """Serve worlds of two processes, each in a process of its own; return their addresses."""

    def serve(count):
        addresses = [free_address() for _ in range(count)]
        for address in addresses:
            begin("coordination.serve(sys.argv[1], 2, 9)", address)
        return addresses

    return serve


def test_this_jax_is_one_that_we_know():
    """It fails when JAX has changed what we use of it: change `coordination` as well."""
    assert coordination.why_unknown() == ""


def test_a_jax_without_a_parameter_is_unknown(monkeypatch):
    monkeypatch.setitem(coordination.PARAMETERS, coordination.CLIENT, ("address", "no_such"))
    assert coordination.why_unknown().endswith("takes no no_such")


@pytest.mark.parametrize("name", coordination.STATE)
def test_a_jax_without_an_attribute_is_unknown(monkeypatch, name):
    from jax._src import distributed

    state = type("State", (), {each: None for each in coordination.STATE if each != name})()
    monkeypatch.setattr(distributed, "global_state", state)
    assert coordination.why_unknown() == f"JAX has no {name} where it was"


def test_a_process_joins_one_world_after_the_other(serve, begin):
    addresses = serve(2)
    both = [begin(JOINS_TWICE, str(each), *addresses) for each in range(2)]
    said = [end()[0].splitlines()[-1] for end in both]
    assert said == ["[2.0, 2.0] 1"] * 2


def test_effects_and_defaults_end_with_the_world(begin):
    """A mesh that was set would make arrays on the devices of a world that is gone."""
    said, _ = begin(LEAVES_ALL)()
    assert said.splitlines()[-1] == "1 0 False True None"


def test_a_thread_that_calls_for_devices_between_two_worlds_gets_those_of_the_next(begin):
    said, _ = begin(CALLS_BETWEEN_WORLDS)()
    assert said.splitlines() == ["False False", "True 3"]


def test_who_waits_at_a_barrier_is_freed(serve, begin):
    (address,) = serve(1)
    waits, _ = (begin(WAITS, str(each), address) for each in range(2))
    assert waits()[0] == "raised True\n"


ENDS_LATE = """
    class Client:
        def __init__(self):
            self.devices = [self]

        def __del__(self):
            threads.append(threading.get_ident())
            begun.set()
            over.wait()

    threads, begun, over = [], threading.Event(), threading.Event()
    jax.devices()
    xla_bridge._backends["late"] = Client()
    coordination.leave()
    begun.wait()  # On a busy machine, leave() may give up before its thread has begun.
    print(coordination.has_backends(), threads[0] == threading.get_ident(), jax.device_count())
    sys.stdout.flush()
    os._exit(0)  # a thread that runs Python from C++ while the interpreter ends aborts the process
"""


def test_a_client_of_xla_that_does_not_end_keeps_nobody_in_its_world(begin):
    said, _ = begin(ENDS_LATE)()
    assert said == "False False 1\n"


COMPILES_AS_PROCESS_1 = """
    distributed.global_state.process_id = 1
    folder = sys.argv[1]
    print(coordination.keep_compiled(folder), coordination.keep_compiled(folder))
    jax.jit(lambda x: x + 1)(1.0)
    print(any(name.endswith("-cache") for name in os.listdir(folder)))
"""


def test_any_process_keeps_what_it_compiles(begin, tmp_path):
    """Fails when JAX writes its cache in another way."""
    said, _ = begin(COMPILES_AS_PROCESS_1, str(tmp_path))()
    assert said.split() == ["True", "True", "True"]


def test_what_a_killed_process_was_writing_is_compiled_again_without_a_warning(begin, tmp_path):
    begin(COMPILES_AS_PROCESS_1, str(tmp_path))()
    last = max(tmp_path.glob("*-cache"), key=lambda each: each.stat().st_mtime_ns)
    whole = last.stat().st_size
    os.truncate(last, whole // 2)
    _, told = begin(COMPILES_AS_PROCESS_1, str(tmp_path))()
    assert not told
    assert last.stat().st_size > whole // 2
