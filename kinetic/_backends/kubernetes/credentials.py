"""Proofs of identity: tokens, certificates, exec plugins and google-auth, renewed as they expire.

In: an `Access`. Out: `Proof`s, kept while they are valid. Nothing is written.
"""

from __future__ import annotations

import base64
import json
import logging
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kinetic._backends.kubernetes import kubeconfig
from kinetic._backends.kubernetes.kubeconfig import Access, read_content
from kinetic._backends.kubernetes.resources import seconds_of
from kinetic._core.values import dataclass
from kinetic._system import proxies
from kinetic.errors import PreflightError

EARLY_S = 60.0
"""A proof is renewed this long before it expires."""
REREAD_S = 60.0
"""A token in a file is read again after this time: pods' tokens are replaced in place."""
PLUGIN_S = 300.0
"""An exec plugin may wait this long for the user to log in."""
_GKE_PLUGIN = "gke-gcloud-auth-plugin"
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


_log = logging.getLogger("kinetic.login")
QUIET_S = 2.0
"""A program that ends within this time has not waited for its user."""
PROMPT_S = 0.5
"""A line without an end for this long is a prompt."""
AFTER_S = 1.0
"""How long to wait for output once the program has ended: another process may hold its pipes."""
_TICK_S = 0.1


@dataclass(frozen=True)
class Proof:
    """Proof of the caller's identity.

    Attributes:
        authorization: the value of the header, or "".
        certificate, key: in PEM, or b"".
        expires_at: seconds since the epoch; None for never.
        impersonated: headers with whom the caller acts for; a name may be there twice.
    """

    authorization: str = ""
    certificate: bytes = b""
    key: bytes = b""
    expires_at: float | None = None
    impersonated: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return "Proof(…)"

    def is_late(self, now: float) -> bool:
        """Whether it is time to renew it."""
        return self.expires_at is not None and self.expires_at - EARLY_S <= now


class Credentials:
    """The proof of an access, renewed before it expires. Threads may share it."""

    def __init__(
        self, access: Access, variables: Mapping[str, str], clock: Callable[[], float]
    ) -> None:
        """Get no proof yet.

        Args:
            access: the access.
            variables: of the environment, for plugins.
            clock: seconds since the epoch.
        """
        self._access = access
        self._variables = variables
        self._clock = clock
        self._lock = threading.Lock()
        self._proof: Proof | None = None

    def proof(self) -> Proof:
        """Return a proof that is valid now."""
        with self._lock:
            known = self._proof
            if known is None or known.is_late(self._clock()):
                known = self._proof = self._make_proof()
            return known

    def renew_proof(self, proof: Proof) -> Proof:
        """Return a new proof after the server refused one: the kubeconfig may have been rewritten
        since."""
        with self._lock:
            if self._proof is proof or self._proof is None:
                self._access = kubeconfig.read_again(self._access)
                self._proof = self._make_proof()
            return self._proof

    def _make_proof(self) -> Proof:
        return proof_of(self._access, self._variables, self._clock())


def proof_of(access: Access, variables: Mapping[str, str], now: float) -> Proof:
    """Make the proof that a user's entry describes.

    Raises:
        PreflightError: it cannot be made; says why.
    """
    try:
        impersonated = tuple(_list_impersonated(access.user))
        if not all(text.isascii() and text.isprintable() for _, text in impersonated):
            raise ValueError("whom it acts for has letters that no header has")
        proof = replace(_proof_of(access, variables, now), impersonated=impersonated)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PreflightError(
            f"The user of the kubeconfig's context {access.context} is malformed "
            f"({type(error).__name__}: {error}). Mend it, or log in again."
        ) from error
    if not (proof.authorization.isascii() and proof.authorization.isprintable()):
        raise PreflightError(
            f"The token of the kubeconfig's context {access.context} has letters that no token "
            "has, such as the end of a line. Log in again."
        )
    return proof


