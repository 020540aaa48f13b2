"""The API server's refusals as errors that name the verb, the resource and what to do.

In: a request (`ApiCall`) and the answer to it. Out: one of kinetic's exceptions. Pure.

    BackendUnavailable   temporary
    ├── Busy             429, 5xx, no connection, a quota that changed: the same call may succeed
    ├── Expired          410: the watch's resource version is too old; list again
    PreflightError       permanent
    ├── Forbidden        403: a permission is missing
    ├── Unauthorized     401: the credentials are not accepted, even fresh ones
    ├── NotInstalled     the cluster does not know this kind of object (404 without JSON)
    └── Refused          400, 413, 415, 422, and quotas: this object will never be accepted as it is
    SubmitError
    └── Conflict         409: the object exists already, or has changed
    NotFound             no such object

Users see only public errors: a traceback names the public base class instead of these.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

from kinetic._backends.kubernetes.resources import JOBSETS, Resource
from kinetic._core.values import dataclass
from kinetic.errors import (
    BackendUnavailable,
    KineticError,
    NotFound,
    PreflightError,
    SubmitError,
)

LONGEST_RETRY_AFTER_S = 60.0
_Error = TypeVar("_Error", bound=KineticError)


def read_retry_after(header: str | None) -> float | None:
    """Return the seconds in a Retry-After header, at most a minute; None without such a header."""
    try:
        return min(float(header or ""), LONGEST_RETRY_AFTER_S)
    except ValueError:
        return None


def _show_as_base(kind: type[_Error]) -> type[_Error]:
    public = kind.__bases__[0]
    kind.__module__, kind.__name__ = public.__module__, public.__name__
    kind.__qualname__ = public.__qualname__
    kind.__reduce__ = _as_its_base  # type: ignore[method-assign, assignment]
    return kind


def _as_its_base(error: KineticError) -> tuple[Any, ...]:
    """Reduce an error, for pickle, to its public base class, which pickle can find by its name."""
    return type(error).__bases__[0], error.args


@_show_as_base
class Busy(BackendUnavailable):
    """The same call may succeed later."""

    after_s: float | None = None
    """The seconds until the server accepts a retry; None if it does not say."""


@_show_as_base
class Expired(BackendUnavailable):
    """The resource version from which a watch or a list should continue has expired."""


@_show_as_base
class Forbidden(PreflightError):
    """A permission is missing."""


@_show_as_base
class Unauthorized(PreflightError):
    """The cluster does not accept the credentials."""


@_show_as_base
class NotInstalled(PreflightError):
    """The cluster does not know this kind of object."""


@_show_as_base
class Refused(PreflightError):
    """The cluster does not accept the object as it is."""


@_show_as_base
class Conflict(SubmitError):
    """The object exists already, or has changed since it was read."""

    was_repeated = False
    """True if the call was a retry, so that an earlier try may have created the object."""


@dataclass(frozen=True)
class ApiCall:
    """A request.

    Attributes:
        verb: RBAC's name of the action: create, get, list, watch, delete.
        resource: the kind of object.
        namespace: the object's namespace; "" for objects of the whole cluster.
        name: the object's name, or "".
    """

    verb: str
    resource: Resource
    namespace: str = ""
    name: str = ""

    @property
    def path(self) -> str:
        """The path of the request's URL; a new object is sent to the path of its kind."""
        return self.resource.path(self.namespace, "" if self.verb == "create" else self.name)

    def __str__(self) -> str:
        named = f" {self.name}" if self.name else ""
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource.full_name}{named}{where}"


MAY_PASS = frozenset({429, 500, 502, 503, 504})
OLD_JOBSET = "onJobFailureMessagePatterns"
"""A field that JobSets have since 0.10: older versions name it when they refuse a JobSet."""
_TOO_LARGE = "request is too large"
_USER = re.compile(r'User "([^"]+)"')


def may_pass(status: int, body: bytes | str) -> bool:
    """True if repeating the request may help, given its HTTP status and the body of the answer."""
    return status in MAY_PASS and _TOO_LARGE not in message_of(body)


def message_of(body: bytes | str) -> str:
    """Return the message of an answer: from a Status object, or the text itself."""
    status = _status(body)
    if status:
        return str(status.get("message") or status.get("reason") or "")
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    return " ".join(text.split())[:1000]


