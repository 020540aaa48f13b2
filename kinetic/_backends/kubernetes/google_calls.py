"""Calls of Google's REST interfaces: repeated while a service has trouble, with fresh logins.

In: requests, a login. Out: answers as JSON, or an error that says what to do.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Protocol

from kinetic._backends.kubernetes import credentials
from kinetic._backends.kubernetes.errors import read_retry_after
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, PreflightError


class CallerIdentity(Protocol):
    """The caller's identity."""

    def authorization(self) -> str:
        """Return the value of the header: "Bearer " and a token."""
        ...

    def forget_token(self) -> None:
        """Forget the token, which was not accepted."""
        ...


class GoogleLogin:
    """Google's application default credentials; a token is kept until it is refused."""

    def __init__(self, make: Callable[[], str] = credentials.ask_google) -> None:
        self._make = make
        self._token = ""

    def authorization(self) -> str:
        """Return the header's value.

        Raises:
            PreflightError: there is no login.
        """
        self._token = self._token or self._make()
        return f"Bearer {self._token}"

    def forget_token(self) -> None:
        """Get another token next time."""
        self._token = ""


@dataclass(frozen=True)
class ServicePatience:
    """How long to wait for a service.

    Attributes:
        tries: how often it is called.
        request_s: for how long each time.
    """

    tries: int = 5
    request_s: float = 60.0


class ServiceRefused(PreflightError):
    """A service has refused a request. `code` is HTTP's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class GoogleCalls:
    """Calls with one login."""

    def __init__(
        self,
        login: CallerIdentity,
        *,
        patience: ServicePatience | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Call nothing yet.

        Args:
            login: the caller's.
            patience: how long to wait.
            sleep: for tests.
        """
        self._login = login
        self._patience = patience or ServicePatience()
        self._sleep = sleep

    def call(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        headers: Callable[[str], Mapping[str, str]] = lambda _: {},
        allowed: tuple[int, ...] = (),
        repeats: bool = True,
    ) -> tuple[int, dict[str, Any]]:
        """Call, repeatedly while the service has trouble, and return status code and answer.

        Args:
            method, url, body: of the request.
            headers: returns the headers, given the value of Authorization.
            allowed: codes that count as answers, too.
            repeats: whether it may arrive twice; otherwise only rejected requests are repeated.

        Raises:
            Refused: the service will not do it.
            BackendUnavailable: it does not answer.
        """
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        place = urllib.parse.urlsplit(url).netloc
        tries, pause_s, renewed = 0, 1.0, False
        while True:
            proof = self._login.authorization()
            sent = {"Authorization": proof, "Content-Type": kind, **headers(proof)}
            asked = urllib.request.Request(url, data, sent, method=method)
            try:
                with urllib.request.urlopen(asked, timeout=self._patience.request_s) as answer:
                    content = answer.read()
                    return answer.status, json.loads(content) if content else {}
            except urllib.error.HTTPError as error:
                said: Exception = error
                with error:  # It is the response as well.
                    if error.code in allowed:
                        return error.code, {}
                    if error.code == 401 and not renewed:
                        renewed = True
                        self._login.forget_token()
                        continue
                    if error.code < 500 and error.code not in (408, 429):
                        raise ServiceRefused(_explain_refusal(place, error), error.code) from error
                    pause_s = max(
                        pause_s, read_retry_after(error.headers.get("Retry-After")) or 0.0
                    )
                    if not repeats and error.code != 429:
                        break
            except (OSError, HTTPException, ValueError) as error:
                said = error
                if not repeats:
                    break
            tries += 1
            if tries >= self._patience.tries:
                break
            self._sleep(pause_s)
            pause_s *= 2
        raise BackendUnavailable(f"{place} does not answer: {said}. Try again later.") from said


def _explain_refusal(place: str, error: urllib.error.HTTPError) -> str:
    try:
        reason = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        reason = error.reason
    advice = {
        401: "Log in with `gcloud auth application-default login`.",
        403: "Ask for roles/cloudbuild.builds.editor, roles/artifactregistry.reader and "
        "roles/storage.objectUser.",
        404: "Does it exist, and is the service enabled in the project?",
    }
    text = f"{place} refused ({error.code}): {str(reason).rstrip('.')}. "
    return f"{text}{advice.get(error.code, '')}".rstrip()
