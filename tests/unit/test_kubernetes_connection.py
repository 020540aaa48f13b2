"""Calls to an API server over real sockets, with scripted answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from api_server_fake import Reply, Script, serving

from kinetic._backends.kubernetes import connection, errors
from kinetic._backends.kubernetes.api import Api, CallLimits, Selector, waits_s
from kinetic._backends.kubernetes.connection import HttpApi
from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._backends.kubernetes.resources import JOBS, JOBSETS, NODES, PODS, SECRETS
from kinetic.errors import BackendUnavailable, NotFound

JOB = {"metadata": {"name": "a", "labels": {"kinetic.dev/job-id": "job-1"}}}


@pytest.fixture
def script() -> Iterator[Script]:
    created = Script()
    with serving(created) as created.url:
        yield created


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def api(script: Script, slept: list[float]) -> Iterator[Api]:
    access = Access(script.url, namespace="ml", user={"token": "t"})
    created = HttpApi(access, {}, sleep=slept.append, patience=CallLimits(tries=3))
    yield created
    created.close()


def status(code: int, message: str, **more: Any) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "message": message, **more}


def test_objects_are_plain_documents(api: Api, script: Script) -> None:
    script.replies = [Reply(201, {**JOB, "status": {}}), Reply(200, JOB)]
    assert api.create(JOBS, JOB)["status"] == {}
    assert api.get(JOBS, "a") == JOB
    assert script.request_lines() == [
        "POST /apis/batch/v1/namespaces/ml/jobs?fieldValidation=Strict",
        "GET /apis/batch/v1/namespaces/ml/jobs/a",
    ]
    assert {r[3] for r in script.requests} == {"Bearer t"}


def test_a_list_is_read_page_by_page(api: Api, script: Script) -> None:
    script.replies = [
        Reply(200, {"metadata": {"continue": "x", "resourceVersion": "7"}, "items": [JOB]}),
        Reply(200, {"metadata": {"resourceVersion": "7"}, "items": [JOB]}),
    ]
    answer = api.list(PODS, Selector(labels="app=kinetic", namespace=""))
    assert (len(answer.items), answer.pages) == (2, 2)
    assert script.request_lines()[0] == "GET /api/v1/pods?labelSelector=app%3Dkinetic&limit=500"
    assert script.request_lines()[1].endswith("&continue=x")


def test_a_list_that_took_too_long_begins_again(api: Api, script: Script) -> None:
    page = {"metadata": {"continue": "x"}, "items": [JOB]}
    last = {"metadata": {"resourceVersion": "9"}, "items": [JOB]}
    script.replies = [Reply(200, page), Reply(410, status(410, "gone")), Reply(200, last)]
    assert len(api.list(JOBS).items) == 1
    script.replies = [Reply(200, page), Reply(410, status(410, "gone"))] * 3
    with pytest.raises(errors.Expired):
        api.list(JOBS)
    assert not script.replies


@pytest.mark.parametrize(
    "broken", [Reply(503, "no"), Reply(0), Reply(429, "slow down"), Reply(200, "{")]
)
def test_a_call_is_made_again_with_growing_pauses(
    api: Api, script: Script, slept: list[float], broken: Reply
) -> None:
    script.replies = [broken, broken, Reply(200, JOB)]
    assert api.get(JOBS, "a") == JOB
    assert len(slept) == 2
    assert 0 < slept[0] <= 0.25
    assert 0.2 < slept[1] <= 0.5


def test_the_server_says_when_to_come_again(api: Api, script: Script, slept: list[float]) -> None:
    script.replies = [Reply(429, "slow", {"Retry-After": "7"}), Reply(200, JOB)]
    api.get(JOBS, "a")
    assert slept == [7.0]


def test_what_does_not_pass_is_not_tried_again(api: Api, script: Script) -> None:
    script.replies = [Reply(422, status(422, "no"))]
    with pytest.raises(errors.Refused, match=r"refuses to create jobs\.batch a in namespace ml"):
        api.create(JOBS, JOB)
    assert len(script.requests) == 1


def test_a_server_that_stays_away(api: Api, script: Script, slept: list[float]) -> None:
    script.replies = [Reply(503, status(503, "etcd is down"))] * 3
    with pytest.raises(BackendUnavailable, match=r"etcd is down"):
        api.list(JOBS)
    assert len(slept) == 2
    nobody = HttpApi(
        Access("http://127.0.0.1:1"), {}, sleep=slept.append, patience=CallLimits(tries=2)
    )
    with pytest.raises(
        BackendUnavailable, match=r"Could not list nodes: http://127\.0\.0\.1:1 does"
    ):
        nobody.list(NODES)


def test_a_creation_whose_answer_was_lost_is_found_again(api: Api, script: Script) -> None:
    exists = Reply(409, status(409, 'jobs.batch "a" already exists', reason="AlreadyExists"))
    script.replies = [Reply(0), exists, Reply(200, JOB)]
    assert api.create(JOBS, JOB) == JOB


def test_a_creation_whose_answer_was_lost_is_ours_where_it_may_not_be_read(
    api: Api, script: Script
) -> None:
    exists = Reply(409, status(409, 'secrets "a" already exists', reason="AlreadyExists"))
    message = 'secrets "a" is forbidden: User "eve" cannot get resource "secrets"'
    script.replies = [Reply(0), exists, Reply(403, status(403, message, reason="Forbidden"))]
    assert api.create(SECRETS, JOB) == JOB


@pytest.mark.parametrize("first", [409, 500])
def test_a_quota_in_conflict_is_not_an_object_that_exists(
    api: Api, script: Script, slept: list[float], first: int
) -> None:
    message = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
    conflict = status(409, message, reason="Conflict")
    script.replies = [Reply(first, conflict), Reply(409, conflict), Reply(201, JOB)]
    assert api.create(SECRETS, JOB) == JOB
    assert (len(script.requests), len(slept)) == (3, 2)
    script.replies = [Reply(409, conflict)] * 3
    with pytest.raises(errors.Busy, match="the object has been modified"):
        api.create(JOBS, JOB)


def test_a_name_that_another_job_has_is_a_conflict(api: Api, script: Script) -> None:
    exists = Reply(409, status(409, 'jobs.batch "a" already exists', reason="AlreadyExists"))
    other = {"metadata": {"name": "a", "labels": {"kinetic.dev/job-id": "job-2"}}}
    script.replies = [exists]
    with pytest.raises(errors.Conflict):
        api.create(JOBS, JOB)
    script.replies = [Reply(0), exists, Reply(200, other)]
    with pytest.raises(errors.Conflict):
        api.create(JOBS, JOB)


def test_deletion_takes_what_belongs_to_it_and_knows_what_is_gone(api: Api, script: Script) -> None:
    script.replies = [
        Reply(200, status(200, "")),
        Reply(404, status(404, "none", details={"kind": "jobs"})),
    ]
    assert api.delete(JOBS, "a", uid="u") is True
    assert api.delete(JOBS, "a", propagation="Foreground") is False
    assert script.requests[0][2]["propagationPolicy"] == "Background"
    assert script.requests[0][2]["preconditions"] == {"uid": "u"}
    assert script.requests[1][2]["propagationPolicy"] == "Foreground"


def test_a_kind_that_is_not_installed_is_not_a_missing_object(api: Api, script: Script) -> None:
    script.replies = [Reply(404, "404 page not found\n"), Reply(404, status(404, "no", details={}))]
    with pytest.raises(errors.NotInstalled):
        api.get(JOBSETS, "a")
    with pytest.raises(NotFound):
        api.get(JOBSETS, "a")


def test_discovery(api: Api, script: Script) -> None:
    script.replies = [
        Reply(200, {"resources": [{"name": "jobsets"}]}),
        Reply(404, "404 page not found\n"),
        Reply(200, {"major": "1", "minor": "33+", "gitVersion": "v1.33.4-gke.1"}),
    ]
    assert api.knows(JOBSETS)
    assert not api.knows(JOBSETS)
    answer = api.version()
    assert (answer.text, answer.major, answer.minor) == ("v1.33.4-gke.1", 1, 33)


def test_the_time_is_that_of_the_server(script: Script) -> None:
    access = Access(script.url, namespace="ml", user={"token": "t"})
    with contextlib.closing(HttpApi(access, {}, clock=lambda: 100.0)) as api:
        assert api.now() == 100.0
        script.replies = [Reply(404), Reply(404)]
        assert not api.knows(PODS)
        assert api.now() == 3600.0
        script.date = "noon"
        assert not api.knows(PODS)
        assert api.now() == 3600.0  # unchanged


def test_rights_are_asked_for(api: Api, script: Script) -> None:
    script.replies = [
        Reply(201, {"status": {"allowed": True}}),
        Reply(201, {"status": {"allowed": False}}),
    ]
    assert api.may("list", PODS)
    assert not api.may("list", NODES)
    assert script.requests[0][2]["spec"]["resourceAttributes"] == {
        "verb": "list",
        "resource": "pods",
        "namespace": "ml",
    }
    assert script.requests[1][2]["spec"]["resourceAttributes"] == {
        "verb": "list",
        "resource": "nodes",
    }


def test_expired_credentials_are_renewed_once(script: Script, tmp_path: Any) -> None:
    token = tmp_path / "token"
    token.write_text("old")
    access = Access(script.url, namespace="ml", user={"tokenFile": str(token)})
    api = HttpApi(access, {}, sleep=lambda _: None)
    script.replies = [Reply(200, JOB), Reply(401, status(401, "no")), Reply(200, JOB)]
    api.get(JOBS, "a")
    token.write_text("new")
    api.get(JOBS, "a")
    assert [r[3] for r in script.requests] == ["Bearer old", "Bearer old", "Bearer new"]
    script.replies = [Reply(401, status(401, "no"))] * 2
    with pytest.raises(errors.Unauthorized):
        api.get(JOBS, "a")
    api.close()


def test_a_process_has_one_connection_to_a_server_for_each_user_and_namespace() -> None:
    access = Access("https://127.0.0.1:1", user={"token": "t"})
    first = connection.share_connection(access, {"PATH": "/a", "SEED": "1"})
    second = connection.share_connection(replace(access), {"PATH": "/a", "SEED": "2"})
    assert second is first
    others = [
        connection.share_connection(access, {"PATH": "/b"}),
        connection.share_connection(access, {"PATH": "/a", "https_proxy": "p"}),
        connection.share_connection(access, {"PATH": "/a"}, namespace="ml"),
        connection.share_connection(replace(access, user={"token": "new"}), {"PATH": "/a"}),
    ]
    assert first not in others


def test_pauses_are_random_and_bounded() -> None:
    import random

    seed = random.Random(1)
    pauses = [waits_s(tries, CallLimits(), seed) for tries in range(1, 12)]
    assert all(0.1 < p <= 8 for p in pauses)
    assert len(set(pauses)) == len(pauses)


_: Callable[[HttpApi], Api] = lambda api: api  # noqa: E731 (mypy checks the protocol)
