"""The number of API requests for one waiting job, and the reasons that are given for its wait, with
a scripted API and a fake clock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from doubles.memory_store import MemoryStore
from manifest_cases import SETTINGS, planned
from test_kubernetes_waiting import SHORT, START, jobset, node, pod, running_pod

from kinetic._backends.kubernetes.api import ObjectList, Selector
from kinetic._backends.kubernetes.backend import KubernetesBackend
from kinetic._backends.kubernetes.errors import Forbidden
from kinetic._backends.kubernetes.names import labels_of
from kinetic._backends.kubernetes.resources import (
    EVENTS,
    JOBS,
    JOBSETS,
    NODES,
    PODS,
    QUEUE_WORKLOADS,
    Resource,
)
from kinetic._backends.kubernetes.snapshot import SnapshotReader
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._host import verdicts

Document = dict[str, Any]
A_MINUTE = 20
"""The highest number of API requests allowed in a minute."""


class Waiting:
    """A waiting job of four hosts, the objects of its cluster, and its API requests by kind."""

    namespace = "ml"

    def __init__(self) -> None:
        self.plan = planned("tpu-v6e-16")
        self.store, self.at = MemoryStore(), START
        place, job_id = self.plan.place, self.plan.job_id
        self.ref = JobRef(job_id, place, "x", "f", "f", 0.0, self.store.uri, hosts=4)
        self.store.put(layout.JobKeys(job_id).plan, json.dumps(self.plan.to_json()).encode())
        self.requests: Counter[str] = Counter()
        self.fields: list[str] = []
        self.refused: set[Resource] = set()
        self.workload = self.own(jobset())
        self.objects: dict[Resource, list[Document]] = {JOBSETS: [self.workload]}
        self.backend = KubernetesBackend("pathways", self.store, SETTINGS, lambda: self)  # type: ignore[arg-type, return-value]
        self.backend._opened = SnapshotReader(self, clock=lambda: self.at)  # type: ignore[arg-type]

    def own(self, thing: Document) -> Document:
        thing["metadata"].setdefault("labels", {}).update(labels_of(self.plan.job_id))
        return thing

    def now(self) -> float:
        return self.at

    def list(self, resource: Resource, selection: Selector) -> ObjectList:
        self.requests[resource.plural] += 1
        if resource in self.refused:
            raise Forbidden("You may not.")
        if resource is EVENTS:
            self.fields.append(selection.fields)
        return ObjectList(self.objects.get(resource, ()))

    def status(self) -> Any:
        return self.backend.status([self.ref])[self.ref.job_id]

    def follow(self, seconds: int) -> None:
        """Read the status four times a second, as a follower of the job does."""
        for _ in range(4 * seconds):
            assert self.status().phase is JobStatus.PENDING
            self.at += 0.25


def lack_nodes(job: Waiting) -> None:
    job.objects |= {
        PODS: [job.own(pod(host, SHORT)) for host in range(4)],
        NODES: [node(f"n{n}", "tpu", "4x4") for n in range(4)],
    }


def lack_pods(job: Waiting) -> None:
    pass


def pull_images(job: Waiting) -> None:
    state = {"waiting": {"reason": "ContainerCreating"}}
    own = [{"name": "main", "state": state}]
    pods = [pod(host, node=f"n{host}", containerStatuses=own) for host in range(4)]
    job.objects[PODS] = [job.own(waiting_pod) for waiting_pod in pods]


def start_again(job: Waiting) -> None:
    job.workload["status"]["restarts"] = 1


def queue_up(job: Waiting) -> None:
    job.workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "lq"
    job.workload["spec"]["suspend"] = True
    owner = {"ownerReferences": [{"uid": "u"}], "name": "w"}
    job.objects[QUEUE_WORKLOADS[0]] = [{"metadata": owner, "spec": {"queueName": "lq"}}]


def queue_in_vain(job: Waiting) -> None:
    queue_up(job)
    job.objects[QUEUE_WORKLOADS[0]] = []


@pytest.mark.parametrize(
    "wait", [lack_nodes, lack_pods, pull_images, start_again, queue_up, queue_in_vain]
)
def test_a_job_that_waits_asks_twenty_times_a_minute(wait: Callable[[Waiting], None]) -> None:
    job = Waiting()
    wait(job)
    for minute in range(3):
        job.requests.clear()
        job.follow(60)
        assert 4 <= job.requests.total() <= A_MINUTE, (minute, job.requests)
    assert all(field.startswith("involvedObject.name=kinetic-job-1") for field in job.fields)
    if wait in (queue_up, queue_in_vain):
        assert not job.requests["nodes"] + job.requests["pods"], "a suspended job has none"


def test_who_waits_for_long_hears_at_once_that_the_job_runs() -> None:
    job = Waiting()
    lack_nodes(job)
    job.follow(100)
    job.objects[PODS] = [job.own(running_pod(host, 30)) for host in range(4)]
    verdicts.write_event(job.store, job.ref.job_id, 1, GangEvent(EventKind.READY))
    job.status()
    job.at += 5
    assert job.status().phase is JobStatus.RUNNING


def test_a_queue_that_preempted_a_job_is_the_reason_of_its_end() -> None:
    job = Waiting()
    queue_up(job)
    evicted = {"type": "Preempted", "status": "True", "reason": "InClusterQueue"}
    evicted["message"] = "Preempted to accommodate a workload (UID: x) due to prioritization"
    (queued,) = job.objects[QUEUE_WORKLOADS[0]]
    queued["status"] = {"conditions": [evicted]}
    reason = job.backend.why_lost(job.ref, 0)
    assert reason == f"The queue 'lq' evicted the job: \"{evicted['message']}\"."
    job.refused = set(QUEUE_WORKLOADS)
    assert job.backend.why_lost(job.ref, 0) == "", "that it waits again is no reason"


def test_jobs_are_listed_for_a_job_that_was_started_again_only() -> None:
    job = Waiting()
    job.status()
    assert job.requests["jobs"] == 0
    start_again(job)
    job.at += 5
    job.status()
    assert job.requests[JOBS.plural] == 1
