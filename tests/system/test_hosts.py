"""Agents on their hosts: bounded memory, a coordinator that cannot be reached, threads left by the
function, separate random numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from gangs import start_script
from on_hosts import ExitsWhenPickled, flood_then_wait, leave_a_pool, leave_pools, sleep_long
from remotes import lock_on, whoami

import kinetic
from kinetic import errors
from kinetic._backends.local.backend import LocalBackend
from kinetic._client.handle import JobHandle
from kinetic._config.settings import worker_environ

PATIENCE_S = 200.0
MOST_AGENT_BYTES = 120_000_000
"""Most memory of an agent: about 45 MB for Python with gRPC, and a few for each stream's buffer."""


def wait_until(read, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := read()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return answer


def high_water_bytes(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def test_an_agents_memory_is_bounded_while_its_worker_floods(home):
    marker = home.parent / "flooded"
    handle = kinetic.run(accelerator="cpu")(flood_then_wait).run_async(str(marker))
    pids = wait_until(handle.processes, "no supervisor")
    wait_until(marker.exists, "still flooding")
    assert high_water_bytes(pids["agents"][0]) < MOST_AGENT_BYTES
    assert high_water_bytes(pids["supervisor"]) < MOST_AGENT_BYTES
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result(stream_logs=False)


@pytest.mark.long
def test_an_agent_that_cannot_reach_the_coordinator_ends_all(home, monkeypatch):
    from kinetic._backends import registry
    from kinetic._store.local import LocalStore

    marker = home.parent / "running"
    impatient = LocalBackend(LocalStore(home), worker_environ(), unreachable_after_s=3.0)
    with registry.substitute_backend("local", lambda _, store: impatient):
        # A lone host would call the coordinator only after its function has run for a while.
        pair = kinetic.run(accelerator="tpu-v6e-8", backend="local")(sleep_long)
        handle = pair.run_async(str(marker))
    pids = wait_until(handle.processes, "no supervisor")
    wait_until(Path(f"{marker}-1").exists, "not started")
    os.kill(pids["supervisor"], signal.SIGSTOP)
    with pytest.raises(errors.SupervisorLost, match="has not answered for 3 s"):
        JobHandle(handle.ref).result()


def test_threads_left_behind_are_named_and_do_not_keep_the_host():
    @kinetic.run(accelerator="cpu")
    def leave_a_thread():
        threading.Thread(target=time.sleep, args=(1000,), name="straggler").start()
        return 5

    handle = leave_a_thread.run_async()
    assert handle.result() == 5
    assert handle.outcome().reports[0].leftover_threads == ("straggler",)
    assert "straggler" in handle.logs()


def test_idle_threads_of_a_pool_are_not_left_behind_but_busy_ones_are():
    handle = kinetic.run(accelerator="cpu")(leave_pools).run_async()
    handle.result()
    assert handle.outcome().reports[0].leftover_threads == ("busy_0",)


def test_an_idle_pool_of_processes_is_not_left_behind_but_a_busy_one_is():
    for work in (False, True):
        handle = kinetic.run(accelerator="cpu")(leave_a_pool).run_async(work)
        handle.result()
        assert bool(handle.outcome().reports[0].leftover_threads) is work


def test_hosts_draw_different_random_numbers():
    @kinetic.run(accelerator="tpu-v6e-8")
    def draw():
        import random

        import numpy as np
        from jax.experimental import multihost_utils

        mine = np.array([random.random(), np.random.random()])
        return multihost_utils.process_allgather(mine).tolist()

    (a, b), (c, d) = draw()
    assert len({a, b, c, d}) == 4


def test_what_native_code_prints_is_not_lost():
    @kinetic.run(accelerator="cpu")
    def print_natively():
        import ctypes

        ctypes.CDLL(None).printf(b"from libc, without a flush\n")

    handle = print_natively.run_async()
    handle.result()
    assert handle.logs() == "from libc, without a flush\n"


def test_exit_handlers_of_the_function_run():
    @kinetic.run(accelerator="cpu")
    def register():
        import atexit

        atexit.register(print, "goodbye")

    handle = register.run_async()
    handle.result()
    assert handle.logs() == "goodbye\n"


def test_a_job_that_jax_variables_concern_gets_a_fresh_jax():
    @kinetic.run(accelerator="tpu-v6e-8", env={"JAX_ENABLE_X64": "1"})
    def precision():
        import jax.numpy as jnp

        return str(jnp.zeros(1).dtype)

    assert precision() == "float64"


def test_a_script_may_use_multiprocessing(home):
    script = home.parent / "project" / "script.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        """
import concurrent.futures, multiprocessing
import kinetic

def square(x):
    return x * x

class Box:
    def __init__(self, x):
        self.x = x

def boxed(box):
    return Box(box.x + 1)

@kinetic.run(accelerator="cpu")
def work(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(square, range(4))), pool.submit(boxed, Box(1)).result().x

if __name__ == "__main__":
    print([work(method) for method in ("fork", "spawn", "forkserver")])
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == f"{[([0, 1, 4, 9], 2)] * 3}\n", done.stderr


def test_a_child_that_goes_on_writing_holds_nothing_up():
    @kinetic.run(accelerator="cpu")
    def leave_a_writer():
        print("mine", flush=True)
        subprocess.Popen(["yes"], start_new_session=True)
        return "returned"

    handle = leave_a_writer.run_async()
    assert handle.result(stream_logs=False) == "returned"
    assert handle.logs().startswith("mine\n")


def test_an_exception_whose_pickling_exits_arrives_by_class_and_text():
    @kinetic.run(accelerator="cpu")
    def fail():
        raise ExitsWhenPickled("still told")

    with pytest.raises(ExitsWhenPickled, match="still told"):
        fail()


def test_the_values_of_all_hosts():
    job = whoami.with_options(accelerator="tpu-v6e-16").run_async(large=3_000_000)
    assert [host for host, _ in job.results(timeout="5m")] == [0, 1, 2, 3]
    assert job.result()[0] == 0
    assert kinetic.attach(job.job_id).results() == job.results()


@pytest.mark.long
def test_the_values_of_all_hosts_of_a_job_that_failed_or_did_not_keep_them():
    with pytest.raises(ValueError, match="host 1 cannot"):
        whoami.run_async(1).results()
    with pytest.raises(errors.ResultUnavailable, match=r"host 1") as caught:
        lock_on.run_async(1).results()
    assert caught.value.hosts == (1,)
    with pytest.raises(
        errors.UsageError, match=r"job-\w+ stored only the value of host 0.*all_hosts=True"
    ):
        whoami.with_options(all_hosts=False).run_async().results()
    assert whoami.with_options(accelerator="cpu", all_hosts=False).run_async().results() == [
        (0, b"")
    ]
    batch = whoami.run_async_map([{}, {}], max_concurrent=1)
    assert [[host for host, _ in job.results()] for job in batch.as_completed()] == [[0, 1]] * 2


@pytest.mark.parametrize(
    "accelerator", ["tpu-v6e-4", pytest.param("tpu-v6e-8", marks=pytest.mark.long)]
)
def test_a_loop_that_never_waits_for_a_result_ends_on_few_cores(accelerator):
    @kinetic.run(accelerator=accelerator, hang_timeout=60)
    def descend():
        # XLA reads the CPU affinity when it starts its backend.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        ones = jax.jit(
            lambda: jnp.ones((16, 3)), out_shardings=NamedSharding(mesh, PartitionSpec("data"))
        )()
        weights = jax.device_put(jnp.zeros(3), NamedSharding(mesh, PartitionSpec()))
        step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w))
        for _ in range(300):
            weights = step(weights, ones)
        return round(float(weights.sum()), 3)

    assert descend() == 1.0


