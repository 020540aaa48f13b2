"""Jobs on a cluster: overhead over a pod created by hand, latency of output lines, calls to the
API server and the bucket, and 200 jobs at once.

In: nothing (or the number of jobs at once). Out: tables on stdout.

    python benchmarks/cluster.py [JOBS]

The cluster and the bucket are the tests' doubles: pods are processes of this machine, and the
doubles count the calls that they receive. The floor of a job is a pod with the same command,
environment and Secret, which runs the same function, created through the same API server.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import measure

import kinetic
from kinetic._backends.base import LogRequest
from kinetic._backends.kubernetes.cluster import connect
from kinetic._core.place import Place

sys.path.insert(0, str(measure.ROOT / "tests"))

JOBS = 200
RUNS = 5
LINES = 300
PAUSE_S = 0.05
FOLLOWED_S = 5.0


@contextmanager
def cluster(folder: str) -> Iterator[tuple[object, object]]:
    """Start the doubles, and set the environment so that jobs use them."""
    from doubles.cluster.fake import FakeCluster
    from doubles.gcs import serving

    with serving("bucket") as bucket:
        image = {
            "PATH": os.environ["PATH"],
            "TMPDIR": folder,
            "STORAGE_EMULATOR_HOST": bucket.uri,
        }
        with FakeCluster(environ=image) as running:
            os.environ.update(
                KUBECONFIG=str(running.kubeconfig),
                KINETIC_BACKEND="gke",
                KINETIC_CLUSTER="fake",
                KINETIC_POD_PYTHON=sys.executable,
                KINETIC_POD_SIMULATED="1",
                KINETIC_STORE="gs://bucket/jobs",
                STORAGE_EMULATOR_HOST=bucket.uri,
            )
            yield running, bucket


def touch(path: str) -> None:
    Path(path).touch()


def ticker(lines: int, pause_s: float) -> None:
    for _ in range(lines):
        print(repr(time.time()), flush=True)
        time.sleep(pause_s)


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.001)


class ByHand:
    """Creates the same workload and Secret without kinetic's client."""

    def __init__(self, running: object, folder: Path) -> None:
        self.api = connect(Place("gke", cluster="fake"), os.environ)
        self.running = running
        self.folder = folder
        self.copies = 0

    def capture(self) -> tuple[Path, dict[str, object], dict[str, object]]:
        """Return a job's objects, taken from a submitted job whose pods are held back."""
        self.copies += 1
        marker = self.folder / f"hand-{self.copies}"
        self.running.hold_back("kinetic-")
        kinetic.run(accelerator="cpu")(touch).run_async(str(marker))
        (job,) = self.running.objects("jobs")
        (secret,) = self.running.objects("secrets")
        self.running.delete("jobs", job["metadata"]["name"])
        self.running.wait_for(lambda: not self.running.left_over())
        self.running.let_go("kinetic-")
        return marker, _strip(job), _strip(secret)

    def create(self, job: dict[str, object], secret: dict[str, object]) -> None:
        from kinetic._backends.kubernetes.resources import JOBS as KIND
        from kinetic._backends.kubernetes.resources import SECRETS

        self.api.create(SECRETS, secret)
        self.api.create(KIND, job)


def _strip(stored: dict[str, object]) -> dict[str, object]:
    """Return an object as it was before it was created."""
    document = copy.deepcopy(stored)
    document.pop("status", None)
    metadata, names = document["metadata"], ("name", "labels", "annotations")
    document["metadata"] = {key: metadata[key] for key in names if key in metadata}
    if "spec" in document:
        for name in ("selector", "suspend"):
            document["spec"].pop(name, None)
        labels = document["spec"]["template"]["metadata"]["labels"]
        for name in [key for key in labels if "controller-uid" in key or "job-name" in key]:
            del labels[name]
    return document


def overhead(running: object, folder: Path) -> None:
    """Measure the time from the call to the function's start, and for a pod created by hand."""
    hand, ours, floor = ByHand(running, folder), [], []
    for run in range(RUNS + 1):
        marker, job, secret = hand.capture()
        floor.append(measure.seconds(lambda job=job, secret=secret: _by_hand(hand, job, secret)))
        marker = folder / f"ours-{run}"
        ours.append(measure.seconds(lambda marker=marker: _by_us(marker)))
        running.wait_for(lambda: not running.left_over())
    measure.heading(f"submit to running, 1 host ({RUNS} runs; floor: the same pod by hand)")
    measure.row("kinetic.run, unchanged project", *map(statistics.median, (ours[1:], floor[1:])))