def error_of(call: ApiCall, status: int, body: bytes | str) -> KineticError:
    """Return the error for an answer.

    Args:
        call: the request.
        status: the HTTP status, 400 or more.
        body: the body of the answer: a Status object, or text.
    """
    message = message_of(body)
    detail = _status(body)
    quote = f' The cluster says: "{message.rstrip(".")}".' if message else ""
    if status == 401:
        return Unauthorized(
            f"The cluster does not accept your credentials ({call}). Log in again, for example "
            "with `gcloud auth login` or `kubectl get pods`, then try again."
        )
    if status == 403:
        return _explain_forbidden(call, message, quote)
    if status == 404:
        return _explain_missing(call, detail, quote)
    # A new object cannot have changed, so a conflict other than AlreadyExists is about a quota.
    is_busy = status == 409 and call.verb == "create" and detail.get("reason") != "AlreadyExists"
    if status == 409 and not is_busy:
        return Conflict(f"Could not {call}.{quote}")
    if status == 410:
        return Expired(f"Could not continue to {call}: the resource version has expired.{quote}")
    if status in MAY_PASS and not may_pass(status, body):
        status = 413
    if is_busy or status in MAY_PASS:
        return Busy(
            f"The cluster could not {call} at present (HTTP {status}).{quote} Try again later."
        )
    if status == 413:
        return Refused(f"The cluster could not {call}: the object is too large.{quote}")
    if call.resource == JOBSETS and OLD_JOBSET in message:
        return Refused(
            "The cluster's JobSet is too old: jobs of several hosts need version 0.10 or newer. "
            f"An administrator must update it.{quote}"
        )
    if 400 <= status < 500:
        return Refused(f"The cluster refuses to {call}.{quote}")
    return BackendUnavailable(f"Could not {call}: the cluster answered HTTP {status}.{quote}")


def explain_unreachable(call: ApiCall, server: str, error: object) -> Busy:
    """Return the error for a server that cannot be reached, or that closed the connection."""
    cause = " ".join(str(error).split()) or type(error).__name__
    suspects = "the network, a VPN, and the context of your kubeconfig"
    if "proxy" in cause.lower():
        suspects = "your proxy; hosts that need no proxy belong in NO_PROXY"
    return Busy(
        f"Could not {call}: {server} does not answer ({cause}). Check {suspects}; jobs that were "
        "submitted are not affected."
    )


def _explain_forbidden(call: ApiCall, message: str, quote: str) -> KineticError:
    if "exceeded quota" in message:
        return Refused(f"Could not {call}: a quota of the namespace is exceeded.{quote}")
    user = _USER.search(message)
    if user is None:
        return Refused(f"The cluster refuses to {call}.{quote}")
    if user[1] == "system:anonymous":
        return Unauthorized(
            f"The cluster does not know who you are ({call}). Your kubeconfig holds no credentials "
            "for it: log in, for example with `gcloud container clusters get-credentials`."
        )
    group = f" in API group {call.resource.group}" if call.resource.group else ""
    return Forbidden(
        f"You ({user[1]}) may not {call}. Ask for a role that allows the verb {call.verb} on "
        f"{call.resource.plural}{group}."
    )


def _explain_missing(call: ApiCall, detail: dict[str, Any], quote: str) -> KineticError:
    if not detail:  # The answer is plain text if the path is not that of a resource.
        return NotInstalled(not_installed(call.resource))
    about = (detail.get("details") or {}).get("kind")
    if about == "namespaces" and call.resource.plural != "namespaces":
        return Refused(no_namespace(call.namespace))
    return NotFound(
        f"Could not {call}, because it does not exist. If it should exist, check namespace= and "
        f"cluster=.{quote}"
    )


def no_namespace(name: str) -> str:
    """Return the message for a namespace that does not exist."""
    return (
        f"The namespace {name!r} does not exist in the cluster. Create it "
        f"(kubectl create namespace {name}), or name another one with namespace=."
    )


def not_installed(resource: Resource) -> str:
    """Return the message for a kind of object that the cluster does not know."""
    text = f"The cluster does not know {resource.full_name} ({resource.version})."
    if resource == JOBSETS:
        return (
            f"{text} Jobs of several hosts need JobSet: an administrator installs it with "
            "`kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/"
            "latest/download/manifests.yaml`."
        )
    return f"{text} An administrator must install it."


def _status(body: bytes | str) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) and answer.get("kind") == "Status" else {}
