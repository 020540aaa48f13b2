"""A caller follows jobs on a cluster while the API server and the bucket have faults: it gets each
line once, and the value, with few calls."""

from __future__ import annotations

import os
import time

import pytest
from doubles.cluster.fake import FakeCluster
from doubles.cluster.fixtures import settings_of
from doubles.cluster.nodes import CPU_POOL, V6E_4X4
from doubles.gcs import serving
from gangs import PATIENCE_S, wait_until
from on_pods import count, count_on_all_hosts, die_once_aloud, wait_for_file

import kinetic
from kinetic._backends.base import LogRequest

pytest.importorskip("kubernetes")
pytest.importorskip("google.cloud.storage")

LINES = 150
EVERY = 16
"""Chunks of output between two faults."""
JOBS = 60


class Site:
    """A cluster, and the bucket that is the store of its pods."""

    def __init__(self, cluster, bucket):
        self.cluster = cluster
        self.bucket = bucket


@pytest.fixture
def site(home, monkeypatch, tmp_path):
    home.mkdir(parents=True, exist_ok=True)
    with serving("bucket") as bucket:
        image = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(tmp_path),
            "STORAGE_EMULATOR_HOST": bucket.uri,
        }
        with FakeCluster([CPU_POOL, V6E_4X4], environ=image) as cluster:
            variables = settings_of(cluster, home) | {
                "KINETIC_STORE": "gs://bucket/jobs",
                "STORAGE_EMULATOR_HOST": bucket.uri,
            }
            del variables["KINETIC_POD_STORE"]
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            yield Site(cluster, bucket)
            assert cluster.crashes == []


def expected_lines(lines):
    """Return the lines that the function `count` prints to stdout, and those to stderr."""
    out = [f"line {n} {'x' * 60}" for n in range(lines)]
    return out, [f"error {n}" for n in range(0, lines, 3)]


def the_server_restarts(site, turn):
    if turn % 2:
        site.cluster.restart_server(down_s=0.3)


def answers_are_slow(site, _turn):
    site.cluster.faults.slow(1.0, times=3)


def the_server_is_overloaded(site, _turn):
    site.cluster.faults.fail(503, times=4)
    site.cluster.faults.fail(429, times=2, retry_after=0)


def tokens_expire(site, turn):
    if turn % 2:
        site.cluster.renew_token()
    else:
        site.cluster.expire_token()


def downloads_break_within_a_line(site, _turn):
    site.bucket.fail("media", cut_after=30, only=".d/")


def uploads_get_lost(site, turn):
    fault = {"lost": True} if turn % 2 else {"status": 503}
    site.bucket.fail("insert", only=".d/", **fault)


FAULTS = (
    the_server_restarts,
    answers_are_slow,
    the_server_is_overloaded,
    tokens_expire,
    downloads_break_within_a_line,
    uploads_get_lost,
)


@pytest.mark.double
@pytest.mark.parametrize("fault", FAULTS)
def test_each_line_comes_once(site, fault):
    handle = kinetic.run(accelerator="cpu")(count).run_async(LINES)
    got, chunks = {1: b"", 2: b""}, 0
    for chunk in handle.chunks(LogRequest()):
        if chunk is not None:
            got[chunk.stream] += chunk.data
            if chunks % EVERY == 0:
                fault(site, chunks // EVERY)
            chunks += 1
    assert chunks > 2 * EVERY, "nothing has broken"
    out, errors = expected_lines(LINES)
    assert got[1].decode().splitlines() == out
    assert got[2].decode().splitlines() == errors, got[2].decode()
    site.cluster.faults.clear()
    site.bucket.heal()
    site.cluster.renew_token()
    attached = kinetic.attach(handle.job_id)
    assert attached.result(timeout=PATIENCE_S) == LINES
    assert [line for line in attached.logs().splitlines() if "line" in line] == out


@pytest.mark.long
@pytest.mark.double
def test_all_hosts_are_followed_and_each_line_comes_once(site):
    handle = kinetic.run(accelerator="tpu-v6e-16")(count_on_all_hosts).run_async(50)
    got = dict.fromkeys(range(4), b"")
    for chunk in handle.chunks(LogRequest(hosts=None)):
        if chunk is not None:
            got[chunk.host] += chunk.data
            tokens_expire(site, chunk.host)
    for host, data in got.items():
        lines = [line for line in data.decode().splitlines() if "line" in line]
        assert lines == [f"host {host} line {n}" for n in range(50)]
    site.cluster.renew_token()  # The last chunk may have expired the token.
    assert handle.result(timeout=PATIENCE_S) == 50
    site.cluster.wait_for(lambda: not site.cluster.left_over())
    for host in got:  # The pods no longer exist.
        assert f"host {host} line 49" in handle.logs(host=host)


@pytest.mark.double
def test_an_elastic_job_tells_its_story_over_a_distant_store(site):
    site.bucket.before = lambda *_: time.sleep(0.01)
    handle = kinetic.run("cpu", slices=(1, 2))(die_once_aloud).run_async()
    handle.result(timeout=PATIENCE_S)
    story = "".join(handle.logs()).splitlines()
    assert len(story) == 6, story
    first, lost, waiting, begins, _, second = story
    assert (first, second) == ("attempt 1", "attempt 2")
    assert lost.startswith("kinetic: slice 1 lost (failure 1 of at most 10): host 0 of slice 1")
    assert waiting.startswith("kinetic: waiting for slice 1 to return")
    assert begins == "kinetic: attempt 2 of 11 begins on all 2 slices."


@pytest.mark.double
def test_a_job_that_is_followed_asks_little(site, tmp_path):
    handle = kinetic.run(accelerator="cpu")(wait_for_file).run_async(str(tmp_path / "m"))
    chunks = handle.chunks(LogRequest())
    while (chunk := next(chunks)) is None or b"waiting" not in chunk.data:
        pass
    site.cluster.forget_requests()
    begun = time.monotonic()
    wait_until(lambda: _looked(chunks, site, "list pods"), "it is not asked for any more")
    for _ in range(50):
        next(chunks)
    counts, took_s = site.cluster.counts(), time.monotonic() - begun
    assert counts.total() <= 2 + took_s, counts
    (tmp_path / "m").touch()
    assert handle.result(timeout=PATIENCE_S) == "seen"


def _looked(chunks, site, call):
    next(chunks)
    return site.cluster.counts()[call]


@pytest.mark.long
@pytest.mark.double
@pytest.mark.settles_within(60)
def test_many_jobs_at_once(site, disk_path, monkeypatch):
    for name in ("KINETIC_STORE", "KINETIC_POD_STORE"):  # This test needs no bucket.
        monkeypatch.setenv(name, f"file://{disk_path}")
    run = kinetic.run(accelerator="cpu")(abs)
    begun = time.monotonic()
    batch = run.run_async_map(range(-JOBS, 0), max_concurrent=JOBS)
    assert batch.results(progress=False) == list(range(JOBS, 0, -1))
    counts, took_s = site.cluster.counts(), time.monotonic() - begun
    assert counts["create jobs"] == counts["create secrets"] == JOBS
    lists = sum(count for call, count in counts.items() if call.startswith("list"))
    # One request a second, and those of the newest snapshot (jobs, pods, events) in advance.
    assert lists <= 3 + took_s, counts
    site.cluster.wait_for(lambda: not site.cluster.left_over())