def test_a_sitecustomize_that_starts_a_thread_runs_on_every_host(home):
    """sitecustomize starts a thread, and processes with threads must not fork. So zygote and fork
    server leave such modules to the workers, which import them."""
    site = home.parent / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, name='profiler', daemon=True).start()\n"
    )
    source = """
        import threading
        import kinetic

        def is_profiled():
            return "profiler" in [thread.name for thread in threading.enumerate()]

        print(kinetic.run(accelerator="cpu")(is_profiled)())
        gang = kinetic.run(accelerator="tpu-v6e-8", all_hosts=True)(is_profiled)
        print(gang.run_async().results())
    """
    environ = {**os.environ, "PYTHONPATH": str(site)}
    with start_script(home, source, env=environ, text=True) as caller:
        assert caller.communicate(timeout=PATIENCE_S)[0] == "True\n[True, True]\n"


def draw():
    return hash("a")


@pytest.mark.parametrize("options", [{}, {"PYTHONHASHSEED": "7"}])
def test_simulated_hosts_share_a_hash_seed(options):
    gang = kinetic.run(accelerator="tpu-v6e-8", all_hosts=True, env=options)
    assert len(set(gang(draw).run_async().results())) == 1


@pytest.mark.parametrize("retries", [0, 1])
def test_hosts_draw_hash_seeds_of_their_own_if_they_are_told_to(place, retries):
    own = {"PYTHONHASHSEED": "random"}
    gang = kinetic.run(accelerator="tpu-v6e-8", all_hosts=True, env=own, retries=retries)
    job = gang(draw).run_async()
    assert len(set(job.results())) == 2
    job.cleanup()


@pytest.mark.parametrize("options", [{}, {"PYTHONHASHSEED": "random"}], ids=["forks", "own"])
def test_no_function_takes_precedence_over_other_programs(options):
    def compare_options():
        return os.getpriority(os.PRIO_PROCESS, 0), os.getsid(0) == os.getpid()

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert kinetic.run(accelerator="cpu", env=options)(compare_options)() == (mine, True)
