"""Workers under Pathways compute on the devices that its proxy offers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from forks import Forks

from kinetic._host.worker import jaxworld
from kinetic._host.worker.joining import World

IMPORTS = """
import json
from jax.extend.backend import ifrt_proxy
from jax._src import xla_bridge
from kinetic._host.worker import jaxworld
from kinetic._host.worker.joining import World
"""
WORKER = """
world = World(**json.loads(sys.argv[1]))
jaxworld.enter(world, json.loads(sys.argv[2]))
import jax

print(len(jax.devices()), jax.process_count(), jax.config.jax_enable_compilation_cache)
"""
STAND_IN = """
def get_client(target, options):
    print(target, options.connection_timeout_in_seconds, flush=True)
    {instead}
    return xla_bridge.make_cpu_client()

ifrt_proxy.get_client = get_client
"""
"""A client of CPU devices instead of the proxy's devices: Pathways' servers are not public."""
WORLD = World("127.0.0.1:1", 1, 0, 8, "proxy", simulated=False, limit_s=60.0)


@pytest.fixture(scope="module")
def forks():
    base = {"JAX_BACKEND_TARGET": "grpc://localhost:29000"}
    env = jaxworld.environ(WORLD, base, {"JAX_NUM_CPU_DEVICES": "8"}, automatic=False)
    with Forks(IMPORTS, **env) as running:
        yield running


@pytest.fixture
def run_worker(forks, tmp_path):
    """A function that runs a worker and returns its output: `out` and `err`."""

    def run(world=WORLD, joins="lazy", *, instead="", before=""):
        program = before + STAND_IN.format(instead=instead) + WORKER
        forks.start(program, tmp_path, json.dumps(world.to_json()), json.dumps(joins))
        forks.wait()
        return SimpleNamespace(**{s: (tmp_path / s).read_text() for s in ("out", "err")})

    return run


@pytest.mark.starts_processes
def test_a_worker_has_the_devices_behind_the_proxy(run_worker):
    done = run_worker()
    assert done.out == "grpc://localhost:29000 60\n8 1 False\n", done.err


def test_a_worker_waits_until_all_devices_are_there(run_worker):
    done = run_worker(replace(WORLD, devices=16))
    assert "Pathways has 8 devices, and the job asked for 16" in done.err
    done = run_worker(instead="raise RuntimeError('UNAVAILABLE: no proxy')")
    assert "JoinError: Pathways cannot be reached: " in done.err
    assert "no proxy" in done.err


def test_a_program_of_its_own_is_not_connected_twice(run_worker):
    done = run_worker(joins="program", instead="raise RuntimeError('connected')")
    assert "connected" not in done.out
    assert "proxy" in done.err, "and what runs here has not been told of Pathways"


def test_a_worker_without_pathways_says_what_is_missing(run_worker):
    before = "sys.modules['pathwaysutils'] = None\n"
    done = run_worker(before=before)
    assert "Add pathwaysutils" in done.err
