"""Calls to Google's REST interfaces, with google-auth's logins and urllib3's retries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kinetic._backends.kubernetes import credentials
from kinetic._system import proxies
from kinetic.errors import BackendUnavailable, PreflightError

if TYPE_CHECKING:
    from google.auth.transport.urllib3 import AuthorizedHttp

REQUEST_S = 60.0
TRIES = 5
BUSY = (408, 429, 500, 502, 503, 504)
"""The HTTP codes after which the same request may succeed."""
REJECTED = (429,)
"""The HTTP codes which mean that the request certainly had no effect."""


class ServiceRefused(PreflightError):
    """A service refused a request. `code` is the HTTP status, `detail` Google's error object."""

    def __init__(self, message: str, code: int, detail: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.code = code
        self.detail = detail


class GoogleCalls:
    """Calls with one login. Threads may share an instance."""

    def __init__(self, login: Any = None, *, first_pause_s: float = 1.0) -> None:
        """Create the object without calling Google.

        Args:
            login: credentials of google-auth; by default the application's.
            first_pause_s: seconds before the second try; each further pause is twice as long.
        """
        self._login = login
        self._first_pause_s = first_pause_s
        self._servers: dict[str, AuthorizedHttp] = {}

    def call(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        accept: str = "*/*",
        allowed: tuple[int, ...] = (),
        repeats: bool = True,
    ) -> tuple[int, Any]:
        """Send a request; return the status code and the parsed answer, {} without content.

        Args:
            method, url, body: the request.
            accept: the accepted types of content.
            allowed: error codes to return instead of raising.
            repeats: True if the request may be received twice; otherwise it is repeated only if it
                certainly had no effect.

        Raises:
            ServiceRefused: the service refused the request.
            PreflightError: the login failed.
            BackendUnavailable: the service does not answer.
        """
        import google.auth.exceptions
        import urllib3

        address = urlsplit(url).netloc
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        retries = urllib3.Retry(
            TRIES - 1,
            read=None if repeats else 0,
            status_forcelist=BUSY if repeats else REJECTED,
            allowed_methods=None,
            backoff_factor=self._first_pause_s,
            raise_on_status=False,
        )
        try:
            response = self._open(url).request(
                method,
                url,
                body=data,
                headers={"Content-Type": kind, "Accept": accept},
                timeout=REQUEST_S,
                retries=retries,
            )
        except google.auth.exceptions.GoogleAuthError as error:
            raise credentials.explain_google(error) from error
        except urllib3.exceptions.HTTPError as error:
            raise BackendUnavailable(
                f'{address} does not answer: "{error}". Check the network and your proxy '
                "(HTTPS_PROXY, NO_PROXY), then try again."
            ) from error
        code = int(response.status)
        if code in allowed:
            return code, {}
        if code in BUSY:
            text = f"{address} does not answer (HTTP {code}). Try again later."
            raise BackendUnavailable(text)
        try:
            answer = json.loads(response.data) if response.data else {}
        except ValueError:
            answer = {}
        if code >= 400:
            detail = (answer if isinstance(answer, dict) else {}).get("error") or {}
            raise ServiceRefused(_explain_refusal(address, code, detail), code, detail)
        return code, answer

    def _open(self, url: str) -> AuthorizedHttp:
        from google.auth.transport.urllib3 import AuthorizedHttp

        if self._login is None:
            self._login = credentials.find_google_credentials()
        address = urlsplit(url).netloc
        if address not in self._servers:
            self._servers[address] = AuthorizedHttp(self._login, proxies.open_pools(url))
        return self._servers[address]


def _explain_refusal(address: str, code: int, detail: Mapping[str, Any]) -> str:
    reason = detail.get("message") or ""
    advice = {
        401: "Log in with `gcloud auth application-default login`.",
        403: "Ask for roles/cloudbuild.builds.editor, roles/artifactregistry.reader and "
        "roles/storage.objectUser.",
        404: "Check the project's name, and that the service is enabled in the project.",
    }
    quote = f': "{reason}"' if reason else ""
    return f"{address} refused a request (HTTP {code}){quote}. {advice.get(code, '')}".rstrip()
