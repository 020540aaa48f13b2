"""Errors for Google's refusals that say what to do. In: code and message. Out: an error. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinetic.errors import BackendUnavailable, KineticError, PreflightError, SubmitError

ROLES = "roles/container.admin, roles/storage.admin and roles/serviceusage.serviceUsageAdmin"
_CONSOLE = "https://console.cloud.google.com"


class NameTaken(SubmitError):
    """The object exists or has changed: another process was faster, or another project owns it."""


class NotEnabled(PreflightError):
    """An API of the project is not enabled, or was enabled just now."""


class OperationUnderWay(BackendUnavailable):
    """GKE is running another operation on the cluster; send the request again afterwards."""


def explain(project: str, action: str, code: int, detail: Mapping[str, Any]) -> KineticError:
    """Return the error for a refused request.

    Args:
        project: the project of the request.
        action: the request in words: "create the cluster dev".
        code: the HTTP status.
        detail: Google's error object, with its words and a reason such as SERVICE_DISABLED.
    """
    text = " ".join(str(detail.get("message") or f"HTTP {code}").split()).rstrip(".")
    low = text.lower()
    reasons = (str(entry.get("reason") or "") for entry in detail.get("details") or ())
    reason = next(filter(None, reasons), "")
    start = f"Could not {action} in the project {project}"
    if code == 401:
        return PreflightError(
            f"{start}: Google does not accept your login. Log in with `gcloud auth "
            "application-default login`."
        )
    if "billing" in low or reason == "BILLING_DISABLED":
        return PreflightError(
            f"{start}: it has no billing account. Link one at "
            f"{_CONSOLE}/billing/linkedaccount?project={project}, then try again."
        )
    if reason == "SERVICE_DISABLED" or "has not been used in project" in low:
        return NotEnabled(
            f'{start}: an API is not enabled: "{text}". `kinetic up` enables what it needs; it may '
            "take a minute. Try again."
        )
    if "quota" in low or reason in ("QUOTA_EXCEEDED", "RATE_LIMIT_EXCEEDED"):
        return PreflightError(
            f'{start}: a quota is used up: "{text}". Ask for more at '
            f"{_CONSOLE}/iam-admin/quotas?project={project}, or choose another zone."
        )
    if code == 400 and ("operation" in low and ("running" in low or "incompatible" in low)):
        return OperationUnderWay(f'{start}: GKE is at work on the cluster: "{text}". Try again.')
    if code in (409, 412):
        return NameTaken(f'{start}: "{text}". Choose another name with --cluster.')
    if code == 403:
        return PreflightError(
            f'{start}: "{text}". Check the project\'s id with `gcloud projects list`, or ask its '
            f"owner for {ROLES}."
        )
    if code == 404:
        return PreflightError(
            f'{start}: "{text}". Check the project\'s id with `gcloud projects list`, and the zone.'
        )
    return PreflightError(f'{start}: Google refuses it (HTTP {code}): "{text}".')


def explain_operation(project: str, action: str, message: str) -> KineticError:
    """Return the error for an operation that GKE accepted and reports as failed."""
    text = " ".join(message.split()).rstrip(".")
    low = text.lower()
    if "quota" in low:
        return explain(project, action, 403, {"message": text})
    if any(word in low for word in ("stockout", "exhausted", "does not have enough resources")):
        return BackendUnavailable(
            f'Could not {action} in the project {project}: no machines are free: "{text}". '
            "Try again later, another zone (--zone), or --flex-start, which waits for machines."
        )
    return PreflightError(
        f'Could not {action} in the project {project}: GKE gave up: "{text}". Run the same command '
        "again: it continues with what is missing."
    )
