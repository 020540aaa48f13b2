"""The errors that kinetic raises for the recorded refusals of a real API server."""

from __future__ import annotations

import json
import pickle
import traceback
from typing import Any

import pytest
import recorded

from kinetic._backends.kubernetes import errors
from kinetic._backends.kubernetes.errors import ApiCall, error_of
from kinetic._backends.kubernetes.resources import JOBS, JOBSETS, NODES, PODS, Resource
from kinetic.errors import BackendUnavailable, KineticError, NotFound, PreflightError, SubmitError

ERRORS = [e for e in recorded.exchanges("17-errors") if e["response"].get("status", 0) >= 400]
VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete", "PUT": "update"}


def call_of(request: dict[str, Any]) -> ApiCall:
    path, _, query = request["path"].partition("?")
    parts = (path.strip("/") + "///").split("/")
    group, version, rest = (
        ("", parts[1], parts[2:]) if parts[0] == "api" else (*parts[1:3], parts[3:])
    )
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    verb = "watch" if "watch=true" in query else VERBS[request["method"]]
    if verb == "get" and not rest[1]:
        verb = "list"
    return ApiCall(verb, Resource(group, version, rest[0]), namespace, "".join(rest[1:2]))


def error(exchange: dict[str, Any]) -> KineticError:
    body = exchange["response"]["body"]
    text = body if isinstance(body, str) else json.dumps(body)
    return error_of(call_of(exchange["request"]), exchange["response"]["status"], text)


@pytest.mark.parametrize("exchange", ERRORS, ids=lambda e: e["what"][:40])
def test_each_refusal_says_what_was_tried(exchange: dict[str, Any]) -> None:
    raised = error(exchange)
    assert isinstance(raised, BackendUnavailable | PreflightError | SubmitError | NotFound)
    text = str(raised)
    assert text[0].isupper()
    assert ".." not in text
    status = exchange["response"]["status"]
    if status in (429, 503, 504):
        assert isinstance(raised, BackendUnavailable)
    if status in (401, 415, 422):
        assert isinstance(raised, PreflightError)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("401 invalid token", errors.Unauthorized, "does not accept your credentials"),
        ("403 no credentials at all", errors.Unauthorized, "does not know who you are"),
        (
            "403 create jobset",
            errors.Forbidden,
            "You (alice@example.com) may not create jobsets.jobset.x-k8s.io in namespace ml. Ask "
            "for a role that allows the verb create on jobsets in API group jobset.x-k8s.io.",
        ),
        ("403 list pods", errors.Forbidden, "may not list pods in namespace ml"),
        ("404 a group that is not installed", errors.NotInstalled, "pytorchjobs.kubeflow.org"),
        ("404 missing job", NotFound, "Could not get jobs.batch nope in namespace ml"),
        (
            "404 create in a missing namespace",
            errors.Refused,
            "The namespace 'nope' does not exist",
        ),
        ("409 create again", errors.Conflict, "already exists"),
        ("422 bad name", errors.Refused, "Bad_Name"),
    ],
)
def test_what_the_sentence_names(what: str, kind: type[KineticError], words: str) -> None:
    raised = error(recorded.exchange("17-errors", what))
    assert type(raised) is kind
    assert words in str(raised)


def test_a_list_that_continues_from_too_long_ago_is_told_from_an_outage() -> None:
    expired = next(e for e in ERRORS if e["response"]["status"] == 410)
    assert type(error(expired)) is errors.Expired


def test_what_is_too_large_does_not_pass_with_time() -> None:
    message = json.dumps({"kind": "Status", "message": "etcdserver: request is too large"})
    assert not errors.may_pass(500, message)
    assert isinstance(error_of(ApiCall("create", JOBSETS, "ml"), 500, message), errors.Refused)
    assert errors.may_pass(500, "")
    assert isinstance(error_of(ApiCall("list", PODS), 500, b"oops"), BackendUnavailable)


def test_jobsets_that_are_not_installed_come_with_the_command() -> None:
    raised = error_of(ApiCall("create", JOBSETS, "ml"), 404, b"404 page not found\n")
    assert isinstance(raised, errors.NotInstalled)
    assert "kubectl apply --server-side" in str(raised)


def test_a_quota_on_objects_is_no_missing_right() -> None:
    message = 'jobs.batch "x" is forbidden: exceeded quota: counts, requested: count/jobs.batch=1'
    body = json.dumps({"kind": "Status", "reason": "Forbidden", "message": message})
    assert isinstance(error_of(ApiCall("create", JOBS, "ml"), 403, body), errors.Refused)


def test_paths() -> None:
    assert JOBSETS.path("ml", "a") == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/ml/jobsets/a"
    assert PODS.path() == "/api/v1/pods"
    assert NODES.path("ml") == "/api/v1/nodes"


@pytest.mark.parametrize(
    "kind",
    [
        errors.Expired,
        errors.Forbidden,
        errors.Unauthorized,
        errors.NotInstalled,
        errors.Refused,
        errors.Conflict,
    ],
)
def test_users_see_the_public_error(kind: type[KineticError]) -> None:
    (text,) = traceback.format_exception_only(kind("It says so."))
    public = kind.__bases__[0].__name__
    assert text == f"kinetic.errors.{public}: It says so.\n"
    copy = pickle.loads(pickle.dumps(kind("It says so.")))
    assert (type(copy), str(copy)) == (kind.__bases__[0], "It says so.")


def test_a_proxy_that_does_not_answer_is_suspected() -> None:
    call = ApiCall("list", PODS, "ml")
    text = str(errors.explain_unreachable(call, "https://c", OSError("Unable to connect to proxy")))
    assert "Check your proxy; hosts that need no proxy belong in NO_PROXY" in text
    assert "proxy" not in str(errors.explain_unreachable(call, "https://c", OSError("refused")))
