"""Snapshots of a cluster that all callers share: the API requests they cost, and their age."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from kinetic._backends.kubernetes import snapshot
from kinetic._backends.kubernetes.api import ObjectList, Selector
from kinetic._backends.kubernetes.errors import Forbidden, NotInstalled
from kinetic._backends.kubernetes.names import selector
from kinetic._backends.kubernetes.resources import (
    EVENTS,
    JOBS,
    JOBSETS,
    PODS,
    QUEUE_WORKLOADS,
    Resource,
)
from kinetic._backends.kubernetes.snapshot import SnapshotReader, share_reader
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic.errors import BackendUnavailable

Document = dict[str, Any]
AWAY = BackendUnavailable("The server does not answer.")


def ref(number: int, hosts: int = 1) -> JobRef:
    job_id = f"job-{number:08x}"
    return JobRef(job_id, Place("gke"), "cpu", "f", "f", 0.0, "gs://b", hosts=hosts)


class Cluster:
    """A scripted API with the objects of jobs, and a clock."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.labels: list[str] = []
        self.objects: dict[tuple[Resource, str], Document] = {}
        self.problems: dict[Resource, Exception] = {}
        self.now = 100.0
        self.takes_s = 0.001
        self.pages = 1

    def reader(self) -> SnapshotReader:
        return SnapshotReader(self, clock=lambda: self.now)  # type: ignore[arg-type]

    def add(self, resource: Resource, job_id: str, phase: str, **meta: Any) -> Document:
        meta |= {"labels": {"kinetic.dev/job-id": job_id}, "name": f"kinetic-{job_id}"}
        document = {"metadata": meta, "status": {"phase": phase}}
        self.objects[resource, f"{job_id}{len(meta)}"] = document
        return document

    def list(self, resource: Resource, selection: Selector) -> ObjectList:
        self.calls[f"list {resource.plural}"] += self.pages
        self.labels.append(selection.labels)
        self.now += self.takes_s
        if resource in self.problems:
            raise self.problems[resource]
        items = [obj for (kind, _), obj in self.objects.items() if kind == resource]
        return ObjectList(items, self.pages)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def phase(document: Document | None) -> str:
    assert document is not None
    return str(document["status"]["phase"])


def test_a_single_question_is_answered_by_two_lists(cluster: Cluster) -> None:
    cluster.add(JOBS, ref(1).job_id, "new")
    cluster.add(PODS, ref(1).job_id, "Running")
    snapshot = cluster.reader().read([ref(1)])
    assert (phase(snapshot.workload(ref(1))), snapshot.is_fresh) == ("new", True)
    assert [phase(pod) for pod in snapshot.pods_of(ref(1))] == ["Running"]
    assert cluster.calls == {"list jobs": 1, "list pods": 1}
    assert set(cluster.labels) == {selector([ref(1).job_id])}


def test_pods_are_not_listed_where_there_are_no_workloads(cluster: Cluster) -> None:
    assert cluster.reader().read([ref(1)]).workload(ref(1)) is None
    assert cluster.calls == {"list jobs": 1}


def test_a_later_question_gets_the_same_answer_for_some_seconds(cluster: Cluster) -> None:
    reader = cluster.reader()
    cluster.add(JOBS, ref(1).job_id, "new")
    reader.read([ref(1)])
    cluster.objects.clear()
    cluster.now += snapshot.FRESH_S / 2
    assert not reader.read([ref(1)]).is_fresh
    assert phase(reader.read([ref(1)]).workload(ref(1))) == "new"
    assert reader.read([ref(1)], fresh=True).workload(ref(1)) is None
    assert cluster.calls["list jobs"] == 2


@pytest.mark.parametrize("kinds", [(1,), (1, 4)])
@pytest.mark.parametrize("pages", [1, 3])
def test_two_hundred_followed_jobs_cost_at_most_sixty_requests_a_minute(
    cluster: Cluster, kinds: tuple[int, ...], pages: int
) -> None:
    """All 200 jobs wait: each is read once a second, with its events and the cluster's nodes."""
    cluster.pages = pages
    refs = [ref(number, kinds[number % len(kinds)]) for number in range(200)]
    for job in refs:
        cluster.add(JOBS if job.hosts == 1 else JOBSETS, job.job_id, "new")
    reader = cluster.reader()
    reader.read(refs)
    cluster.calls.clear()
    begun = cluster.now
    while cluster.now < begun + 60:
        for job in refs:
            snapshot = reader.read([job])
            assert phase(snapshot.workload(job)) == "new"
            assert (snapshot.context.events_of("x"), snapshot.context.nodes) == ([], [])
            cluster.now += 1 / len(refs)
    assert 0 < cluster.calls.total() <= 60


