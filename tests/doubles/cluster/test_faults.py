"""Faults of the double: requests, streams, tokens, the server, pods and nodes fail on request.

The tests check the effects that the official client sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3
from kubernetes import client, config

from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job, job_set
from doubles.cluster.objects import dig


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


def run_one(cluster: FakeCluster, jobs, command: str, name: str = "run", **spec) -> str:
    """Create a Job, wait until its pod runs, and return the pod's name."""
    jobs.create_namespaced_job("default", job(name, command, **spec))
    cluster.wait_for(lambda: is_ready(cluster, name), what="the pod runs")
    return pods_of(cluster, name)[0]


def pods_of(cluster: FakeCluster, name: str) -> list[str]:
    names = [pod["metadata"]["name"] for pod in cluster.objects("pods")]
    return [pod for pod in names if pod.startswith(f"{name}-")]


def is_ready(cluster: FakeCluster, name: str) -> bool:
    document = cluster.object("jobs", name)
    return document is not None and document["status"].get("ready") == 1


def test_answers_fail_as_often_as_wanted(cluster, core) -> None:
    cluster.faults.fail(500, times=2, verb="list", resource="pods")
    for _ in range(2):
        with pytest.raises(client.ApiException) as caught:
            core.list_namespaced_pod("default")
        assert caught.value.status == 500
    assert core.list_namespaced_pod("default").items == []


@pytest.mark.parametrize("code", [429, 503])
def test_a_client_told_when_to_retry_does(cluster, core, code) -> None:
    cluster.faults.fail(code, times=2, retry_after=0)
    assert core.list_namespaced_pod("default").items == []
    assert [request.code for request in cluster.requests] == [code, code, 200]


def test_an_answer_can_get_lost_after_the_deed(cluster, jobs) -> None:
    cluster.faults.fail(504, verb="create", resource="jobs", after=True)
    with pytest.raises(client.ApiException):
        jobs.create_namespaced_job("default", job("run", "true"))
    assert cluster.object("jobs", "run") is not None


def watched(core, **more):
    return core.list_namespaced_pod(
        "default", watch=True, _preload_content=False, timeout_seconds=60, **more
    )


@pytest.mark.parametrize("where", ["end", "line", "chunk", "reset"])
def test_watches_break(cluster, jobs, core, where) -> None:
    run_one(cluster, jobs, "sleep 600")
    stream = watched(core)
    pieces = stream.stream()
    whole = next(pieces)
    assert cluster.faults.drop_watches("pods", where=where) == 1
    rest = b""
    try:
        for piece in pieces:
            rest += piece
    except urllib3.exceptions.HTTPError:
        assert where in ("chunk", "reset")
    else:
        assert where in ("end", "line")
    assert whole.endswith(b"\n")
    assert not rest.endswith(b"\n")


def test_a_watch_from_before_the_compaction_is_gone(cluster, jobs, core) -> None:
    version = core.list_namespaced_pod("default").metadata.resource_version
    run_one(cluster, jobs, "sleep 600")
    cluster.compact()
    lines = watched(core, resource_version=version).data.splitlines()
    assert len(lines) == 1
    assert b'"code":410' in lines[0]


def test_logs_break_within_a_line(cluster, jobs, core) -> None:
    name = run_one(cluster, jobs, "echo 0123456789; sleep 600")
    stream = core.read_namespaced_pod_log(name, "default", follow=True, _preload_content=False)
    pieces = stream.stream()
    assert next(pieces) == b"0123456789\n"
    assert cluster.faults.drop_logs(where="line") == 1
    assert b"".join(pieces) == b"01234"


def test_the_server_restarts_and_pods_go_on(cluster, jobs, core) -> None:
    name = run_one(cluster, jobs, "while [ ! -e $SHARED/go ]; do sleep 0.05; done; echo done")
    stream = watched(core)
    next(stream.stream())
    cluster.stop_server()
    with pytest.raises(urllib3.exceptions.HTTPError):
        core.read_namespaced_pod(name, "default")
    (cluster.folder / "go").touch()
    cluster.wait_for_condition("jobs", "run", "Complete")
    cluster.start_server()
    assert core.read_namespaced_pod_log(name, "default") == "done\n"


def test_an_expired_token_is_refused_until_there_is_a_new_one(cluster, core) -> None:
    cluster.expire_token()
    with pytest.raises(client.ApiException) as caught:
        core.list_namespaced_pod("default")
    assert caught.value.status == 401
    cluster.renew_token()
    with config.new_client_from_config(str(cluster.kubeconfig)) as renewed:
        assert client.CoreV1Api(renewed).list_namespaced_pod("default").items == []


def test_a_token_may_come_from_a_program(cluster) -> None:
    path = cluster.write_kubeconfig(cluster.folder / "exec", exec_plugin=True)
    with config.new_client_from_config(str(path)) as connection:
        assert client.CoreV1Api(connection).list_namespaced_pod("default").items == []


def test_a_pod_deleted_by_force_is_gone_at_once(cluster, jobs) -> None:
    name = run_one(cluster, jobs, "trap '' TERM; sleep 600")
    process = cluster.pid(name)
    cluster.delete_pod(name, force=True)
    cluster.wait_for_condition("jobs", "run", "Failed")
    assert cluster.object("pods", name) is None
    cluster.wait_for(lambda: not os.path.exists(f"/proc/{process}/exe"))


