"""What went wrong between here and the dashboard of a Ray cluster, and what to do about it.

In: an error of the connection, or an answer. Out: one of kinetic's exceptions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kinetic.errors import (
    BackendUnavailable,
    KineticError,
    NotFound,
    PreflightError,
    SubmitError,
)

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse


def explain_silence(address: str, error: Exception) -> KineticError:
    """Return the error for a dashboard that cannot be reached, or that does not answer."""
    import urllib3

    cause = error
    while isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        cause = cause.reason
    # Without the connection's own description in front.
    text = re.sub(r"^\w+\(.*?\): ", "", " ".join(str(cause).split())) or type(cause).__name__
    if isinstance(cause, urllib3.exceptions.SSLError) and not _is_cut_off(cause):
        return PreflightError(
            f"The certificate of {address} is not trusted ({text}). Name the authority that "
            "signed it by SSL_CERT_FILE, or write http:// if the dashboard has no certificate."
        )
    if isinstance(cause, urllib3.exceptions.NameResolutionError):
        return BackendUnavailable(
            f"No machine is known by the name of {address} ({text}). Check the address of the Ray "
            "cluster (KINETIC_ADDRESS, the profile, or RAY_ADDRESS), and a VPN if it needs one."
        )
    if isinstance(cause, urllib3.exceptions.ProxyError):
        return BackendUnavailable(
            f"The proxy of your environment does not lead to {address} ({text}). Hosts that are "
            "reached without it belong in NO_PROXY."
        )
    if isinstance(cause, urllib3.exceptions.ReadTimeoutError):
        return BackendUnavailable(
            f"The Ray cluster at {address} took the request, but does not answer ({text}). Its "
            "head may be overloaded: try again later; jobs that were submitted are not affected."
        )
    return BackendUnavailable(
        f"Nothing answers at {address} ({text}). Check that the Ray cluster runs and has a "
        "dashboard that others reach (`ray start --head --include-dashboard=true "
        "--dashboard-host=0.0.0.0`, package ray[default]), and that its port is reachable from "
        "here (on Kubernetes: `kubectl port-forward service/NAME-head-svc 8265`)."
    )


def _is_cut_off(error: Exception) -> bool:
    """Whether a connection ended in the middle, as when what balances the load starts again: it
    says nothing of certificates."""
    import ssl

    cut_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    return any(isinstance(line, cut_off) for line in error.args)


def explain_stranger(address: str) -> PreflightError:
    """Return the error for something else that answers."""
    return PreflightError(
        f"What answers at {address} is no Ray dashboard. Write the address of the cluster's "
        "dashboard, usually http://host:8265; where a login page is in front of it, a direct "
        "address or a port-forward is needed."
    )


def explain_refusal(
    address: str, response: BaseHTTPResponse, body: bytes, *, has_token: bool
) -> KineticError:
    """Return the error for an answer that is a refusal."""
    status, is_page = response.status, _is_page(response, body)
    message = response.reason or "" if is_page else last_line(body.decode(errors="replace"))
    if status == 401:
        return PreflightError(
            f"The Ray cluster at {address} asks for a token. Set RAY_AUTH_TOKEN, or "
            "RAY_AUTH_TOKEN_PATH to the file that holds it (`ray get-auth-token` shows it on the "
            "head)."
        )
    if status == 403:
        token = "does not accept your token" if has_token else "does not let you in without a token"
        return PreflightError(
            f"The Ray cluster at {address} {token} (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            "~/.ray/auth_token). Compare it with what `ray get-auth-token` shows on the head."
        )
    if status < 400 or (status < 500 and is_page):
        return explain_stranger(address)
    if status == 404 or "file is not found" in message.lower() or "no such file" in message.lower():
        return NotFound(f"The Ray cluster at {address} has none: {message}.")
    if 400 <= status < 500 or "already exists" in message:
        return SubmitError(f"The Ray cluster at {address} refuses: {message}.")
    return BackendUnavailable(
        f"The Ray cluster at {address} could not do that at present (HTTP {status}): {message}. "
        "Try again later; jobs that were submitted are not affected."
    )


def _is_page(response: BaseHTTPResponse, body: bytes) -> bool:
    """Whether it is for people: a dashboard's refusals are plain text or JSON. What stands before
    it shows a page as well, while the dashboard does not answer."""
    kind = response.headers.get("content-type", "")
    return kind.startswith("text/html") or b"<html" in body[:500].lower()


def last_line(text: str) -> str:
    """Return what a traceback of Ray's says in the end."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return lines[-1].rstrip(".")[:500] if lines else "it does not say why"


_MOST_CHARS = 1000
_OF_INSTALLER = re.compile(r".*Last \d+ lines of std(?:out|err):", re.DOTALL)


def last_words(text: str) -> str:
    """Return the end of a message of Ray's in one line, what an installer printed without the
    frames before it: the cause comes last."""
    words = " ".join(_OF_INSTALLER.sub("", text).split())
    return words if len(words) <= _MOST_CHARS else f"… {words[-_MOST_CHARS:]}"
