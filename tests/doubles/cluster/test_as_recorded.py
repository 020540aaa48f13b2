"""The double goes through the same states after a request as a real control plane.

Requests and the states that followed were recorded with Kubernetes 1.36 and JobSet 0.12. The tests
send the requests with short programs instead of the recorded ones, and compare the states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config

from doubles.cluster.fake import FakeCluster
from doubles.cluster.life import Row, difference, lives
from doubles.cluster.nodes import CPU_POOL, V6E_4X4, NodePool
from doubles.cluster.objects import Object, clone, dig, is_true

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
ENDLESS = "echo ready; while :; do sleep 0.05; done"
Step = Callable[["Run"], None]


class Run:
    """A recorded request that was sent to a cluster."""

    def __init__(self, cluster: FakeCluster, request: Object) -> None:
        self.cluster, self.request = cluster, request
        self.rows: list[Row] = []
        cluster.store.listeners.append(
            lambda change: self.rows.append(
                (change.resource.plural, change.type, clone(change.object))
            )
        )
        self.api = config.new_client_from_config(str(cluster.kubeconfig))
        self.plural = "jobsets" if request["kind"] == "JobSet" else "jobs"
        self.name = request["metadata"]["name"]

    def create(self) -> None:
        if self.plural == "jobs":
            client.BatchV1Api(self.api).create_namespaced_job("ml", self.request)
        else:
            self._custom().create_namespaced_custom_object(*self._where(), self.request)

    def _custom(self) -> Any:
        return client.CustomObjectsApi(self.api)

    def _where(self) -> tuple[str, ...]:
        return "jobset.x-k8s.io", "v1alpha2", "ml", "jobsets"

    def delete(self, policy: str | None) -> None:
        more = {"propagation_policy": policy} if policy else {}
        if self.plural == "jobs":
            client.BatchV1Api(self.api).delete_namespaced_job(self.name, "ml", **more)
        else:
            self._custom().delete_namespaced_custom_object(*self._where(), self.name, **more)

    def suspend(self, suspended: bool) -> None:
        patch = {"spec": {"suspend": suspended}}
        if self.plural == "jobs":
            client.BatchV1Api(self.api).patch_namespaced_job(self.name, "ml", patch)
        else:
            self._custom().patch_namespaced_custom_object(*self._where(), self.name, patch)

    def until(self, condition: Callable[[], object]) -> None:
        self.cluster.wait_for(condition, what=f"{self.name}: {condition}")

    def pods(self) -> list[Object]:
        return self.cluster.objects("pods")


def ended(run: Run) -> None:
    """Wait until the object is Complete, Completed or Failed, and until nothing more follows."""

    def look() -> bool:
        obj = run.cluster.object(run.plural, run.name)
        return obj is not None and any(is_true(obj, c) for c in ("Complete", "Completed", "Failed"))

    run.until(look)


def gone(run: Run) -> None:
    run.until(lambda: run.cluster.left_over() == [])


def running(count: int) -> Step:
    def step(run: Run) -> None:
        run.until(lambda: [p["status"]["phase"] for p in run.pods()].count("Running") == count)
        if ENDLESS in json.dumps(run.request):  # Wait until its signal handlers are set.
            run.until(
                lambda: all(
                    run.cluster.log(p["metadata"]["name"])
                    for p in run.pods()
                    if p["status"]["phase"] == "Running"
                )
            )
        all_ready = run.plural == "jobs" or count == dig(
            run.request, "spec", "replicatedJobs", 0, "template", "spec", "parallelism"
        )
        if all_ready:
            run.until(
                lambda: (
                    sum(j["status"].get("ready", 0) for j in run.cluster.objects("jobs")) >= count
                )
            )

    return step


def said(reason: str, count: int = 1) -> Step:
    def step(run: Run) -> None:
        run.until(
            lambda: any(
                e["reason"] == reason and e.get("count", 1) >= count
                for e in run.cluster.objects("events")
            )
        )

    return step


def waiting(*reasons: str) -> Step:
    def is_waiting(run: Run, reason: str) -> bool:
        states = [dig(p, "status", "containerStatuses", 0, "state") for p in run.pods()]
        return any(dig(state, "waiting", "reason") == reason for state in states)

    def step(run: Run) -> None:
        for reason in reasons:
            run.until(partial(is_waiting, run, reason))

    return step


def deleted(policy: str | None = None) -> Step:
    return lambda run: run.delete(policy)


def suspended(value: bool) -> Step:
    return lambda run: run.suspend(value)


def one_pod_ended(run: Run) -> None:
    run.until(lambda: all(p["status"]["phase"] in ("Succeeded", "Failed") for p in run.pods()))


def no_pods(run: Run) -> None:
    run.until(lambda: run.pods() == [])
    run.until(lambda: all(j["status"].get("terminating") == 0 for j in run.cluster.objects("jobs")))


def is_suspended(run: Run) -> None:
    run.until(
        lambda: all(
            row["suspended"] == 1
            for row in dig(
                run.cluster.object(run.plural, run.name),
                "status",
                "replicatedJobsStatus",
                default=[{"suspended": 0}],
            )
        )
    )


def evicted(run: Run) -> None:
    (pod,) = run.pods()
    name = pod["metadata"]["name"]
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name))
    client.CoreV1Api(run.api).create_namespaced_pod_eviction(name, "ml", body)


def out_of_memory(run: Run) -> None:
    (pod,) = run.pods()
    run.cluster.kill_pod_process(pod["metadata"]["name"], oom=True)


@dataclass
class Case:
    """A recording: the pods' commands, the order of events, and the states not to compare."""

    program: str = "sleep 0.2"
    steps: tuple[Step, ...] = (ended,)
    change: dict[str, Any] = field(default_factory=dict)
    deaf: bool = False
    without: str = ""
    """Text of states and Events that are not compared, because they depend on speed."""
    pools: tuple[NodePool, ...] = (CPU_POOL, V6E_4X4)
    quota: dict[str, str] = field(default_factory=dict)


