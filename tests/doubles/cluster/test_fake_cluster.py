"""Jobs and JobSets on the double of a cluster, as the official client sees them."""

from __future__ import annotations

import os

import pytest
from kubernetes import client, config, watch

from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job, job_set


@pytest.fixture
def api(cluster):
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield connection


@pytest.fixture
def jobs(api):
    return client.BatchV1Api(api)


@pytest.fixture
def core(api):
    return client.CoreV1Api(api)


@pytest.fixture
def job_sets(api):
    custom = client.CustomObjectsApi(api)

    def create(body):
        return custom.create_namespaced_custom_object(
            "jobset.x-k8s.io", "v1alpha2", "default", "jobsets", body
        )

    return create


def pods_of(cluster: FakeCluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in cluster.objects("pods")]


def test_a_job_runs_to_its_end(cluster, jobs, core) -> None:
    jobs.create_namespaced_job("default", job("hello", "echo hi $NAME", env={"NAME": "you"}))
    done = cluster.wait_for_condition("jobs", "hello", "Complete")
    kinds = [condition["type"] for condition in done["status"]["conditions"]]
    assert kinds == ["SuccessCriteriaMet", "Complete"]
    (pod,) = core.list_namespaced_pod("default").items
    assert pod.status.phase == "Succeeded"
    assert core.read_namespaced_pod_log(pod.metadata.name, "default") == "hi you\n"


def test_a_failed_pod_says_why(cluster, jobs) -> None:
    jobs.create_namespaced_job("default", job("boom", "echo no; exit 3"))
    failed = cluster.wait_for_condition("jobs", "boom", "Failed")
    assert [c["type"] for c in failed["status"]["conditions"]] == ["FailureTarget", "Failed"]
    (pod,) = cluster.objects("pods")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "no\n")


def test_pods_of_a_job_set_find_each_other(cluster, job_sets) -> None:
    env = {"LEADER": "train-host-0-0.train:7777"}
    job_sets(job_set("train", 'echo "$JOB_COMPLETION_INDEX $LEADER $IP"', hosts=4, env=env))
    cluster.wait_for_condition("jobsets", "train", "Completed")
    lines = [cluster.log(pod).split() for pod in pods_of(cluster)]
    assert [line[0] for line in lines] == ["0", "1", "2", "3"]
    assert {line[1] for line in lines} == {f"{lines[0][2]}:7777"}
    assert len({line[2] for line in lines}) == 4


def test_a_watch_tells_a_job_s_whole_life(cluster, jobs) -> None:
    before = jobs.list_namespaced_job("default").metadata.resource_version
    jobs.create_namespaced_job("default", job("hello", "true"))
    seen = []
    stream = watch.Watch()
    for event in stream.stream(
        jobs.list_namespaced_job, "default", resource_version=before, timeout_seconds=60
    ):
        seen.append(event["type"])
        if any(c.type == "Complete" for c in event["object"].status.conditions or ()):
            stream.stop()
    assert seen[0] == "ADDED"
    assert set(seen[1:]) == {"MODIFIED"}


def test_a_log_is_followed_until_the_end(cluster, jobs, core) -> None:
    jobs.create_namespaced_job("default", job("slow", "for i in 1 2 3; do echo $i; done; sleep 1"))
    cluster.wait_for(
        lambda: any(p["status"]["phase"] == "Running" for p in cluster.objects("pods"))
    )
    (name,) = pods_of(cluster)
    stream = core.read_namespaced_pod_log(
        name, "default", follow=True, timestamps=True, _preload_content=False
    )
    lines = b"".join(stream.stream()).decode().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["1", "2", "3"]


def test_a_deleted_job_takes_its_pods_along(cluster, jobs) -> None:
    jobs.create_namespaced_job("default", job("run", "sleep 600"))
    cluster.wait_for(
        lambda: any(p["status"]["phase"] == "Running" for p in cluster.objects("pods"))
    )
    process = cluster.pid(pods_of(cluster)[0])
    jobs.delete_namespaced_job("run", "default", propagation_policy="Foreground")
    cluster.wait_for(lambda: cluster.left_over() == [])
    assert not os.path.exists(f"/proc/{process}/exe")


def test_a_missing_definition_is_no_json(cluster, api) -> None:
    cluster.remove_job_sets()
    custom = client.CustomObjectsApi(api)
    with pytest.raises(client.ApiException) as caught:
        custom.list_namespaced_custom_object("jobset.x-k8s.io", "v1alpha2", "default", "jobsets")
    assert (caught.value.status, caught.value.body) == (404, "404 page not found\n")
