"""The loss of a leader's pod is noticed at once, before the other pods have ended. In these tests,
pods on the double of a cluster take long to end.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

pytest.importorskip("kubernetes_validate")

from doubles.cluster.fake import FakeCluster
from doubles.cluster.objects import is_true
from doubles.memory_store import MemoryStore
from manifest_cases import SETTINGS, planned

from kinetic._backends.base import Status
from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.backend import KubernetesBackend
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._core import layout
from kinetic._core.events import EventKind, GangEvent
from kinetic._core.outcome import Outcome, Verdict
from kinetic._core.place import Place
from kinetic._core.plan import Limits
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus
from kinetic._host import verdicts

SLOW = Limits(grace_s=600.0)
pytestmark = pytest.mark.cluster(deaf=True)


class Gang:
    """Four running pods, and the records of their leader."""

    def __init__(self, cluster: FakeCluster, *, retries: int = 0) -> None:
        self.cluster, self.store = cluster, MemoryStore()
        self.plan = planned("tpu-v6e-16", retries=retries, limits=SLOW, place=Place("pathways"))
        plan = self.plan
        self.ref = JobRef(plan.job_id, plan.place, "x", "f", "f", 0.0, self.store.uri, hosts=4)
        variables = {"KUBECONFIG": str(cluster.kubeconfig)}
        access = kubeconfig.find(variables)
        asleep = "import time; time.sleep(1000)"
        settings = replace(SETTINGS, simulated=True, python=sys.executable, bootstrap=asleep)
        self.backend = KubernetesBackend(
            "pathways", self.store, settings, lambda: HttpApi(access, variables)
        )
        self.store.put(layout.JobKeys(plan.job_id).plan, json.dumps(plan.to_json()).encode())
        self.backend.submit(self.ref, self.backend.render(plan), {})
        cluster.wait_for(lambda: len(self.running()) == 4)

    def running(self) -> list[str]:
        pods = self.cluster.objects("pods")
        return [p["metadata"]["name"] for p in pods if p["status"].get("phase") == "Running"]

    def begins(self, attempt: int = 1) -> None:
        verdicts.write_event(
            self.store, self.plan.job_id, attempt, GangEvent(EventKind.JOINED, host=0)
        )

    def loses_its_leader(self) -> None:
        (name,) = (name for name in self.running() if "-host-0-0-" in name)
        self.cluster.delete_pod(name, force=True)

    def status(self) -> Status:
        return self.backend.status([self.ref])[self.plan.job_id]

    def is_over(self) -> bool:
        """True if the pods have ended, so that the cluster reports the failure."""
        return any(is_true(jobset, "Failed") for jobset in self.cluster.objects("jobsets"))


@pytest.mark.starts_processes
def test_a_leader_that_was_killed_with_its_pod_is_found_before_the_other_pods_end(
    cluster: FakeCluster,
) -> None:
    gang = Gang(cluster)
    gang.begins()
    assert gang.status().phase is JobStatus.RUNNING
    gang.loses_its_leader()
    cluster.wait_for(lambda: gang.status().phase is JobStatus.FAILED)
    assert not gang.is_over()
    (lost,) = (host for host in gang.status().hosts if host.phase is JobStatus.FAILED)
    assert lost.host == 0
    assert "its pod was deleted" in gang.status().reason


def test_a_leader_that_has_begun_nothing_may_come_again(cluster: FakeCluster) -> None:
    gang = Gang(cluster)
    gang.loses_its_leader()
    cluster.wait_for(lambda: len(gang.running()) == 3)
    assert not gang.status().phase.ended


def test_with_attempts_left_the_cluster_starts_the_gang_again(cluster: FakeCluster) -> None:
    gang = Gang(cluster, retries=1)
    gang.begins()
    gang.loses_its_leader()
    cluster.wait_for(lambda: "its pod was deleted" in gang.status().reason)
    assert gang.status().phase is JobStatus.RUNNING
    lost = Outcome(Verdict.FAILED, (0,), "lost", attempt=1)
    verdicts.repeat(gang.store, gang.plan.job_id, lost)
    assert gang.status().phase is JobStatus.RUNNING, "the last one is due, and has not begun"
    gang.begins(2)
    assert gang.status().phase is JobStatus.FAILED
