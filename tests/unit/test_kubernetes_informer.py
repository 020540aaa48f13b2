"""One watch for each kind of object, whoever asks, with a scripted API."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kinetic._backends.kubernetes import informer
from kinetic._backends.kubernetes.api import Api, CallLimits, ObjectList, Selector
from kinetic._backends.kubernetes.errors import Busy, Forbidden, Refused
from kinetic._backends.kubernetes.informer import Informer, share_informer
from kinetic._backends.kubernetes.names import selector
from kinetic._backends.kubernetes.resources import JOBS, JOBSETS, PODS, Resource
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic.errors import BackendUnavailable

Document = dict[str, Any]
QUICK = CallLimits(first_s=0.001, most_s=0.01)
AWAY = BackendUnavailable("The server does not answer.")


def ref(number: int, hosts: int = 1) -> JobRef:
    job_id = f"job-{number:08x}"
    return JobRef(job_id, Place("gke"), "cpu", "f", "f", 0.0, "gs://b", hosts=hosts)


class Stream:
    """A watch: what is put in is told, until it is closed."""

    def __init__(self) -> None:
        self.told: queue.Queue[Document | Exception | None] = queue.Queue()

    def __iter__(self) -> Iterator[Document]:
        while (found := self.told.get()) is not None:
            if isinstance(found, Exception):
                raise found
            yield found
            self.told.task_done()
        self.told.task_done()

    def close(self) -> None:
        self.told.put(None)


class Cluster:
    """Objects with the label of a job; a clock."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.labels: set[str] = set()
        self.objects: dict[tuple[Resource, str], Document] = {}
        self.streams: dict[Resource, Stream] = {}
        self.problems: dict[str, Exception] = {}
        self.now = 100.0
        self.version = 0
        self.is_watched = threading.Semaphore(0)

    def live(self) -> Informer:
        api: Api = self  # type: ignore[assignment]
        return Informer(api, patience=QUICK, clock=lambda: self.now)

    def add(self, resource: Resource, job_id: str, phase: str, change: str = "ADDED") -> None:
        meta = {"uid": f"{resource.plural}-{job_id}", "labels": {"kinetic.dev/job-id": job_id}}
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        found = {"metadata": meta, "status": {"phase": phase}}
        self.objects[resource, job_id] = found
        if resource in self.streams:
            self.streams[resource].told.put({"type": change, "object": found})
            self.streams[resource].told.join()

    def list(self, resource: Resource, selection: Selector) -> ObjectList:
        self._called("list", resource, selection)
        found = [each for (kind, _), each in self.objects.items() if kind == resource]
        return ObjectList(found, str(self.version))

    def watch(self, resource: Resource, selection: Selector, *, resource_version: str) -> Stream:
        self._called("watch", resource, selection)
        self.streams[resource] = Stream()
        self.is_watched.release()
        return self.streams[resource]

    def _called(self, verb: str, resource: Resource, selection: Selector) -> None:
        self.calls[f"{verb} {resource.plural}"] += 1
        self.labels.add(selection.labels)
        if verb in self.problems:
            raise self.problems[verb]

    def watched(self, kinds: int = 2) -> None:
        """Wait until so many watches are open."""
        for _ in range(kinds):
            assert self.is_watched.acquire(timeout=100)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.now += 10 * informer.FOLLOWED_S
    for stream in made.streams.values():
        stream.close()


def phase(found: Document | None) -> str:
    assert found is not None
    return str(found["status"]["phase"])


def test_who_asks_once_gets_lists(cluster):
    cluster.add(JOBS, ref(1).job_id, "new")
    look = cluster.live().look([ref(1)])
    assert phase(look.workload(ref(1))) == "new"
    assert not look.is_remembered
    assert cluster.calls == {"list jobs": 1, "list pods": 1}
    assert cluster.labels == {selector([ref(1).job_id])}


def followed(cluster: Cluster, *refs: JobRef, kinds: int = 2) -> Informer:
    """Jobs that are watched."""
    for each in refs:
        cluster.add(JOBS if each.hosts == 1 else JOBSETS, each.job_id, "new")
    found = cluster.live()
    found.look(refs)
    found.look(refs)
    cluster.watched(kinds)
    return found


def test_who_asks_again_is_told_by_watches(cluster):
    found = followed(cluster, ref(1))
    cluster.calls.clear()
    assert phase(found.look([ref(1)]).workload(ref(1))) == "new"
    cluster.add(JOBS, ref(1).job_id, "changed", "MODIFIED")
    cluster.add(PODS, ref(1).job_id, "pod")
    look = found.look([ref(1)])
    assert look.is_remembered
    assert phase(look.workload(ref(1))) == "changed"
    assert [phase(pod) for pod in look.pods(ref(1))] == ["pod"]
    cluster.add(PODS, ref(1).job_id, "pod", "DELETED")
    assert not found.look([ref(1)]).pods(ref(1))
    assert not cluster.calls


