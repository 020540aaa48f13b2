"""Elastic jobs on a cluster whose pods are killed: the job goes on, and leaves nothing behind."""

from __future__ import annotations

import pytest
from doubles.cluster.fixtures import SHARES_FILES
from gangs import kill, wait_until
from on_pods import fail_at_first, fail_on_host_1, train_until_enough, wait_until_enough
from places import find_titled

import kinetic
from kinetic.errors import HostLost, JobCancelled, JobFailed

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.settles_within(30),
    pytest.mark.skipif(not SHARES_FILES, reason="pods must share files with this machine"),
]
LIMIT_S = 300


class Job:
    """A running job on two slices of two hosts each, and its pods."""

    def __init__(self, cluster, folder, function=wait_until_enough, **options):
        self.cluster, self.folder = cluster, folder
        folder.mkdir(parents=True, exist_ok=True)
        remote = kinetic.run("tpu-v6e-8", **{"slices": (1, 2)} | options)(function)
        self.handle = remote.run_async(str(folder))

    def reaches(self, attempt, hosts=4):
        """Wait until all hosts of this attempt run the function; return the job."""
        marks = [self.folder / f"{attempt}-{host}" for host in range(hosts)]
        wait_until(
            lambda: all(mark.exists() for mark in marks),
            f"attempt {attempt} does not run\n{self.cluster.describe()}",
        )
        return self

    def pods(self):
        """Return the uids of pods that are not being deleted, by pod name without the job's id and
        the random suffix."""
        uids = {}
        for pod in self.cluster.objects("pods"):
            meta = pod["metadata"]
            if self.handle.job_id in meta["name"] and "deletionTimestamp" not in meta:
                uids[meta["name"].partition(f"{self.handle.job_id}-")[2][:-6]] = meta["uid"]
        return uids

    def pod(self, name):
        """Return the full name of the live pod with this short name, such as "host-1-0"."""
        (full_name,) = (
            pod["metadata"]["name"]
            for pod in self.cluster.objects("pods")
            if f"{self.handle.job_id}-{name}-" in pod["metadata"]["name"]
            and "deletionTimestamp" not in pod["metadata"]
        )
        return full_name

    def lose(self, name):
        self.cluster.delete_pod(self.pod(name), force=True)

    def is_enough(self):
        (self.folder / "enough").touch()
        return self.handle.result(timeout=LIMIT_S)

    def losses(self):
        return [e["slices"] for e in self.handle.events() if e["kind"] == "slice_lost"]


@pytest.fixture
def begin(on_cluster, tmp_path):
    return lambda *args, **options: Job(on_cluster, tmp_path / "marks", *args, **options)


def test_a_head_and_two_slices(begin):
    job = begin().reaches(1)
    assert job.pods().keys() == {"head-0-0", "host-0-0", "host-0-1", "host-1-0", "host-1-1"}
    assert job.handle.status() == "RUNNING"
    assert job.is_enough() == (1, 4, 2)


@pytest.mark.parametrize("victim", [pytest.param("host-1-1", marks=pytest.mark.long), "host-0-0"])
def test_a_lost_pod_is_replaced_and_all_others_stay(begin, victim):
    job = begin(train_until_enough if victim == "host-0-0" else wait_until_enough).reaches(1)
    before = job.pods()
    job.lose(victim)
    job.reaches(2)
    after = job.pods()
    assert {name for name in before if before[name] != after[name]} == {victim}
    assert job.is_enough() == (2, 4, 2)
    assert job.losses() == [[int(victim[5])]]


@pytest.mark.shares_files
def test_a_killed_agent_is_replaced_in_its_pod(begin):
    job = begin().reaches(1)
    before, agents = job.pods(), [find_titled("agent", job.handle, host) for host in range(4)]
    kill(agents[2])
    job.reaches(2)
    assert job.pods() == before
    after = [find_titled("agent", job.handle, host) for host in range(4)]
    assert [host for host in range(4) if agents[host] != after[host]] == [2]
    assert job.is_enough() == (2, 4, 2)
    assert job.losses() == [[1]]


@pytest.mark.evicts
def test_a_host_is_taken_away(begin):
    """A host is evicted: its program ends after its function, and a new pod joins for attempt 2."""
    job = begin().reaches(1)
    before = job.pods()
    job.cluster.evict_pod(job.pod("host-1-0"))
    job.reaches(2)
    after = job.pods()
    assert {name for name in before if before[name] != after[name]} == {"host-1-0"}
    assert job.is_enough() == (2, 4, 2)
    assert job.losses() == [[1]]


