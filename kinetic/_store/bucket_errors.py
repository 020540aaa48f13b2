"""Errors of Google's packages, translated into kinetic's.

In: an exception of the library, and the action that failed. Out: errors that name the bucket, the
permission and the next step; whether to try again.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress

from kinetic.errors import NotFound, StoreError

_REMEDIES = (
    (
        r"retention policy|object retention|active .*hold",
        "kinetic replaces and removes objects: remove the policy or the hold from BUCKET, or use "
        "another bucket.",
    ),
    (
        r"requester pays",
        "kinetic names no project to bill: turn requester pays off with `gcloud storage buckets "
        "update BUCKET --no-requester-pays`, or copy the data to a bucket of your own.",
    ),
    (
        r"VPC Service Controls|organization's policy",
        "BUCKET lies within a perimeter of your organization: work from a machine inside it, or "
        "ask your administrators to let this machine in.",
    ),
    (
        r"billing account",
        "Turn billing on for the project of BUCKET, or use another bucket.",
    ),
)
"""Patterns of Google's messages, and what to do about them."""


class BucketNotFound(StoreError):
    """The bucket does not exist."""


def failures() -> tuple[type[BaseException], ...]:
    """Return all types of exceptions that calls of the library raise."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return (GoogleAPIError, GoogleAuthError, RequestException, HTTPError, OSError, ValueError)


def translate_error(error: BaseException, doing: str, permission: str, bucket: str) -> Exception:
    """Return the error to raise instead of the library's.

    Args:
        error: an exception of the library.
        doing: the action that failed; completes "Could not …".
        permission: the permission that the action takes.
        bucket: the bucket's name.
    """
    from google.auth.exceptions import GoogleAuthError, TransportError

    cause = getattr(error, "cause", None) or error  # A RetryError has a cause.
    status = status_of(cause)
    if status == 404 and not lacks_bucket(cause):
        return NotFound(f"Could not {doing}: the object does not exist.")
    if status == 404:
        return BucketNotFound(
            f"Could not {doing}: there is no bucket {bucket!r}. Check the name, or create the "
            f"bucket: `gcloud storage buckets create gs://{bucket}`."
        )
    text = message_of(cause)
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, text):
            to_do = remedy.replace("BUCKET", f"gs://{bucket}")
            return StoreError(f'Could not {doing}: "{text}". {to_do}')
    if status == 403:
        # Replacing an object takes two permissions, and Google names the missing one.
        named = re.search(r"\bstorage\.[a-z]+\.[a-zA-Z]+", text)
        permission = named[0] if named else permission
        reading = permission.endswith((".get", ".list"))
        role = "roles/storage.objectViewer" if reading else "roles/storage.objectUser"
        return StoreError(
            f"Could not {doing}: permission denied. You need the permission {permission} on "
            f"gs://{bucket}, which the role {role} has. Google says: {text}"
        )
    is_refused = isinstance(cause, GoogleAuthError) and not isinstance(cause, TransportError)
    if status == 401 or is_refused:
        return StoreError(
            f"Could not {doing}: Google does not accept your credentials ({text}). Run "
            "`gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to "
            "the key of a service account."
        )
    advice = " The request was retried for a while." if cause is not error else ""
    if "match calculated" in text:
        advice += " The content was damaged on its way: try again."
    elif status in (429, 500, 502, 503, 504):
        advice += " This is usually temporary: try again later."
    elif not status and is_broken_connection(cause):
        advice += (
            " Check that this machine reaches storage.googleapis.com, directly or through the "
            "proxy in HTTPS_PROXY."
        )
    return StoreError(f'Could not {doing}: "{text}".{advice}')


def no_credentials(bucket: str) -> str:
    return (
        f"There are no Google credentials on this machine for gs://{bucket}. Run `gcloud auth "
        "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key of a service "
        "account; in a pod, give its service account access by Workload Identity."
    )


def message_of(error: BaseException) -> str:
    """Return the service's message, without the address that the library adds."""
    response = getattr(error, "response", None)
    text = str(getattr(response, "text", "") or "")
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    if not text or text.startswith("<"):
        text = str(getattr(error, "message", "") or _reason(error))
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[0][:500].rstrip(".")


def _reason(error: BaseException) -> str:
    """Return why a connection broke, leaving out the urllib3 objects in the library's message."""
    inner = error.args[0] if error.args else None
    reason = getattr(inner, "reason", None)
    return str(reason).rpartition(">: ")[2] if isinstance(reason, Exception) else str(error)


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error; 0 if there was no answer."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return int(code)
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def lacks_bucket(error: BaseException) -> bool:
    return "bucket does not exist" in str(error)


def may_restart(error: BaseException) -> bool:
    """True if a new upload may succeed: the content arrived damaged, the upload session expired, or
    the service stored only a part of a chunk, which the library does not expect."""
    status = status_of(error)
    if status in (404, 410):
        return not lacks_bucket(error)
    if status == 400:
        return "match calculated" in str(error)
    return isinstance(error, ValueError) and "Bytes stream" in str(error)


def is_broken_connection(error: BaseException) -> bool:
    from http.client import HTTPException

    from google.auth.exceptions import TransportError
    from requests import exceptions as of_requests
    from urllib3 import exceptions as of_urllib3

    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return False
    broken = (
        ConnectionError,
        HTTPException,
        TransportError,
        of_requests.ConnectionError,
        of_requests.ChunkedEncodingError,
        of_requests.Timeout,
        of_urllib3.PoolError,
        of_urllib3.ProtocolError,
        of_urllib3.SSLError,
        of_urllib3.TimeoutError,
    )
    return isinstance(error, broken)