def test_a_killed_process_takes_all_its_children_along(cluster, jobs) -> None:
    command = "setsid sleep 600 & echo $!; sleep 600"
    name = run_one(cluster, jobs, command)
    cluster.wait_for(lambda: cluster.log(name))
    child = int(cluster.log(name))
    cluster.kill_pod_process(name)
    failed = cluster.wait_for_condition("jobs", "run", "Failed")
    assert failed["status"]["failed"] == 1
    assert not os.path.exists(f"/proc/{child}/exe")


def test_a_pod_can_be_stuck_without_a_reason(cluster, jobs) -> None:
    cluster.hold_back("run-")
    jobs.create_namespaced_job("default", job("run", "true"))
    cluster.wait_for(lambda: pods_of(cluster, "run"))
    cluster.engine.settle()
    (pod,) = cluster.objects("pods")
    assert (pod["status"]["phase"], pod["status"].get("conditions")) == ("Pending", None)
    cluster.let_go("run-")
    cluster.wait_for_condition("jobs", "run", "Complete")


def test_a_missing_service_account_shows_as_an_event_of_the_job(cluster, jobs) -> None:
    pod = {"serviceAccountName": "nobody"}
    jobs.create_namespaced_job("default", job("run", "true", pod=pod))
    events = cluster.wait_for(
        lambda: [e for e in cluster.objects("events") if e["reason"] == "FailedCreate"]
    )
    assert 'serviceaccount "nobody" not found' in events[0]["message"]


def test_a_secret_that_comes_late_heals_the_pod(cluster, jobs, core) -> None:
    body = job("run", "echo $WORD")
    reference = {"secretKeyRef": {"name": "late", "key": "word"}}
    container = body["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "WORD", "valueFrom": reference})
    jobs.create_namespaced_job("default", body)
    cluster.wait_for(lambda: waits_for(cluster) == "CreateContainerConfigError")
    secret = {"metadata": {"name": "late"}, "stringData": {"word": "psst"}}
    core.create_namespaced_secret("default", secret)
    cluster.wait_for_condition("jobs", "run", "Complete")
    assert cluster.log(pods_of(cluster, "run")[0]) == "psst\n"


def waits_for(cluster: FakeCluster) -> str | None:
    pods = cluster.objects("pods")
    return dig(pods, 0, "status", "containerStatuses", 0, "state", "waiting", "reason")


def test_the_environment_is_the_pod_s_own(cluster, jobs, monkeypatch) -> None:
    monkeypatch.setenv("KINETIC_LEAK", "1")
    jobs.create_namespaced_job("default", job("run", "env", env={"A": "1", "B": "$(A)$(C)$$"}))
    cluster.wait_for_condition("jobs", "run", "Complete")
    environment = dict(
        line.split("=", 1) for line in cluster.log(pods_of(cluster, "run")[0]).splitlines()
    )
    assert (environment["A"], environment["B"]) == ("1", "1$(C)$")
    assert "KINETIC_LEAK" not in environment


def test_requests_are_counted(cluster, jobs, core) -> None:
    jobs.create_namespaced_job("default", job("run", "true"))
    core.list_namespaced_pod("default")
    core.list_namespaced_pod("default")
    assert cluster.counts() == {"create jobs": 1, "list pods": 2}


def test_a_preempted_slice_restarts_without_counting(cluster, api) -> None:
    rules = [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget"}]}]
    free = {
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    command = "[ -e $SHARED/again ] || { echo waits; sleep 600; }"
    body = job_set("train", command, hosts=2, failurePolicy={"maxRestarts": 0, "rules": [free]})
    body["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"] = {"rules": rules}
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        "jobset.x-k8s.io", "v1alpha2", "default", "jobsets", body
    )
    cluster.wait_for(
        lambda: [cluster.log(name) for name in pods_of(cluster, "train")] == ["waits\n"] * 2
    )
    (cluster.folder / "again").touch()
    cluster.evict_pod(pods_of(cluster, "train")[0], preempted=True)
    done = cluster.wait_for_condition("jobsets", "train", "Completed")
    assert done["status"]["restarts"] == 1
    assert "restartsCountTowardsMax" not in done["status"]


ORPHANED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job
from kubernetes import client, config

cluster = FakeCluster()
jobs = client.BatchV1Api(config.new_client_from_config(str(cluster.kubeconfig)))
jobs.create_namespaced_job("default", job("run", "setsid sleep 600 & echo $!; sleep 600"))
cluster.wait_for(lambda: [p for p in cluster.objects("pods") if p["status"]["phase"] == "Running"])
(pod,) = cluster.objects("pods")
name = pod["metadata"]["name"]
cluster.wait_for(lambda: cluster.log(name))
print(cluster.pid(name), cluster.log(name).strip(), cluster.folder, flush=True)
os.kill(os.getpid(), 9)
"""


def test_pods_end_with_the_tests_that_started_them(cluster) -> None:
    tests = str(Path(__file__).parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", ORPHANED, tests], capture_output=True, text=True, timeout=120
    )
    process, child, folder = ran.stdout.split()
    for pid in (process, child):
        cluster.wait_for(lambda pid=pid: not os.path.exists(f"/proc/{pid}/exe"))
    subprocess.run(["rm", "-rf", folder], check=True)
