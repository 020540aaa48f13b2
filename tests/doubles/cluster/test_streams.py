"""Options of log and watch requests: lines, events and refusals equal the recorded ones."""

from __future__ import annotations

import json

import pytest
from kubernetes import client, config

from doubles.cluster.fake import FakeCluster
from doubles.cluster.manifests import job
from doubles.cluster.timings import Timings


@pytest.fixture
def api(cluster):
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield connection


@pytest.fixture
def core(api):
    return client.CoreV1Api(api)


def ended_pod(cluster: FakeCluster, api, command: str) -> str:
    client.BatchV1Api(api).create_namespaced_job("default", job("run", command))
    cluster.wait_for_condition("jobs", "run", "Complete")
    return str(cluster.objects("pods")[0]["metadata"]["name"])


def test_logs_are_cut_as_asked(cluster, api, core) -> None:
    name = ended_pod(cluster, api, r"for i in 1 2 3; do echo step $i; done; printf '\r50%%'")

    def log(**options) -> str:
        answer = core.read_namespaced_pod_log(name, "default", _preload_content=False, **options)
        return answer.data.decode()

    assert log() == "step 1\nstep 2\nstep 3\n\r50%"
    assert log(tail_lines=2) == "step 3\n\r50%"
    assert log(tail_lines=0) == ""
    assert log(limit_bytes=10) == "step 1\nste"
    assert log(since_seconds=3600) == log()
    stamps = [line.partition(" ")[0] for line in log(timestamps=True).split("\n")]
    assert all(len(stamp) == len("2026-11-21T01:33:56.033062388Z") for stamp in stamps)
    assert stamps == sorted(set(stamps))


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"previous": True}, 400, "previous terminated container"),
        ({"container": "nope"}, 400, "container nope is not valid for pod"),
        ({"since_seconds": 0}, 422, "sinceSeconds: Invalid value: 0: must be greater than 0"),
        ({"tail_lines": -1}, 422, "tailLines: Invalid value: -1"),
    ],
)
def test_log_options_are_checked(cluster, api, core, options, status, message) -> None:
    name = ended_pod(cluster, api, "true")
    with pytest.raises(client.ApiException) as caught:
        core.read_namespaced_pod_log(name, "default", **options)
    assert caught.value.status == status
    assert message in json.loads(caught.value.body)["message"]


def test_a_pod_without_a_node_has_an_empty_log(cluster, api, core) -> None:
    pod = {"nodeSelector": {"no": "such"}}
    client.BatchV1Api(api).create_namespaced_job("default", job("run", "true", pod=pod))
    cluster.wait_for(lambda: cluster.objects("pods"))
    name = cluster.objects("pods")[0]["metadata"]["name"]
    answer = core.read_namespaced_pod_log_with_http_info(name, "default", follow=True)
    assert getattr(answer, "status_code", None) or answer[1] == 204


def events(core, **options) -> list[dict]:
    answer = core.list_namespaced_config_map(
        "default", watch=True, _preload_content=False, **options
    )
    return [json.loads(line) for line in answer.data.splitlines()]


def config_map(core, name: str, **labels: str) -> str:
    meta = {"name": name, "labels": labels}
    return core.create_namespaced_config_map(
        "default", {"metadata": meta}
    ).metadata.resource_version


@pytest.mark.cluster(timings=Timings(bookmark_s=0.1))
def test_bookmarks_carry_only_a_version(cluster, core) -> None:
    config_map(core, "one")
    changes = events(core, timeout_seconds=1, allow_watch_bookmarks=True)
    assert [event["type"] for event in changes[:2]] == ["ADDED", "BOOKMARK"]
    assert list(changes[1]["object"]["metadata"]) == ["resourceVersion"]


def test_what_stops_matching_is_told_as_deleted(cluster, core) -> None:
    version = config_map(core, "one", run="a")
    patch = {"metadata": {"labels": {"run": "b"}}}
    core.patch_namespaced_config_map("one", "default", patch)
    core.delete_namespaced_config_map("one", "default")
    options = {"timeout_seconds": 1, "resource_version": version}
    assert [e["type"] for e in events(core, label_selector="run=a", **options)] == ["DELETED"]
    assert [e["type"] for e in events(core, label_selector="run=b", **options)] == [
        "ADDED",
        "DELETED",
    ]


def test_lists_come_in_pages(cluster, core) -> None:
    for name in ("one", "three", "two"):
        config_map(core, name)
    first = core.list_namespaced_config_map("default", limit=2)
    assert first.metadata.remaining_item_count == 1
    rest = core.list_namespaced_config_map("default", limit=2, _continue=first.metadata._continue)
    names = [item.metadata.name for item in (*first.items, *rest.items)]
    assert names == ["one", "three", "two"]
