"""Jobs on a Ray cluster: a no-op call compared with a bare submission; the latency of output
compared with `ray job logs -f`; the first collective on four hosts, and the first step after the
loss of a node, compared with Ray Train's `JaxTrainer`.

In: nothing. Out: tables on stdout.

    python benchmarks/ray_jobs.py

The cluster is that of the tests: real raylets on the loopback address. Its head has the store, so
everything goes through the port of Ray's dashboard.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import measure

import kinetic
from kinetic._backends.base import LogRequest
from kinetic._ray.address import connect
from kinetic._ray.jobs_api import JobsApi, Submission
from kinetic.jobs import JobHandle

sys.path.insert(0, str(measure.ROOT / "tests"))

from doubles.ray_cluster import (
    V6E_16,
    RayCluster,
    SliceShape,
    end_cluster,
    start_cluster,
    why_impossible,
)

RUNS = 3
LINES = 100
PAUSE_S = 0.05
POLL_S = 0.05
PATIENCE_S = 300.0


TRAINER = measure.ROOT / "tests/doubles/jax_trainer.py"
TRAIN_DEFAULTS = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=60 "
"""Ray Train's own limit, in seconds, for waiting for a lost node that Ray takes for alive."""
RAY_DEFAULTS = {
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray's defaults, which decide when Ray notices that a node is lost."""


@contextmanager
def cluster(
    slices: Mapping[str, SliceShape], variables: Mapping[str, str] | None = None
) -> Iterator[tuple[RayCluster, JobsApi]]:
    """Start a head with the nodes of some slices, and set the environment so that jobs use it."""
    running = start_cluster(slices=slices, variables=variables)
    try:
        if not slices:
            running.add_node()
        os.environ.update(
            KINETIC_BACKEND="ray",
            KINETIC_ADDRESS=running.address,
            KINETIC_POD_PYTHON=sys.executable,
            KINETIC_POD_SIMULATED="1",
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=running.token,
        )
        api = connect(running.address)
        yield running, api
        api.close()
    finally:
        end_cluster(running.folder, running.pid)


def ticker(lines: int, pause_s: float) -> None:
    for _ in range(lines):
        print(repr(time.time()), flush=True)
        time.sleep(pause_s)


def submit_bare(api: JobsApi) -> None:
    """Run a driver that does nothing, until the client sees its end."""
    name = f"bare-{os.urandom(4).hex()}"
    api.submit(Submission(name, f"{sys.executable} -c pass"))
    while not api.find(name).has_ended:
        time.sleep(POLL_S)


def calls(api: JobsApi) -> None:
    """Measure the time from a call to its value."""
    ours, bare = measure.medians(
        kinetic.run(accelerator="cpu")(int), lambda: submit_bare(api), runs=RUNS
    )
    measure.heading(f"a call that does nothing ({RUNS} runs; floor: a bare job of Ray's)")
    measure.row("kinetic.run, unchanged project", ours, bare, "<= 1.3")


def latency(api: JobsApi) -> None:
    """Measure the time from a print to the caller."""
    handle = kinetic.run(accelerator="cpu")(ticker).run_async(LINES, PAUSE_S)
    ours = []
    for chunk in handle.chunks(LogRequest()):
        now = time.time()
        ours += [now - float(line) for line in (chunk.data.split() if chunk else ())]
    handle.result()
    theirs = _follow_bare(api)
    measure.heading(f"from print to follower, median of {LINES} lines (floor: `ray job logs -f`)")
    measure.row(
        "kinetic jobs logs -f", statistics.median(ours), statistics.median(theirs), "<= 0.2"
    )
    print(f"  lines seen: {len(ours)} and {len(theirs)} of {LINES}")


def _follow_bare(api: JobsApi) -> list[float]:
    """Return the delays of lines that are printed after the follower has shown the first one:
    earlier lines arrive at once."""
    name = f"ticker-{os.urandom(4).hex()}"
    code = (
        "import time\nwhile True:\n print('at', repr(time.time()), flush=True)\n"
        f" time.sleep({PAUSE_S})"
    )
    api.submit(Submission(name, f'{sys.executable} -c "{code}"'))
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "logs", "-f"]
    command += ["--address", api.address, name]
    delays, began = [], 0.0
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}  # Without buffering, as in a terminal.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    ) as follower:
        for line in follower.stdout or ():
            now, words = time.time(), line.split()
            if len(words) == 2 and words[0] == b"at":
                began = began or now
                if float(words[1]) > began:
                    delays.append(now - float(words[1]))
            if len(delays) == LINES:
                break
        follower.terminate()
    api.stop(name)
    return delays


