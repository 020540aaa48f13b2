"""Jobs in queues of Kueue: admitted, waiting, refused, in an unknown queue, and many at once."""

from __future__ import annotations

import pytest
from kubernetes import client, config

from doubles.cluster.manifests import job
from doubles.cluster.nodes import NodePool
from doubles.cluster.objects import Object, condition

CHIPS = {"resources": {"limits": {"google.com/tpu": "4"}}}


@pytest.fixture
def jobs(cluster):
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield client.BatchV1Api(connection)


def queued(name: str, command: str, queue: str = "lq", pods: int = 1) -> Object:
    body = job(name, command, pod=CHIPS, parallelism=pods, completions=pods)
    body["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue}
    return body


def reason(cluster, name: str) -> str | None:
    for workload in cluster.objects("workloads"):
        if workload["metadata"]["ownerReferences"][0]["name"] == name:
            held = condition(workload, "QuotaReserved")
            return held and held["reason"]
    return None


def test_what_fits_runs_and_the_rest_says_what_it_waits_for(cluster, jobs) -> None:
    cluster.install_kueue({"lq": {"google.com/tpu": "4"}})
    command = "while [ ! -e $SHARED/go ]; do sleep 0.05; done"
    created = jobs.create_namespaced_job("default", queued("first", command))
    assert created.spec.suspend is True
    # Workloads that were created in the same second have no fixed order.
    cluster.wait_for(lambda: reason(cluster, "first") == "QuotaReserved")
    jobs.create_namespaced_job("default", queued("second", command))
    jobs.create_namespaced_job("default", queued("large", command, pods=2))
    jobs.create_namespaced_job("default", queued("lost", command, "nosuch"))
    wanted = ["QuotaReserved", "WaitingForQuota", "ExceedsMaxQuota", "Misconfigured"]
    names = ["first", "second", "large", "lost"]
    cluster.wait_for(lambda: [reason(cluster, name) for name in names] == wanted)
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("jobs", "second", "Complete")


@pytest.mark.cluster(pools=[NodePool("cpu", 2)])
def test_many_jobs_at_once(cluster, jobs) -> None:
    names = [f"job-{number}" for number in range(60)]
    for name in names:
        jobs.create_namespaced_job("default", job(name, "true"))
    for name in names:
        cluster.wait_for_condition("jobs", name, "Complete")