def test_a_watch_that_is_late_tells_nothing_older_than_what_was_told(cluster):
    found = followed(cluster, ref(1))
    cluster.add(PODS, ref(1).job_id, "pending")
    streams, cluster.streams = cluster.streams, {}
    cluster.add(JOBS, ref(1).job_id, "changed", "MODIFIED")
    cluster.add(PODS, ref(1).job_id, "running", "MODIFIED")
    cluster.now += 1
    found.ask_now([ref(1)])
    cluster.streams = streams
    late = found.look([ref(1)])
    assert late.is_remembered
    assert phase(late.workload(ref(1))) == "changed"
    assert [phase(pod) for pod in late.pods(ref(1))] == ["running"]
    cluster.add(PODS, ref(1).job_id, "succeeded", "MODIFIED")
    assert [phase(pod) for pod in found.look([ref(1)]).pods(ref(1))] == ["succeeded"]
    cluster.add(PODS, ref(1).job_id, "succeeded", "DELETED")
    assert not found.look([ref(1)]).pods(ref(1))


def test_what_was_deleted_before_the_watch_began_stays_gone(cluster):
    cluster.add(JOBS, ref(1).job_id, "new")
    cluster.add(PODS, ref(1).job_id, "running")
    found = cluster.live()
    assert found.look([ref(1)]).pods(ref(1))
    cluster.objects.clear()
    cluster.version += 2
    found.look([ref(1)])
    cluster.watched()
    late = found.look([ref(1)])
    assert late.is_remembered
    assert (late.workload(ref(1)), late.pods(ref(1))) == (None, [])


def test_pods_that_a_late_watch_has_not_seen_are_there(cluster):
    found = followed(cluster, ref(1))
    streams, cluster.streams = cluster.streams, {}
    cluster.add(PODS, ref(1).job_id, "running")
    cluster.now += 1
    found.ask_now([ref(1)])
    cluster.streams = streams
    assert [phase(pod) for pod in found.look([ref(1)]).pods(ref(1))] == ["running"]
    for change in ("ADDED", "DELETED"):
        cluster.add(PODS, ref(1).job_id, "running", change)
    assert not found.look([ref(1)]).pods(ref(1))


def test_what_this_process_created_is_known_before_a_watch_tells_of_it(cluster):
    found = followed(cluster, ref(1), ref(2))
    streams, cluster.streams = cluster.streams, {}
    for number in range(3, 9):
        cluster.add(JOBS, ref(number).job_id, "new")
        found.note_created(ref(number), cluster.objects[JOBS, ref(number).job_id])
    found.ask_now([ref(1), ref(2)])
    cluster.streams = streams
    cluster.calls.clear()
    for number in range(3, 9):
        assert phase(found.look([ref(number)]).workload(ref(number))) == "new"
    assert not [call for call in cluster.calls if call.startswith("list")]
    cluster.add(JOBS, ref(3).job_id, "changed", "MODIFIED")
    assert phase(found.look([ref(3)]).workload(ref(3))) == "changed"
    cluster.add(JOBS, ref(3).job_id, "changed", "DELETED")
    assert found.look([ref(3)]).workload(ref(3)) is None


def test_until_the_watches_have_begun_one_list_a_second_serves_all_jobs(cluster):
    refs = [ref(number) for number in range(60)]
    begun: list[object] = []
    found = Informer(cluster, clock=lambda: cluster.now, start=begun.append)  # They never begin.
    for each in refs:
        cluster.add(JOBS, each.job_id, "new")
        found.note_created(each, cluster.objects[JOBS, each.job_id])
        assert phase(found.look([each]).workload(each)) == "new"
    assert begun
    for each in refs:
        assert phase(found.look([each]).workload(each)) == "new"
    assert cluster.calls["list jobs"] == 1
    cluster.objects.pop((JOBS, ref(3).job_id))
    cluster.now += informer.LIST_EVERY_S
    gone = [each for each in refs if found.look([each]).workload(each) is None]
    assert (gone, cluster.calls["list jobs"]) == ([ref(3)], 2)


def test_any_number_of_jobs_and_threads_has_one_watch_for_each_kind(cluster):
    refs = [ref(number) for number in range(200)]
    found = followed(cluster, *refs)
    cluster.calls.clear()
    with ThreadPoolExecutor(16) as pool:
        looks = list(pool.map(lambda each: found.look([each]), refs * 3))
    assert all(look.is_remembered for look in looks)
    assert not cluster.calls


def test_a_job_more_widens_the_watches(cluster):
    found = followed(cluster, ref(1))
    cluster.add(JOBS, ref(2).job_id, "new")
    for _ in range(2):
        found.look([ref(2)])
    cluster.watched()
    for _ in range(3):
        assert found.look([ref(1)]).is_remembered
        assert phase(found.look([ref(2)]).workload(ref(2))) == "new"
    assert cluster.labels == {selector([ref(1).job_id]), selector([ref(2).job_id]), selector(())}
    assert cluster.calls["watch pods"] == 2


