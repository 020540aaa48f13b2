"""Errors of calls to a Ray cluster's dashboard, with advice for the user.

In: an error of the connection, or a response. Out: one of kinetic's exceptions.
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
    """Return the error for a dashboard that cannot be reached, or does not answer."""
    import urllib3

    cause = error
    while isinstance(cause, urllib3.exceptions.MaxRetryError) and cause.reason is not None:
        cause = cause.reason
    # Drop the description of the connection at the start.
    text = re.sub(r"^\w+\(.*?\): ", "", " ".join(str(cause).split())) or type(cause).__name__
    if isinstance(cause, urllib3.exceptions.SSLError) and not _is_cut_off(cause):
        return PreflightError(
            f"The certificate of {address} is not trusted ({text}). Set SSL_CERT_FILE to "
            "the file with the certificate of its authority, or write http:// if the dashboard "
            "does not use TLS."
        )
    if isinstance(cause, urllib3.exceptions.NameResolutionError):
        return BackendUnavailable(
            f"The host name of {address} could not be resolved ({text}). Check the address of the "
            "Ray cluster (KINETIC_ADDRESS, the profile, or RAY_ADDRESS), and your VPN if it needs "
            "one."
        )
    if isinstance(cause, urllib3.exceptions.ProxyError):
        return BackendUnavailable(
            f"The proxy of your environment could not reach {address} ({text}). If the host is "
            "reachable without the proxy, add it to NO_PROXY."
        )
    if isinstance(cause, urllib3.exceptions.ReadTimeoutError):
        return BackendUnavailable(
            f"The Ray cluster at {address} accepted the request, but does not answer ({text}). Its "
            "head may be overloaded: try again later. Submitted jobs are not affected."
        )
    return BackendUnavailable(
        f"Nothing answers at {address} ({text}). Check that the Ray cluster runs, that its "
        "dashboard accepts remote connections (`ray start --head --include-dashboard=true "
        "--dashboard-host=0.0.0.0`, package ray[default]), and that its port is reachable from "
        "here (on Kubernetes: `kubectl port-forward service/NAME-head-svc 8265`)."
    )


def _is_cut_off(error: Exception) -> bool:
    """True if the connection was cut off, for example because a load balancer restarts; False for
    problems with a certificate."""
    import ssl

    cut_off = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    return any(isinstance(line, cut_off) for line in error.args)


def explain_wrong_server(address: str) -> PreflightError:
    """Return the error for a server that is not a Ray dashboard."""
    return PreflightError(
        f"The server at {address} is not a Ray dashboard. Write the address of the cluster's "
        "dashboard, usually http://host:8265. If a login page is in front of it, use a direct "
        "address or a port-forward."
    )


def explain_refusal(
    address: str, response: BaseHTTPResponse, body: bytes, *, has_token: bool
) -> KineticError:
    """Return the error for a response that is a refusal."""
    status, is_page = response.status, _is_page(response, body)
    message = response.reason or "" if is_page else last_line(body.decode(errors="replace"))
    if status == 401:
        return PreflightError(
            f"The Ray cluster at {address} asks for a token. Set RAY_AUTH_TOKEN, or set "
            "RAY_AUTH_TOKEN_PATH to the file that holds it. `ray get-auth-token` on the head node "
            "shows the token."
        )
    if status == 403:
        problem = "does not accept your token" if has_token else "refuses calls without a token"
        return PreflightError(
            f"The Ray cluster at {address} {problem} (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            "~/.ray/auth_token). `ray get-auth-token` on the head node shows the right one."
        )
    if status < 400 or (status < 500 and is_page):
        return explain_wrong_server(address)
    if status == 404 or "file is not found" in message.lower() or "no such file" in message.lower():
        return NotFound(
            f"The Ray cluster at {address} does not know the requested job or file ({message}). If "
            "the cluster was restarted, its earlier jobs are lost: submit the job again."
        )
    if 400 <= status < 500 or "already exists" in message:
        return SubmitError(f"The Ray cluster at {address} refused the request: {message}.")
    return BackendUnavailable(
        f'The Ray cluster at {address} failed to answer (HTTP {status}): "{message}". Try again '
        "later. Submitted jobs are not affected."
    )


def _is_page(response: BaseHTTPResponse, body: bytes) -> bool:
    """True if the response is an HTML page. A dashboard refuses in plain text or JSON, so the page
    is from another server, perhaps a proxy in front of a dashboard that does not answer."""
    kind = response.headers.get("content-type", "")
    return kind.startswith("text/html") or b"<html" in body[:500].lower()


def last_line(text: str) -> str:
    """Return the last line of a traceback from Ray."""
    lines = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
    return lines[-1].rstrip(".")[:500] if lines else "no reason given"


_MOST_CHARS = 1000
_INSTALLER_PREFIX = re.compile(r".*Last \d+ lines of std(?:out|err):", re.DOTALL)


def last_words(text: str) -> str:
    """Return the end of a message from Ray as one line, because the cause comes last. Omit stack
    frames before the output of an installer."""
    words = " ".join(_INSTALLER_PREFIX.sub("", text).split())
    return words if len(words) <= _MOST_CHARS else f"… {words[-_MOST_CHARS:]}"