def node_lost(run: Run) -> None:
    (pod,) = [p for p in run.pods() if p["metadata"]["generateName"] == "train-host-0-1-"]
    node = pod["spec"]["nodeName"]
    run.cluster.lose_node(node)
    run.until(
        lambda: [p["metadata"].get("deletionTimestamp") is None for p in run.pods()] == [False]
    )
    run.until(lambda: [j["status"].get("terminating") for j in run.cluster.objects("jobs")] == [1])
    run.cluster.delete_node(node)


TWO_SLICES = tuple(NodePool(f"tpu-2x4-{letter}", 2, "tpu-v6e-slice", "2x4", 4) for letter in "ab")
CASES = {
    "01-job-success": Case(),
    "02-job-exit-1": Case("sleep 0.1; exit 1"),
    "03-job-sigkill-oom": Case(ENDLESS, (running(1), out_of_memory, ended)),
    "04-job-unschedulable": Case(steps=(said("FailedScheduling"),)),
    "05-job-image-pull": Case(
        steps=(waiting("ErrImagePull", "ImagePullBackOff", "ErrImagePull", "ImagePullBackOff"),)
    ),
    "06-job-ttl": Case(steps=(gone,), change={"ttlSecondsAfterFinished": 1}),
    "07a-job-deleted-foreground": Case(
        "trap 'exit 143' TERM; " + ENDLESS, (running(1), deleted("Foreground"), gone)
    ),
    "07b-job-deleted-background": Case(
        ENDLESS, (running(1), deleted("Background"), gone), {"grace": 1}, deaf=True
    ),
    "07c-job-deleted-no-policy-orphans": Case("sleep 0.5", (running(1), deleted(), one_pod_ended)),
    "08-jobset-4-hosts-success": Case("sleep 0.3", (ended, gone), {"ttlSecondsAfterFinished": 1}),
    "09-jobset-host-2-fails": Case(
        "trap 'exit 143' TERM; [ $JOB_COMPLETION_INDEX = 2 ] && sleep 0.5 && exit 42; " + ENDLESS
    ),
    "10-jobset-restart": Case(
        "trap 'exit 0' TERM; [ $ATTEMPT$JOB_COMPLETION_INDEX = 01 ] && sleep 0.3 && exit 1;"
        " sleep 0.2; [ $ATTEMPT = 1 ] && exit; " + ENDLESS
    ),
    "10b-jobset-restarts-exhausted": Case("sleep 0.2; exit 7", without="JobsReady"),
    "11-jobset-2-slices": Case("sleep 0.3", pools=(CPU_POOL, *TWO_SLICES)),
    "13-jobset-partial-unschedulable": Case(ENDLESS, (running(4), said("FailedScheduling"))),
    "14a-jobset-deleted-default": Case(
        "trap 'exit 0' TERM; " + ENDLESS, (running(2), deleted(), gone)
    ),
    "14b-jobset-deleted-foreground": Case(
        "trap 'exit 0' TERM; " + ENDLESS, (running(2), deleted("Foreground"), gone)
    ),
    "15-node-death": Case(
        "trap 'exit 143' TERM; [ $ATTEMPT = 1 ] && sleep 0.3 && exit; " + ENDLESS,
        (running(2), node_lost, ended),
    ),
    "15b-job-pod-evicted": Case(
        "[ -e $SHARED/second ] && sleep 0.2 && exit; touch $SHARED/second; trap 'exit 143' TERM; "
        + ENDLESS,
        (running(1), evicted, ended),
    ),
    "16a-jobset-created-suspended": Case("sleep 0.2", (is_suspended, suspended(False), ended)),
    "16b-job-suspended-while-running": Case(
        "[ -e $SHARED/second ] && sleep 0.2 && exit; touch $SHARED/second; trap 'exit 0' TERM; "
        + ENDLESS,
        (running(1), suspended(True), no_pods, suspended(False), ended),
    ),
    "17b-job-over-quota": Case("sleep 0.3", quota={"requests.google.com/tpu": "4"}),
    "21-job-bad-command": Case(),
    "22-job-missing-secret": Case(steps=(waiting("CreateContainerConfigError"),)),
    "23-job-missing-configmap-volume": Case(steps=(said("FailedMount", 3),)),
    "24-job-deadline": Case(
        "trap 'exit 143' TERM; " + ENDLESS, change={"activeDeadlineSeconds": 2}
    ),
    "25-job-retries": Case("exit 3"),
    "26-job-restart-on-failure": Case("sleep 0.1; exit 3", deaf=True),
}


