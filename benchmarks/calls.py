"""One call, from call to value, compared with a bare subprocess, submitit, and a hand-written
launcher of the same collective."""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import measure

RUNS = 7
WARM_RUNS = 25
FIRST_PSUM = """
import time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
n = jax.device_count()
mesh = jax.make_mesh((n,), ("d",))
x = jax.make_array_from_callback(
    (n,), NamedSharding(mesh, P("d")), lambda i: np.arange(n, dtype=np.float32)[i]
)
f = jax.jit(
    jax.shard_map(lambda a: jax.lax.psum(a, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
)
assert float(np.asarray(f(x).addressable_data(0))[0]) == n * (n - 1) / 2
"""
LAUNCHED = (
    """
import os, sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), cluster_detection_method="deactivate"
)
"""
    + FIRST_PSUM
    + "print('at', time.time(), flush=True)\n"
)


def by_hand(hosts: int) -> float:
    """Return the seconds from the start of the launcher to the end of the first collective on the
    leader."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    env = dict(os.environ) | {
        "JAX_PLATFORMS": "cpu",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    begun = time.time()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LAUNCHED, address, str(hosts), str(i)],
            env=env,
            stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for i in range(hosts)
    ]
    output, _ = processes[0].communicate()
    for process in processes[1:]:
        process.wait()
    return float(re.search(r"^at (\S+)$", output, re.MULTILINE)[1]) - begun


OURS = """
import statistics, sys, time
import kinetic
SOURCE = {source!r}
def first_psum():
    exec(SOURCE, {{}})
    return time.time()
job = kinetic.run(accelerator=sys.argv[1])(first_psum)
taken = []
for _ in range({calls}):
    begun = time.time()
    taken.append(job() - begun)
print(statistics.median(taken[{skipped}:]))
"""
COLD_PSUM = OURS.format(source=FIRST_PSUM, calls=1, skipped=0)
WARM_PSUM = OURS.format(source=FIRST_PSUM, calls=6, skipped=1)
ONCE_WARM_PSUM = OURS.format(source=FIRST_PSUM, calls=2, skipped=1)


NOOP = """
import sys, time
import kinetic
def noop(): return 1
job = kinetic.run(accelerator="cpu")(noop)
for _ in sys.stdin:
    begun = time.perf_counter()
    job()
    print(time.perf_counter() - begun, flush=True)
"""
FIRST_CALLS = 6
"""After this many calls in a row, the zygote has imported everything."""


@contextmanager
def noop_caller() -> Iterator[Callable[[], float]]:
    """Start a caller in a new folder. Each call of the yielded function makes one kinetic call, and
    returns its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = f"{folder}/caller.py"
        with open(script, "w") as file:
            file.write(NOOP)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, script], text=True, **pipes) as caller:

            def call() -> float:
                print(file=caller.stdin, flush=True)
                return float(caller.stdout.readline())

            yield call


def cold_noop() -> float:
    """Return the seconds of the first call of a fresh caller."""
    with noop_caller() as call:
        return call()


def warm_noop(floor: Callable[[], object]) -> tuple[float, float]:
    """Return the median seconds of a call by a process that has called before, and of `floor`."""
    with noop_caller() as call:
        for _ in range(FIRST_CALLS):
            call()
        taken = [(call(), measure.seconds(floor)) for _ in range(WARM_RUNS)]
    return tuple(statistics.median(column) for column in zip(*taken, strict=True))


def run_caller(source: str, *arguments: str) -> float:
    """Run a caller in a new folder; return the seconds that it measured."""
    with tempfile.TemporaryDirectory() as folder:
        script = f"{folder}/caller.py"
        with open(script, "w") as file:
            file.write(source)
        done = subprocess.run(
            [sys.executable, script, *arguments], check=True, stdout=subprocess.PIPE, text=True
        )
    return float(done.stdout.split()[-1])


def with_submitit() -> None:
    import submitit

    with tempfile.TemporaryDirectory() as folder:
        executor = submitit.LocalExecutor(folder=folder)
        executor.update_parameters(timeout_min=5)
        executor.submit(int).result()


def median_of(figure, runs: int) -> float:
    return statistics.median(figure() for _ in range(runs))


def main() -> None:
    with measure.home():
        bare = measure.python("-c", "import cloudpickle")
        (floor,) = measure.medians(bare, runs=15)
        cold_s = median_of(cold_noop, RUNS)
        warm_s, floor_again = warm_noop(bare)
        (submitit_s,) = measure.medians(with_submitit, runs=RUNS)
        measure.heading(
            "no-op call on cpu (floor: a subprocess that imports cloudpickle; submitit's "
            "LocalExecutor)"
        )
        measure.row("cold, a fresh caller", cold_s, floor, "<= 4x")
        measure.row("warm, with a zygote", warm_s, floor_again, "<= 2x")
        measure.row("cold, compared with submitit", cold_s, submitit_s, "<= 0.3x")
        measure.row("warm, compared with submitit", warm_s, submitit_s, "<= 0.3x")

        hand_s = median_of(lambda: by_hand(4), 3)
        cold_s = median_of(lambda: run_caller(COLD_PSUM, "tpu-v6e-16"), 3)
        warm_s = run_caller(WARM_PSUM, "tpu-v6e-16")
        measure.heading(
            "4 hosts x 4 devices: call to the first collective (floor: a hand-written launcher)"
        )
        measure.row("cold, a fresh caller", cold_s, hand_s, "<= 1.0x")
        measure.row("warm, with a zygote", warm_s, hand_s, "<= 0.25x")

        measure.heading("more hosts, warm (floor: the hand-written launcher with as many)")
        for accelerator, hosts in (("tpu-v6e-64", 16), ("tpu-v6e-256", 64)):
            figure = run_caller(ONCE_WARM_PSUM, accelerator)
            measure.row(
                f"{hosts} hosts x 4 devices, {figure / warm_s:.1f}x of 4 hosts",
                figure,
                by_hand(hosts),
            )


if __name__ == "__main__":
    main()
