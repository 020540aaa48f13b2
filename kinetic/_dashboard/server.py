"""The dashboard's server on the loopback address, for `kinetic dashboard` and for notebooks.

Other users of the machine can see the browser's command line. So the browser is started with a
one-time address, which redirects to the address with the token.
"""

from __future__ import annotations

import contextlib
import hmac
import html
import os
import re
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import PlainTextResponse, RedirectResponse

from kinetic._config import settings
from kinetic._dashboard.guard import Guard, headers_of, is_allowed
from kinetic._dashboard.pages import make_app, read_style
from kinetic._store import files
from kinetic.errors import StoreError, UsageError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from kinetic._client.access import JobAccess

_ADDRESS = "127.0.0.1"
_GRACE_S = 1
_FRAME_PX = 640
_USED = "This address works only once. Use the address that `kinetic dashboard` printed.\n"


class DashboardServer:
    """Serves the pages about a store's jobs. Attribute `port` is the port that it listens on.

    Args:
        access: access to the jobs.
        port: port on the loopback address; 0 for any free port.
        is_framed: True if notebooks may show the pages in a frame.

    Raises:
        UsageError: the port is in use.
    """

    def __init__(self, access: JobAccess, port: int = 0, *, is_framed: bool = False) -> None:
        self._socket = _listen(port)
        self.port = int(self._socket.getsockname()[1])
        self._token, self._ticket = _find_token(port), os.urandom(16).hex()
        app = make_app(access, lambda: self._server.should_exit)
        self._guard = Guard(app, self._token, read_style(), is_framed=is_framed)
        config = uvicorn.Config(
            self._serve,
            interface="asgi3",
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="error",  # Do not log malformed requests of other programs.
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<DashboardServer {self.url}>"

    def _repr_html_(self) -> str:
        url = html.escape(self.url, quote=True)
        return (
            f'<iframe src="{url}" title="Jobs of kinetic" width="100%" height="{_FRAME_PX}" '
            f'style="border:1px solid rgba(139,141,152,.4);border-radius:8px"></iframe>'
            f'<div style="font-size:12px;opacity:.75"><a href="{url}" target="_blank">Open in a '
            "new tab</a></div>"
        )

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http://{_ADDRESS}:{self.port}/{self._token}/"

    @property
    def first_url(self) -> str:
        """A one-time address that redirects to the first page."""
        return f"http://{_ADDRESS}:{self.port}/open/{self._ticket}"

    @property
    def is_running(self) -> bool:
        """True if the server runs in a thread."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """Serve in a daemon thread, which ends with this process."""
        self._thread = threading.Thread(target=self.run, name="kinetic-dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(4 * _GRACE_S)
        self._socket.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and path.startswith("/open/"):
            await self._open(path, scope, receive, send)
        else:
            await self._guard(scope, receive, send)

    async def _open(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        is_ticket = hmac.compare_digest(path.removeprefix("/open/").encode(), self._ticket.encode())
        response: Any = PlainTextResponse(_USED, status_code=403)
        if is_ticket and self._ticket and scope["method"] == "GET" and is_allowed("GET", headers):
            self._ticket = ""
            response = RedirectResponse(f"/{self._token}/", status_code=303)
        response.headers["referrer-policy"] = "no-referrer"
        response.headers["cache-control"] = "no-store"
        await response(scope, receive, send)


def _find_token(port: int) -> str:
    """Return the token for every address. If the user chose the port, reuse the token of the last
    start on that port, so that open tabs and bookmarks stay valid."""
    token = os.urandom(16).hex()
    if not port:
        return token
    home = settings.load().home
    path = home / "dashboard" / str(port)
    with contextlib.suppress(
        OSError, UnicodeError, StoreError
    ):  # Without a usable file, each start has a new token.
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.make_below(path.parent, home)
        if path.exists() and re.fullmatch("[0-9a-f]{32}", before := files.content(path).decode()):
            return before
        files.save(path, [token.encode()])
    return token


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_ADDRESS, port))
        listener.listen()  # Requests wait until the server runs, instead of being refused.
    except (OSError, OverflowError) as error:
        listener.close()
        raise UsageError(
            f"The dashboard cannot listen on port {port} of {_ADDRESS}: {error}. Choose another "
            "port with --port, or omit --port to use any free port."
        ) from error
    return listener


def open_browser(url: str) -> bool:
    """Open an address in a browser that has its own windows; return False if there is no such
    browser. A text browser would take over this terminal."""
    import webbrowser

    with contextlib.suppress(webbrowser.Error):
        browser = webbrowser.get()
        return type(browser) is not webbrowser.GenericBrowser and browser.open(url)
    return False