def _by_hand(hand: ByHand, job: dict[str, object], secret: dict[str, object]) -> None:
    hand.create(job, secret)
    wait_for_file(hand.folder / f"hand-{hand.copies}")
    hand.running.delete("jobs", job["metadata"]["name"])
    hand.running.delete("secrets", secret["metadata"]["name"])


def _by_us(marker: Path) -> None:
    handle = kinetic.run(accelerator="cpu")(touch).run_async(str(marker))
    wait_for_file(marker)
    threading.Thread(target=handle.result).start()


def latency() -> None:
    """Measure the time from a print to the caller."""
    handle = kinetic.run(accelerator="cpu")(ticker).run_async(LINES, PAUSE_S)
    delays = []
    for chunk in handle.chunks(LogRequest()):
        now = time.time()
        delays += [now - float(line) for line in (chunk.data.split() if chunk else ())]
    assert len(delays) == LINES, "a line was lost or repeated"
    handle.result()
    first, ordered = delays[0], sorted(delays)
    print(
        f"\nfrom print to follower through a bucket, {LINES} lines: first {first * 1e3:.0f} ms, "
        f"median {ordered[len(ordered) // 2] * 1e3:.0f} ms, "
        f"99th percentile {ordered[int(len(ordered) * 0.99)] * 1e3:.0f} ms "
        "(goal: the first <= 1000 ms)"
    )


def calls(running: object, bucket: object, folder: Path) -> None:
    """Count the calls of one job to the API server and to the bucket."""
    title = f"calls of one job, {FOLLOWED_S:g} s of it followed"
    print(f"\n{title:44}{'API server':>12}{'bucket':>9}   most frequent")

    def row(name: str, act: Callable[[], object]) -> None:
        running.forget_requests()
        bucket.forget_requests()
        act()
        api, stored = running.counts(), bucket.calls()
        print(
            f"  {name:42}{api.total():12}{stored.total():9}   {_describe(api)}; {_describe(stored)}"
        )

    handles = []

    def submit() -> None:
        handles.append(kinetic.run(accelerator="cpu")(ticker).run_async(10**6, PAUSE_S))

    row("submit, unchanged project", submit)
    chunks = handles[0].chunks(LogRequest())
    while next(chunks) is None:
        pass

    def follow() -> None:
        until = time.monotonic() + FOLLOWED_S
        while time.monotonic() < until:
            next(chunks)

    follow()
    row(f"follow, {FOLLOWED_S:g} s (its pod's requests too)", follow)
    chunks.close()
    handles[0].cancel()
    running.wait_for(lambda: not running.left_over())
    row("whole, a job that does nothing", kinetic.run(accelerator="cpu")(int))


def _describe(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {call}" for call, count in counts.most_common(6))


def many(running: object, home: Path, jobs: int) -> None:
    """Run many jobs at once, with their records in a folder, because the bucket's double is
    slow."""
    os.environ.pop("KINETIC_STORE")
    os.environ["KINETIC_POD_STORE"] = f"file://{home}"
    home.mkdir(mode=0o700, exist_ok=True)
    home.chmod(0o700)
    running.forget_requests()

    def act() -> None:
        batch = kinetic.run(accelerator="cpu")(abs).run_async_map(
            range(-jobs, 0), max_concurrent=jobs
        )
        assert batch.results(progress=False) == list(range(jobs, 0, -1)), "a job was lost"

    took_s = measure.seconds(act)
    api = running.counts()
    print(
        f"\n{jobs} jobs at once: {took_s:.1f} s, {jobs / took_s:.1f} jobs/s, "
        f"{api.total() / jobs:.2f} calls of the API server per job ({_describe(api)})"
    )


def main(jobs: int = JOBS) -> None:
    with measure.home() as home, tempfile.TemporaryDirectory(prefix="kn-bench-") as folder:
        try:
            with cluster(folder) as (running, bucket):
                kinetic.run(accelerator="cpu")(int)()
                overhead(running, Path(folder))
                latency()
                calls(running, bucket, Path(folder))
                many(running, Path(home) / "home", jobs)
        except ImportError as missing:
            print(f"\nNo cluster: {missing}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
