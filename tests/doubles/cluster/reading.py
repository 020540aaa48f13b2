"""Parsing of requests into verb, body, selectors and options, and the refusal of malformed ones."""

from __future__ import annotations

import json
from typing import Any

from doubles.cluster import problems, streams
from doubles.cluster.discovery import Target
from doubles.cluster.objects import Object, field_selector, label_selector
from doubles.cluster.problems import Refused
from doubles.cluster.server import Request


def verb_of(request: Request, target: Target) -> str:
    if request.method == "GET":
        if request.query.get("watch") in ("true", "1"):
            return "watch"
        return "get" if target.name or not target.plural else "list"
    if request.method == "DELETE":
        return "delete" if target.name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(request.method, "?")


def body_of(request: Request, kind: str) -> Object:
    content = request.headers.get("content-type", "").partition(";")[0]
    if content not in ("", "application/json", "application/yaml"):
        raise unsupported(
            ["application/json", "application/yaml", "application/vnd.kubernetes.protobuf"]
        )
    try:
        body = json.loads(request.body)
    except ValueError as problem:
        message = f"the object provided is unrecognized (must be of type {kind}): couldn't get"
        raise problems.bad_request(f"{message} version/kind; json parse error: {problem}") from None
    return without_nulls(body)  # type: ignore[no-any-return]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def selectors(query: dict[str, str]) -> streams.Test:
    labels = label_selector(query.get("labelSelector", ""))
    fields = field_selector(query.get("fieldSelector", ""))
    return lambda obj: labels(obj) and fields(obj)


def deletion(request: Request) -> Object:
    options: Object = json.loads(request.body) if request.body else {}
    options = {k: v for k, v in (options or {}).items() if v is not None}
    for key in ("propagationPolicy", "gracePeriodSeconds"):
        if key in request.query:
            options[key] = request.query[key]
    return options


def success(**more: Any) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"} | more


def not_allowed() -> Refused:
    message = "the server does not allow this method on the requested resource"
    return problems.refusal(405, "MethodNotAllowed", message, details={})


def unsupported(accepted: list[str]) -> Refused:
    message = "the body of the request was in an unknown format - accepted media types include: "
    return problems.refusal(415, "UnsupportedMediaType", message + ", ".join(accepted))


def webhook_down() -> Refused:
    message = (
        'failed calling webhook "mjobset.kb.io": failed to call webhook: Post'
        ' "https://jobset-webhook-service.jobset-system.svc:443/mutate-jobset-x-k8s-io-v1alpha2-'
        'jobset?timeout=10s": connect: connection refused'
    )
    return problems.refusal(
        500,
        "InternalError",
        f"Internal error occurred: {message}",
        details={"causes": [{"message": message}]},
    )
