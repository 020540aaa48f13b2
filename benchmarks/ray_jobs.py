"""Jobs on a Ray cluster: a call that does nothing beside a bare submission, and how soon a line
that a job prints is seen here, beside `ray job logs -f`.

In: nothing. Out: tables on stdout.

    python benchmarks/ray_jobs.py

The cluster is the tests': real raylets on the loopback. Its head keeps the store, so everything
goes through the port of the dashboard.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import measure

import kinetic
from kinetic._backends.base import LogRequest
from kinetic._ray.address import connect
from kinetic._ray.jobs_api import JobsApi, Submission

sys.path.insert(0, str(measure.ROOT / "tests"))

RUNS = 3
LINES = 100
PAUSE_S = 0.05
POLL_S = 0.05


@contextmanager
def cluster() -> Iterator[JobsApi]:
    """A head with one node, and an environment in which jobs go there."""
    from doubles.ray_cluster import end_cluster, start_cluster

    running = start_cluster(slices={})
    try:
        running.add_node()
        os.environ.update(
            KINETIC_BACKEND="ray",
            KINETIC_ADDRESS=running.address,
            KINETIC_POD_PYTHON=sys.executable,
            KINETIC_POD_SIMULATED="1",
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=running.token,
        )
        yield connect(running.address)
    finally:
        end_cluster(running.folder, running.pid)


def ticker(lines: int, pause_s: float) -> None:
    for _ in range(lines):
        print(repr(time.time()), flush=True)
        time.sleep(pause_s)


def submit_bare(api: JobsApi) -> None:
    """A driver that does nothing, until its end is seen here."""
    name = f"bare-{os.urandom(4).hex()}"
    api.submit(Submission(name, f"{sys.executable} -c pass"))
    while not api.find(name).has_ended:
        time.sleep(POLL_S)


def calls(api: JobsApi) -> None:
    """From the call to its value."""
    ours, bare = measure.medians(
        kinetic.run(accelerator="cpu")(int), lambda: submit_bare(api), runs=RUNS
    )
    measure.heading(f"a call that does nothing ({RUNS} runs; floor: a bare job of Ray's)")
    measure.row("kinetic.run, unchanged project", ours, bare, "<= 1.3")


def latency(api: JobsApi) -> None:
    """From print to caller."""
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
    """Lines that are printed once the follower has shown the first: what was there before comes at
    once."""
    name = f"ticker-{os.urandom(4).hex()}"
    code = (
        "import time\nwhile True:\n print('at', repr(time.time()), flush=True)\n"
        f" time.sleep({PAUSE_S})"
    )
    api.submit(Submission(name, f'{sys.executable} -c "{code}"'))
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "logs", "-f"]
    command += ["--address", api.address, name]
    found, began = [], 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as follower:
        for line in follower.stdout or ():
            now, words = time.time(), line.split()
            if len(words) == 2 and words[0] == b"at":
                began = began or now
                if float(words[1]) > began:
                    found.append(now - float(words[1]))
            if len(found) == LINES:
                break
        follower.terminate()
    api.stop(name)
    return found


def main() -> None:
    from doubles.ray_cluster import why_impossible

    if problem := why_impossible():
        print(f"\nNo Ray cluster: {problem}")
        return
    with measure.home(), cluster() as api:
        calls(api)
        latency(api)
        api.close()


if __name__ == "__main__":
    main()
