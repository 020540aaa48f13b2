"""Access control for the pages: every request passes it first.

Every address contains a token, which no other site can know. A cookie would be unsafe: a browser
sends a loopback address's cookies to servers on all ports, even if another site makes the request.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse, RedirectResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_SAFE_METHODS = frozenset({"GET", "HEAD"})
_NOTEBOOKS = (
    "http://127.0.0.1:* http://localhost:* https://127.0.0.1:* https://localhost:* vscode-webview:"
)
REFUSAL = (
    "This is not the address of a dashboard. Use the address that `kinetic dashboard` printed: it "
    "contains a token, which changes with each start unless you choose a port.\n"
)


class Guard:
    """Passes on only requests that have the token and use a name of this machine. Requests that
    change something must also come from a page of the dashboard.

    Args:
        app: receives the allowed requests, without the token in their paths.
        token: the first part of the path of every address.
        style: the style sheet in the pages; the browser refuses any other.
        is_framed: True if notebooks on this machine may show the pages in a frame.
    """

    def __init__(self, app: ASGIApp, token: str, style: str, *, is_framed: bool = False) -> None:
        self._app = app
        self._token = token.encode()
        self._headers = _security_headers(style, _NOTEBOOKS if is_framed else "'none'")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        token, slash, path = scope["path"].removeprefix("/").partition("/")
        rest = f"{slash}{path}"
        is_known = hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self._token)
        if not is_known or not is_allowed(scope["method"], headers_of(scope)):
            response = PlainTextResponse(REFUSAL, status_code=403)
            await response(scope, receive, send_guarded)
            return
        # Redirect to the address without a final slash: addresses in pages are relative to it.
        if (page := rest.rstrip("/") or "/") != rest:
            query = scope["query_string"].decode("latin-1")
            address = f"/{self._token.decode()}{page}{'?' if query else ''}{query}"
            await RedirectResponse(address)(scope, receive, send_guarded)
            return
        inside = {**scope, "path": rest, "raw_path": rest.encode(), "root_path": ""}
        await self._app(inside, receive, send_guarded)


def is_allowed(method: str, headers: Mapping[str, list[str]]) -> bool:
    """True if a request names this machine as its host. A request that changes something must also
    come from a page of the dashboard.

    Checking `Host` stops DNS rebinding, where an attacker's name resolves to this machine.
    """
    hosts = headers.get("host", [])
    if len(hosts) != 1 or _name_of(hosts[0]) not in _LOOPBACK:
        return False
    return method in _SAFE_METHODS or headers.get("origin") == [f"http://{hosts[0]}"]


def _name_of(host: str) -> str:
    """Return the name in "name:port"; "" if the text is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        is_plain = parts.netloc == host and parts.username is None and parts.port != 0
        return parts.hostname or "" if is_plain else ""
    except ValueError:
        return ""


def headers_of(scope: Scope) -> dict[str, list[str]]:
    """Return the values of each header by its name in lower case."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def _security_headers(style: str, frames: str) -> list[tuple[bytes, bytes]]:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'sha256-{digest}'; img-src data:; "
        f"connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors {frames}"
    )
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()]