def test_jobsets_are_a_kind_of_their_own(cluster):
    gang = ref(2, hosts=4)
    found = followed(cluster, ref(1), gang, kinds=3)
    cluster.add(JOBS, gang.job_id, "a Job of the JobSet")
    look = found.look([ref(1), gang])
    assert look.is_remembered
    assert phase(look.workload(gang)) == "new"
    assert phase(found.ask_now([ref(1), gang]).workload(gang)) == "new"


def test_without_the_right_to_watch_there_is_one_list_a_second(cluster):
    cluster.problems["watch"] = Forbidden("You may not watch.")
    refs = [ref(number) for number in range(20)]
    for each in refs:
        cluster.add(JOBS, each.job_id, "new")
    started: list[threading.Thread] = []

    def start(act):
        started.append(threading.Thread(target=act))
        started[-1].start()

    found = Informer(cluster, clock=lambda: cluster.now, start=start)
    for second in range(4):
        cluster.now += informer.LIST_EVERY_S
        for each in refs:
            assert phase(found.look([each]).workload(each)) == "new"
        for thread in started:
            thread.join()
        if second == 0:
            found.look(refs)
            cluster.calls.clear()
    assert cluster.calls["list jobs"] <= 3 + 2  # The watches of the first time list, too.
    assert not started[0].is_alive()


def test_a_server_that_restarts_is_not_noticed_and_one_that_is_gone_is(cluster):
    found = followed(cluster, ref(1))
    cluster.problems |= {"watch": AWAY, "list": AWAY}
    stopped = threading.Event()
    for stream in cluster.streams.values():
        stream.told.put(AWAY)
        stream.told.put(AWAY)
    while not all(cluster.calls[f"watch {kind}"] > 1 for kind in ("jobs", "pods")):
        stopped.wait(0.001)
    assert phase(found.look([ref(1)]).workload(ref(1))) == "new"
    cluster.now += 1.1 * informer.SILENT_S
    while _answers(found):
        stopped.wait(0.001)
    with pytest.raises(BackendUnavailable, match=str(AWAY)):
        found.look([ref(1)])
    cluster.problems.clear()
    while not _answers(found):
        stopped.wait(0.001)


@pytest.mark.parametrize("problem", [Busy("No watches now."), Refused("No watches here.")])
def test_where_only_watching_fails_one_list_a_second_serves_all_jobs(cluster, problem):
    found = followed(cluster, ref(1), ref(2))
    cluster.problems["watch"] = problem
    for stream in cluster.streams.values():
        stream.told.put(None)
    while not all(kind._silent_since for kind in found._kinds.values()):
        threading.Event().wait(0.001)
    cluster.now += 1.1 * informer.SILENT_S
    cluster.streams.clear()
    cluster.add(JOBS, ref(1).job_id, "changed", "MODIFIED")
    cluster.calls.clear()
    for _ in range(2):
        assert phase(found.look([ref(1)]).workload(ref(1))) == "changed"
        assert phase(found.look([ref(2)]).workload(ref(2))) == "new"
    assert cluster.calls["list jobs"] == 1


def test_what_was_deleted_stays_gone_while_a_broken_watch_pauses(cluster):
    for kind in (JOBS, PODS):
        cluster.add(kind, ref(1).job_id, "running")
    begun: list[Any] = []
    patience = CallLimits(first_s=1000.0, most_s=1000.0)
    found = Informer(cluster, patience=patience, clock=lambda: cluster.now, start=begun.append)
    for _ in range(2):
        assert found.look([ref(1)]).pods(ref(1))
    for run in begun:
        threading.Thread(target=run, daemon=True).start()
    cluster.watched()
    cluster.add(PODS, ref(1).job_id, "running", "DELETED")
    for stream in cluster.streams.values():
        stream.told.put({"type": "ERROR", "object": {"code": 500}})
    kinds = found._kinds.values()
    while any(kind._watcher.version for kind in kinds):
        threading.Event().wait(0.001)
    pods = found.look([ref(1)]).pods(ref(1))
    for kind in kinds:
        kind.close()
    assert not pods


def _answers(found: Informer) -> bool:
    try:
        return found.look([ref(1)]).is_remembered
    except BackendUnavailable:
        return False


def test_watches_that_nobody_needs_end_and_begin_again(cluster):
    found = followed(cluster, ref(1))
    cluster.now += 2 * informer.FOLLOWED_S
    for stream in cluster.streams.values():
        stream.told.put(None)
    while any(not kind.is_over for kind in found._kinds.values()):
        threading.Event().wait(0.001)
    assert not found.look([ref(1)]).is_remembered
    found.look([ref(1)])
    cluster.watched()
    assert cluster.calls["watch pods"] == 2


def test_a_connection_has_one():
    first, second = Cluster(), Cluster()
    found = share_informer(first)
    assert share_informer(first) is found
    assert share_informer(second) is not found