def test_a_slow_server_is_given_time(cluster: Cluster) -> None:
    cluster.takes_s = 5.0
    cluster.add(JOBS, ref(1).job_id, "new")
    reader = cluster.reader()
    reader.read([ref(1)])
    cluster.now += 10 / snapshot.BUSY_SHARE - 11
    assert not reader.read([ref(1)]).is_fresh
    cluster.now += 1
    assert reader.read([ref(1)]).is_fresh


def test_jobs_that_this_process_created_need_no_list(cluster: Cluster) -> None:
    reader = cluster.reader()
    cluster.add(JOBS, ref(0).job_id, "new")
    reader.read([ref(0)])
    for number in range(1, 60):
        reader.note_created(ref(number), cluster.add(JOBS, ref(number).job_id, "created"))
        assert phase(reader.read([ref(number)]).workload(ref(number))) == "created"
    assert cluster.calls["list jobs"] == 1
    cluster.objects = {k: v for k, v in cluster.objects.items() if ref(3).job_id not in k[1]}
    cluster.now += snapshot.FRESH_S
    assert reader.read([ref(3)]).workload(ref(3)) is None
    assert phase(reader.read([ref(4)]).workload(ref(4))) == "created"
    assert cluster.calls["list jobs"] == 2


def test_a_list_of_one_job_does_not_answer_for_another(cluster: Cluster) -> None:
    reader = cluster.reader()
    for number in (1, 2):
        cluster.add(JOBS, ref(number).job_id, "new")
    reader.read([ref(1)])
    assert reader.read([ref(2)]).is_fresh
    assert not reader.read([ref(1)]).is_fresh, "a list of several jobs has all of them"
    gang = ref(3, hosts=4)
    assert reader.read([gang]).is_fresh, "no JobSets were listed"


def test_the_jobs_of_a_jobset_are_not_its_workload(cluster: Cluster) -> None:
    gang = ref(2, hosts=4)
    cluster.add(JOBS, ref(1).job_id, "new")
    cluster.add(JOBSETS, gang.job_id, "the JobSet")
    cluster.add(JOBS, gang.job_id, "a Job of it", ownerReferences=[{"uid": "u"}])
    for refs in ([gang, ref(1)], [ref(1), gang]):
        assert phase(cluster.reader().read(refs).workload(gang)) == "the JobSet"


def test_threads_that_wait_share_a_list_or_its_failure(cluster: Cluster) -> None:
    cluster.add(JOBS, ref(1).job_id, "new")
    calls, ready = threading.Semaphore(0), threading.Event()
    list_now = cluster.list

    def clock() -> float:
        calls.release()
        return time.monotonic()

    def list_late(resource: Resource, selection: Selector) -> ObjectList:
        assert ready.wait(100)
        return list_now(resource, selection)

    cluster.list = list_late  # type: ignore[method-assign]
    reader = SnapshotReader(cluster, clock=clock)  # type: ignore[arg-type]
    for problem, error in ((None, None), (AWAY, BackendUnavailable)):
        ready.clear()
        if problem is not None:
            cluster.problems[JOBS] = problem
        cluster.calls.clear()
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(reader.read, [ref(1)], fresh=True) for _ in range(8)]
            for _ in range(8 + 1):  # The first thread has begun a list, the others wait.
                assert calls.acquire(timeout=100)
            ready.set()
            raised = [type(answer.exception()) for answer in answers]
        assert raised == [type(None) if error is None else error] * 8
        assert cluster.calls["list jobs"] <= 2
        while calls.acquire(blocking=False):
            pass


def test_what_may_not_be_listed_is_unknown(cluster: Cluster) -> None:
    cluster.problems |= {EVENTS: Forbidden("no"), QUEUE_WORKLOADS[0]: NotInstalled("no")}
    context = cluster.reader().read([ref(1)]).context
    assert (context.events_of("x"), context.queues) == ((), [])
    cluster.problems |= {QUEUE_WORKLOADS[1]: NotInstalled("no")}
    assert cluster.reader().read([ref(1)]).context.queues == ()
    cluster.problems |= {QUEUE_WORKLOADS[1]: Forbidden("no")}
    assert cluster.reader().read([ref(1)]).context.queues is None


def test_a_connection_has_one_reader() -> None:
    first, second = Cluster(), Cluster()
    reader = share_reader(first)  # type: ignore[arg-type]
    assert share_reader(first) is reader  # type: ignore[arg-type]
    assert share_reader(second) is not reader  # type: ignore[arg-type]


def test_a_session_of_one_host_is_a_jobset():
    """Its head is a pod of its own, so its workload must be looked for among the JobSets."""
    assert snapshot.resource_of(ref(1)) is JOBS
    assert snapshot.resource_of(replace(ref(1), has_head=True)) is JOBSETS