def collect() -> float:
    """Return the time after the first collective."""
    import jax
    from jax.experimental import multihost_utils

    multihost_utils.process_allgather(jax.numpy.ones(4))
    return time.time()


def first_collective(api: JobsApi) -> None:
    """Measure the time from the call to the first collective of four hosts."""
    call = kinetic.run(accelerator="tpu-v6e-16")(collect)
    call()
    ours, theirs = [], []
    for _ in range(RUNS):
        begun = time.time()
        ours.append(call() - begun)
        begun = time.time()
        theirs.append(_find_step(api, _train(api, "4", "4x4", 1)) - begun)
    measure.heading(f"from call to first collective on 4 hosts ({RUNS} runs; floor: JaxTrainer)")
    measure.row("kinetic.run", statistics.median(ours), statistics.median(theirs), "<= 0.5")


def _train(
    api: JobsApi, workers: str, topology: str, steps: int, pause_s: float = 0.0, variables: str = ""
) -> str:
    name = f"trainer-{os.urandom(4).hex()}"
    arguments = f"{workers} {topology} {steps} {pause_s}"
    api.submit(Submission(name, f"{variables}{sys.executable} {TRAINER} {arguments}"))
    return name


def _find_step(api: JobsApi, name: str, after: float = 0.0) -> float:
    """Return the time of the trainer's first step after the given time, as it logs it."""
    until = time.time() + PATIENCE_S
    while True:
        text = api.logs(name)
        times = map(float, re.findall(r"step \d+ on \d+ loss \S+ at (\S+)", text))
        if steps := [at for at in times if at > after]:
            return min(steps)
        job = api.find(name)
        if job is None or job.has_ended or time.time() > until:
            raise RuntimeError(f"no step after {after}: {text[-2000:]}")
        time.sleep(0.2)


def step_forever(pause_s: float) -> None:
    """Run steps of all hosts until the job is cancelled."""
    import jax
    from jax.experimental import multihost_utils

    while True:
        multihost_utils.process_allgather(jax.numpy.ones(4))
        print(f"step at {time.time()}", flush=True)
        time.sleep(pause_s)


def loss(running: RayCluster, api: JobsApi) -> None:
    """Measure the time from the loss of one of two slices to the next step on the other slice."""
    call = kinetic.run("tpu-v6e-4", slices=(1, 2), on_slice_loss="shrink", start_wait="300s")
    handle = call(step_forever).run_async(PAUSE_S)
    ours = _lose_node(running, lambda after: _find_own_step(handle, after))
    handle.cancel()
    running.mend()
    trainer = _train(api, "1,2", "2x2", 100_000, PAUSE_S, TRAIN_DEFAULTS)
    measure.heading("from the loss of a node to the next step (floor: JaxTrainer, Ray's settings)")
    try:
        theirs = _lose_node(running, lambda after: _find_step(api, trainer, after))
    except RuntimeError as error:
        print(f"  slices=(1, 2): {ours:.1f} s; JaxTrainer: {str(error)[:200]}")
        return
    finally:
        api.stop(trainer)
    measure.row("slices=(1, 2)", ours, theirs, "<= 0.2")


def _lose_node(running: RayCluster, find_step: Callable[[float], float]) -> float:
    find_step(0.0)
    lost_at = time.time()
    running.kill_node(2)
    # Within a second, steps may end that were under way.
    return find_step(lost_at + 1.0) - lost_at


def _find_own_step(handle: JobHandle[None], after: float) -> float:
    while True:
        text = "".join(handle.logs())
        times = map(float, re.findall(r"(?m)^step at (\S+)$", text))
        if steps := [at for at in times if at > after]:
            return min(steps)
        if handle.done():
            raise RuntimeError(f"no step after {after}: {text[-2000:]}")
        time.sleep(0.2)


def main() -> None:
    if problem := why_impossible():
        print(f"\nNo Ray cluster: {problem}")
        return
    with measure.home():
        with cluster({}) as (_, api):
            calls(api)
            latency(api)
        with cluster({"slice-0": V6E_16}) as (_, api):
            first_collective(api)
        small = SliceShape("v6e-4", "2x2", hosts=1)
        with cluster({"small-0": small, "small-1": small}, RAY_DEFAULTS) as (running, api):
            loss(running, api)


if __name__ == "__main__":
    main()
