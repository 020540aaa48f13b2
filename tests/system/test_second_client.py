"""JAX on an accelerator also computes on the host's CPU, for callbacks and random seeds. The tests
use a second client of the CPU, with three devices, in place of the accelerator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kinetic._host.worker import jaxworld
from kinetic._host.worker.joining import World

PROGRAM = """
import socket, sys
import equinox, jax, keras
import numpy as np
from jax._src import hardware_utils, xla_bridge
from jax.experimental import io_callback
from jaxlib import xla_client

hardware_utils.has_visible_nvidia_gpu = lambda: True
xla_bridge.register_backend_factory(
    sys.argv[1], lambda: xla_client.make_cpu_client(num_devices=3), fail_quietly=False
)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]
x = np.arange(3.0, dtype=np.float32)


def attempt(name, use):
    try:
        print(name, float(use()))
    except Exception as error:
        print(name, type(error).__name__, error)


def from_processor():
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.numpy.sum(x)


def tell(callback, *options):
    told = []
    jax.jit(lambda x: callback(told.append, *options, x.sum()))(x)
    jax.effects_barrier()
    return told[0]


def double(x):
    shape = jax.ShapeDtypeStruct((), np.float32)
    return jax.pure_callback(lambda x: np.float32(2 * x), shape, x.sum()) / 2


attempt("keras", lambda: keras.distribution.initialize(address, 1, 0) or x.sum())
attempt("devices", from_processor)
attempt("debug", lambda: tell(jax.debug.callback))
attempt("io", lambda: tell(io_callback, None))
attempt("pure", lambda: jax.jit(double)(x))
attempt("equinox", lambda: equinox.filter_jit(equinox.error_if)(x.sum(), x.sum() > 3, "no"))
print("counts", jax.device_count(), jax.device_count("cpu"))
"""


@pytest.mark.parametrize(("platform", "client"), [("tpu", "tpu"), ("gpu", "cuda")])
def test_programs_reach_the_processor_beside_an_accelerator(platform, client):
    world = World("127.0.0.1:1", 1, 0, 3, platform, simulated=False)
    env = jaxworld.environ(world, os.environ, {}, automatic=False)
    line = [sys.executable, "-c", PROGRAM, client]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        *(f"{name} 3.0" for name in ("keras", "devices", "debug", "io", "pure", "equinox")),
        "counts 3 1",
    ], done.stderr