TRIES = 10
"""Number of times to play a recording. On a busy machine, two programs may end at once, and the
recorded state between their ends is missing."""


@contextmanager
def prepared(name: str) -> Iterator[tuple[Run, Case, dict[str, list[str]]]]:
    case, recorded = CASES[name], clone(RECORDED[name])
    body = recorded["request"]
    for spec in pod_specs(body):
        for container in spec["containers"]:
            if container["command"] == ["stub"]:
                container["command"] = ["sh", "-c", case.program]
        if "grace" in case.change:
            spec["terminationGracePeriodSeconds"] = case.change["grace"]
    body["spec"] |= {k: v for k, v in case.change.items() if k != "grace"}
    with FakeCluster(case.pools, namespaces=["ml"], deaf=case.deaf) as cluster:
        if case.quota:
            cluster.add_quota("tpu", case.quota, "ml")
        run = Run(cluster, body)
        with run.api:
            yield run, case, recorded["lives"]
        assert cluster.crashes == []


def pod_specs(obj: Any) -> Iterator[Object]:
    if isinstance(obj, dict):
        if "containers" in obj:
            yield obj
        for value in obj.values():
            yield from pod_specs(value)
    elif isinstance(obj, list):
        for value in obj:
            yield from pod_specs(value)


def played(name: str) -> str:
    """Play a recording once; describe how the states differ from the recorded ones."""
    with prepared(name) as (run, case, expected):
        run.create()
        for step in case.steps:
            step(run)
        run.cluster.engine.settle()
        with run.cluster.store.lock:
            rows = list(run.rows)
        states_now = lives(rows)
        for states in (*states_now.values(), *expected.values()):
            states[:] = [s for s in states if not case.without or case.without not in s]
        return difference(states_now, expected)


@pytest.mark.parametrize("name", CASES)
def test_states_follow_each_other_as_recorded(name: str) -> None:
    for _ in range(TRIES):
        if not (differs := played(name)):
            return
    assert differs == ""