def _proof_of(access: Access, variables: Mapping[str, str], now: float) -> Proof:
    user = access.user
    certificate, key = (read_content(user, f"client-{kind}") for kind in ("certificate", "key"))
    if user.get("token") and not user.get("tokenFile"):
        return Proof(f"Bearer {str(user['token']).strip()}", certificate, key)
    if user.get("tokenFile"):
        try:
            token = Path(user["tokenFile"]).read_text().strip()
        except OSError as error:
            raise PreflightError(
                f"The token in {user['tokenFile']} cannot be read: {error}."
            ) from error
        return Proof(f"Bearer {token}", certificate, key, now + EARLY_S + REREAD_S)
    if user.get("exec"):
        return _from_plugin(access, user["exec"], variables)
    if user.get("auth-provider"):
        return _from_provider(access, user["auth-provider"])
    if user.get("username"):
        pair = f"{user['username']}:{user.get('password', '')}".encode()
        return Proof(f"Basic {base64.b64encode(pair).decode()}", certificate, key)
    return Proof("", certificate, key)


def _list_impersonated(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """https://kubernetes.io/docs/reference/access-authn-authz/user-impersonation/"""
    for key, header in (("as", "User"), ("as-uid", "Uid")):
        if user.get(key):
            yield f"Impersonate-{header}", str(user[key])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for name, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{quote(name.lower(), safe='')}", str(value)


def _from_plugin(access: Access, plugin: Mapping[str, Any], variables: Mapping[str, str]) -> Proof:
    command = str(plugin.get("command", ""))
    if shutil.which(command, path=variables.get("PATH")) is None:
        if command.endswith(_GKE_PLUGIN):
            return from_google()
        hint = (
            f" {' '.join(str(plugin['installHint']).split())}" if plugin.get("installHint") else ""
        )
        raise PreflightError(
            f"The kubeconfig's context {access.context} logs in with {command}, which is not "
            f"installed.{hint}"
        )
    status = _status_of(access, plugin, command, variables)
    return Proof(
        f"Bearer {str(status['token']).strip()}" if status.get("token") else "",
        str(status.get("clientCertificateData") or "").encode(),
        str(status.get("clientKeyData") or "").encode(),
        seconds_of(str(status.get("expirationTimestamp") or "")),
    )


def _status_of(
    access: Access, plugin: Mapping[str, Any], path: str, variables: Mapping[str, str]
) -> Mapping[str, Any]:
    """Run an exec plugin by the ExecCredential protocol."""
    mode = plugin.get("interactiveMode")
    interactive = mode != "Never" and _has_terminal()
    if mode == "Always" and not interactive:
        raise PreflightError(
            f"The kubeconfig's context {access.context} logs in with {path}, which asks its user "
            "each time, and there is no terminal here. Run this in one, or log in another way."
        )
    spec: dict[str, Any] = {"interactive": interactive}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = dict(access.cluster)
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    asked = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    given = {str(v["name"]): str(v.get("value") or "") for v in plugin.get("env") or ()}
    try:
        ran = run_plugin(
            [path, *(str(a) for a in plugin.get("args") or ())],
            {**variables, **given, "KUBERNETES_EXEC_INFO": json.dumps(asked)},
            lambda line: _log.warning("%s says: %s", Path(path).name, line),
            interactive=interactive,
            limit_s=PLUGIN_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(f"Logging in with {path} failed: {error}.") from error
    if ran.code != 0:
        said = " ".join(ran.said.decode(errors="replace").split())[-500:]
        raise PreflightError(
            f"Logging in with {path} failed (exit code {ran.code}): {said or 'no output'}."
        )
    try:
        status = json.loads(ran.output)["status"]
        assert isinstance(status, dict)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise PreflightError(f"{path} printed no ExecCredential with a status.") from error
    if not (status.get("token") or status.get("clientCertificateData")):
        raise PreflightError(f"{path} printed no token and no certificate. Log in again.")
    return status


def _has_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):  # There is none, or it is closed.
        return False


def _from_provider(access: Access, provider: Mapping[str, Any]) -> Proof:
    """For old kubeconfigs. Tokens of OIDC are refreshed by kubectl alone, which keeps what comes
    with them: where an issuer gives a refresh token only once, a second reader would log it out."""
    name = provider.get("name")
    if name == "gcp":
        return from_google()
    if name == "oidc":
        return Proof(f"Bearer {str(provider['config']['id-token']).strip()}")
    raise PreflightError(
        f"The kubeconfig's context {access.context} logs in by the auth-provider {name}, which is "
        "no longer supported. Get credentials for the cluster again, with a current version of "
        "your provider's tools."
    )


def from_google() -> Proof:
    """Return a token from Google's application default credentials, for GKE without gcloud.

    Raises:
        PreflightError: there are none.
    """
    advice = (
        "Install gke-gcloud-auth-plugin, or log in with `gcloud auth application-default login`."
    )
    try:
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.urllib3
    except ImportError as error:
        raise PreflightError(f"Logging in to Google Cloud needs google-auth. {advice}") from error
    try:
        found, _ = google.auth.default(scopes=_SCOPES)
        found.refresh(_ask_google)
    except google.auth.exceptions.GoogleAuthError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise PreflightError(f"Logging in to Google Cloud failed: {said}. {advice}") from error
    expiry = found.expiry
    expires_at = None if expiry is None else seconds_of(f"{expiry.isoformat()}+00:00")
    return Proof(f"Bearer {found.token}", expires_at=expires_at)


def _ask_google(url: str, *args: Any, **more: Any) -> Any:
    """A request as google-auth makes it: to different servers, each by its proxy."""
    from google.auth.transport.urllib3 import Request

    return Request(proxies.open_pools(url))(url, *args, **more)


@dataclass(frozen=True)
class Ran:
    """How the program ended.

    Attributes:
        code: it exited with.
        output: its standard output.
        said: its standard error.
    """

    code: int
    output: bytes
    said: bytes


def run_plugin(
    command: Sequence[str],
    env: Mapping[str, str],
    tell: Callable[[str], object],
    *,
    interactive: bool,
    limit_s: float,
    quiet_s: float = QUIET_S,
) -> Ran:
    """Run a kubeconfig's login program to its end. It may wait for its user, who would otherwise
    see nothing for minutes.

    Args:
        command, env: of the program.
        tell: hears what it says, line by line, once it takes longer than `quiet_s`.
        interactive: whether it may read from the terminal.
        limit_s: it is killed after this time.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it took too long.
    """
    begun = time.monotonic()
    output, said = b"", b""
    ended_at: float | None = None
    messages = _LoginMessages(tell, begun + quiet_s)
    with subprocess.Popen(
        command,
        env=dict(env),
        stdin=None if interactive else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            while True:
                try:
                    output, said = process.communicate(timeout=_TICK_S)
                    return Ran(process.returncode, output, said)
                except subprocess.TimeoutExpired as so_far:
                    output, said = so_far.output or output, so_far.stderr or said
                now = time.monotonic()
                if process.poll() is not None:
                    ended_at = ended_at or now
                    if now - ended_at >= AFTER_S:
                        return Ran(process.returncode, output, said)
                if now - begun >= limit_s:
                    raise subprocess.TimeoutExpired(command[0], limit_s)
                messages.hear(said, now)
        except BaseException:
            process.kill()
            raise


class _LoginMessages:
    """Tells what a program says, in whole lines as long as these end."""

    def __init__(self, tell: Callable[[str], object], tell_from: float) -> None:
        self._tell, self._tell_from = tell, tell_from
        self._heard, self._heard_at = 0, 0.0
        self._told = 0

    def hear(self, said: bytes, now: float) -> None:
        """Tell what is due of all that was said."""
        if len(said) > self._heard:
            self._heard, self._heard_at = len(said), now
        if now < self._tell_from:
            return
        is_prompt = now - self._heard_at >= PROMPT_S
        end = len(said) if is_prompt else said.rfind(b"\n") + 1
        new, self._told = said[self._told : end], max(self._told, end)
        for line in new.decode(errors="replace").splitlines():
            if line.strip():
                self._tell(line.rstrip())