@pytest.mark.long
def test_a_slice_is_killed_on_purpose(begin):
    job = begin().reaches(1)
    assert job.handle.kill_hosts(slice=1) == (2, 3)
    job.reaches(2)
    assert job.is_enough() == (2, 4, 2)
    assert job.losses() == [[1]]


@pytest.mark.long
@pytest.mark.double
def test_it_shrinks_also_without_the_first_slice_and_grows_back(begin, on_cluster):
    job = begin(train_until_enough, on_slice_loss="shrink").reaches(1)
    held = f"kinetic-{job.handle.job_id}-host-0"
    on_cluster.hold_back(held)
    job.lose("host-0-0")
    job.reaches(2, hosts=2)
    assert job.handle.status() == "RUNNING"
    on_cluster.let_go(held)
    job.reaches(3)
    assert job.is_enough() == (3, 4, 2)
    assert job.losses() == [[0]]


@pytest.mark.long
def test_it_is_given_up_with_the_whole_history(begin):
    job = begin(max_failures=1).reaches(1)
    job.lose("host-1-0")
    job.reaches(2).lose("host-0-1")
    with pytest.raises(HostLost) as caught:
        job.handle.result(timeout=LIMIT_S)
    words = str(caught.value)
    assert "given up: it failed 2 times, and max_failures is 1. attempt 1: slice 1 lost" in words
    assert "; attempt 2: slice 0 lost: host 1 of slice 0" in words


def test_a_lost_head_is_replaced_and_goes_on(begin):
    job = begin().reaches(1)
    before = job.pods()
    job.lose("head-0-0")
    job.reaches(2)
    after = job.pods()
    assert {name for name in before if before[name] != after[name]} == {"head-0-0"}
    assert job.is_enough() == (2, 4, 2)
    assert job.losses() == []


def test_a_head_that_is_lost_too_often_ends_the_job(begin):
    job = begin(max_failures=0).reaches(1)
    job.lose("head-0-0")
    with pytest.raises(HostLost, match="attempt 1: the head, which led the job, was lost"):
        job.handle.result(timeout=LIMIT_S)


def test_it_is_cancelled(begin):
    job = begin().reaches(1)
    job.handle.cancel()
    with pytest.raises(JobCancelled):
        job.handle.result(timeout=LIMIT_S)


def test_an_exception_of_the_function_is_no_loss(begin):
    job = begin(fail_on_host_1)
    with pytest.raises(ValueError, match="no luck"):
        job.handle.result(timeout=LIMIT_S)
    assert job.losses() == []


def test_a_retry_stays_in_its_pods(begin):
    job = begin(fail_at_first, retries=1)
    assert job.handle.result(timeout=LIMIT_S) == (2, 4, 2)
    assert job.losses() == []
    assert "attempt 1 failed: host 1 of slice 0: ValueError: no luck" in job.handle.logs()
    assert {event["host"] for event in job.handle.events() if event["kind"] == "joined"} == {
        *range(4)
    }


@pytest.mark.long
@pytest.mark.double
def test_it_starts_with_the_slices_that_are_there_and_grows(begin, on_cluster):
    on_cluster.hold_back("*-host-1-*")
    job = begin(train_until_enough, start_wait=1).reaches(1, hosts=2)
    assert job.handle.status() == "RUNNING"
    assert "attempt 1 of 11 begins on slice 0 of 2" in job.handle.logs()
    on_cluster.let_go("*-host-1-*")
    job.reaches(2)
    assert job.is_enough() == (2, 4, 2)
    assert job.losses() == []


@pytest.mark.double
def test_too_few_slices_do_not_start_and_the_missing_hosts_are_named(begin, on_cluster):
    on_cluster.hold_back("*-host-1-*")
    job = begin(slices=(2, 2), start_timeout="8s", slice_timeout=1)
    with pytest.raises(JobFailed) as caught:
        job.handle.result(timeout=LIMIT_S)
    assert "slice 1 lost: hosts 0-1 of slice 1 did not join within 8 s" in str(caught.value)
    on_cluster.let_go("*-host-1-*")
