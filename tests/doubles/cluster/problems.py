"""Error responses of the API: the exception `Refused`, and a function for each kind of error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from doubles.cluster.kinds import Resource


@dataclass
class Refused(Exception):
    """Raised to refuse a request; has the HTTP status, the body, and further headers."""

    code: int
    body: dict[str, Any] | str
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """One error in an object: the field, the API's sentence about it, and the reason."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"

    def sentence(self) -> str:
        return f"{self.field}: {self.message}"


def status(code: int, reason: str, message: str, **more: Any) -> dict[str, Any]:
    """Return the Status object of a failed request."""
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    body |= {"message": message} | ({"reason": reason} if reason else {}) | more
    return body | {"code": code}


def refusal(code: int, reason: str, message: str, **more: Any) -> Refused:
    refused = Refused(code, status(code, reason, message, **more))
    if (wait_s := more.get("details", {}).get("retryAfterSeconds")) is not None:
        refused.headers["Retry-After"] = str(wait_s)
    return refused


def page_not_found() -> Refused:
    return Refused(404, "404 page not found\n")


def not_found(resource: Resource, name: str) -> Refused:
    return refusal(
        404, "NotFound", f'{resource.full} "{name}" not found', details=details(resource, name)
    )


def already_exists(resource: Resource, name: str, *, leaving: bool = False) -> Refused:
    before = "object is being deleted: " if leaving else ""
    return refusal(
        409,
        "AlreadyExists",
        f'{before}{resource.full} "{name}" already exists',
        details=details(resource, name),
    )


def conflict(resource: Resource, name: str, why: str = "") -> Refused:
    why = why or (
        "the object has been modified; please apply your changes to the latest version and try"
        " again"
    )
    return refusal(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {resource.full} "{name}": {why}',
        details=details(resource, name),
    )


def forbidden(resource: Resource, name: str, why: str, **more: Any) -> Refused:
    quoted = f' "{name}"' if name else ""
    return refusal(
        403,
        "Forbidden",
        f"{resource.full}{quoted} is forbidden: {why}",
        details=details(resource, name) | more,
    )


def bad_request(message: str) -> Refused:
    return refusal(400, "BadRequest", message)


def invalid(resource: Resource, name: str, causes: list[Cause], before: str = "") -> Refused:
    """Return a 422 response that lists these causes."""
    sentences = list(dict.fromkeys(cause.sentence() for cause in causes))
    text = sentences[0] if len(sentences) == 1 else f"[{', '.join(sentences)}]"
    kind = resource.kind + (f".{resource.group}" if resource.group else "")
    group = {"group": resource.group} if resource.group else {}
    return refusal(
        422,
        "Invalid",
        f'{before}{kind} "{name}" is invalid: {text}',
        details={"name": name}
        | group
        | {
            "kind": resource.kind,
            "causes": [
                {"reason": c.reason, "message": c.message, "field": c.field} for c in causes
            ],
        },
    )


def details(resource: Resource, name: str) -> dict[str, Any]:
    named = {"name": name} if name else {}
    group = {"group": resource.group} if resource.group else {}
    return named | group | {"kind": resource.plural}
