"""Logging in as a kubeconfig's user: by token, certificate, program, or Google's credentials.

The official client reads certificates, tokens and passwords. This module runs the programs that log
in: the client would continue as an anonymous user after a failed program, and wait forever for a
hanging one. This module refuses users that impersonate others (`as:`), because the client ignores
`as:` and would act with other rights than the kubeconfig says.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._backends.kubernetes.kubeconfig import Access
from kinetic._system import proxies
from kinetic.errors import PreflightError

PLUGIN_S = 300.0
"""Time limit in seconds for a program that logs in; it may wait for the user."""
CERTIFICATE_KEYS = (
    "client-certificate",
    "client-certificate-data",
    "client-key",
    "client-key-data",
)
IMPERSONATION_KEYS = ("as", "as-uid", "as-groups", "as-user-extra")
_GKE_PLUGIN = "gke-gcloud-auth-plugin"
_LOGIN = "Log in with `gcloud auth application-default login`"
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)


def log_in(access: Access, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the user's kubeconfig entry, with a token, a certificate, or a name and password.

    Args:
        access: the cluster and the user.
        variables: the environment, for programs that log in.

    Raises:
        PreflightError: the login failed; the message says why.
    """
    try:
        user = _log_in(access, variables)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PreflightError(
            f'The user in {access.origin} is malformed: "{type(error).__name__}: {error}". Repair '
            "the kubeconfig, or log in again."
        ) from error
    token = user.get("token", "")
    if not (token.isascii() and token.isprintable()):
        raise PreflightError(
            f"The login token of {access.origin} contains characters that are not allowed, such as "
            "a line end. Log in again."
        )
    return user


def _log_in(access: Access, variables: Mapping[str, str]) -> dict[str, Any]:
    user = access.user
    if acting := [key for key in IMPERSONATION_KEYS if user.get(key)]:
        raise PreflightError(
            f"The kubeconfig's context {access.context!r} impersonates another user (key "
            f"{acting[0]!r}), which kinetic cannot do. Set cluster= to a context without it."
        )
    certificates = {key: user[key] for key in CERTIFICATE_KEYS if user.get(key)}
    if user.get("tokenFile"):
        try:
            return certificates | {"token": Path(user["tokenFile"]).read_text().strip()}
        except OSError as error:
            raise PreflightError(
                f"The file of the cluster's login token cannot be read: {user['tokenFile']}: "
                f"{error.strerror}. Log in again."
            ) from error
    if user.get("token"):
        return certificates | {"token": str(user["token"]).strip()}
    if user.get("exec"):
        return _run_plugin(access, user["exec"], variables)
    if user.get("auth-provider"):
        return _from_provider(access, user["auth-provider"])
    if user.get("username"):
        pair = {"username": str(user["username"]), "password": str(user.get("password", ""))}
        return certificates | pair
    return certificates


def _run_plugin(
    access: Access, plugin: Mapping[str, Any], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Log in with a program of Kubernetes' ExecCredential protocol; return the user's entry.

    The program's messages go to the terminal, as with kubectl. Without a terminal they become part
    of the error message.
    """
    command = str(plugin.get("command", ""))
    if shutil.which(command, path=variables.get("PATH")) is None:
        if command.endswith(_GKE_PLUGIN):
            return {"token": ask_google()}
        hint = " ".join(str(plugin.get("installHint") or "").split())
        text = f"logs in with {command}, which is not installed. {hint}".rstrip()
        raise PreflightError(f"The kubeconfig's context {access.context!r} {text}")
    has_terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    mode = plugin.get("interactiveMode")
    if mode == "Always" and not has_terminal:
        raise PreflightError(
            f"The kubeconfig's context {access.context!r} logs in with {command}, which must ask "
            "for input, but kinetic does not run in a terminal. Start kinetic in a terminal, or "
            "set cluster= to a context that logs in another way."
        )
    spec: dict[str, Any] = {"interactive": has_terminal and mode != "Never"}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = dict(access.cluster)
    version = str(plugin.get("apiVersion") or "client.authentication.k8s.io/v1")
    request = {"apiVersion": version, "kind": "ExecCredential", "spec": spec}
    own = {str(v["name"]): str(v.get("value") or "") for v in plugin.get("env") or ()}
    try:
        ended = subprocess.run(
            [command, *(str(a) for a in plugin.get("args") or ())],
            env={**variables, **own, "KUBERNETES_EXEC_INFO": json.dumps(request)},
            stdin=None if spec["interactive"] else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if has_terminal else subprocess.PIPE,
            timeout=PLUGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PreflightError(
            f"Logging in to the cluster with {command} failed: the program did not end within "
            f"{PLUGIN_S:g} s. Run the program in a terminal to see why."
        ) from error
    except OSError as error:
        raise PreflightError(f"Logging in to the cluster with {command} failed: {error}") from error
    if ended.returncode != 0:
        words = " ".join((ended.stderr or b"").decode(errors="replace").split())[-500:]
        raise PreflightError(
            f"Logging in to the cluster with {command} failed with exit code "
            f"{ended.returncode}: {words or 'the program printed no error'}"
        )
    try:
        status = dict(json.loads(ended.stdout)["status"])
    except (ValueError, KeyError, TypeError) as error:
        raise PreflightError(
            f"Logging in to the cluster with {command} failed: the program did not print the "
            "login data that Kubernetes expects (an ExecCredential with a status). Update the "
            "program, or log in another way."
        ) from error
    if token := status.get("token"):
        return {"token": str(token).strip()}
    pair = {"client-certificate": "clientCertificateData", "client-key": "clientKeyData"}
    if not all(status.get(key) for key in pair.values()):
        raise PreflightError(
            f"Logging in to the cluster with {command} failed: the program printed no token and no "
            "certificate. Log in again."
        )
    return {
        f"{key}-data": base64.b64encode(str(status[field]).encode()).decode()
        for key, field in pair.items()
    }


def _from_provider(access: Access, provider: Mapping[str, Any]) -> dict[str, Any]:
    """Log in with the `auth-provider` of an old kubeconfig. OIDC tokens are sent as they are:
    unlike kubectl, kinetic does not refresh them, because the client would not verify the issuer's
    certificate."""
    name = provider.get("name")
    if name == "gcp":
        return {"token": ask_google()}
    if name == "oidc":
        return {"token": str(provider["config"]["id-token"]).strip()}
    raise PreflightError(
        f"The kubeconfig's context {access.context!r} logs in through the auth-provider {name!r}, "
        "which is no longer supported. Get credentials for the cluster again, with a current "
        "version of your provider's tools."
    )


def ask_google() -> str:
    """Return a token from Google's application default credentials, for GKE without gcloud.

    Raises:
        PreflightError: there are no such credentials.
    """
    advice = f"{_LOGIN}, or install {_GKE_PLUGIN}."
    login = find_google_credentials(advice)
    from google.auth.exceptions import GoogleAuthError

    try:
        login.refresh(_request_by_proxy)
    except GoogleAuthError as error:
        raise explain_google(error, advice) from error
    return str(login.token)


def find_google_credentials(advice: str = f"{_LOGIN}.") -> Any:
    """Return Google's application default credentials, as google-auth represents them.

    Raises:
        PreflightError: there are no such credentials; the message ends with `advice`.
    """
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise explain_google(error, advice) from error
    try:
        return google.auth.default(scopes=_SCOPES)[0]
    except GoogleAuthError as error:
        raise explain_google(error, advice) from error


def explain_google(why: Exception, advice: str = f"{_LOGIN}.") -> PreflightError:
    """Return the error for a failed login, with `advice` unless the network is the cause."""
    if type(why).__name__ == "TransportError":  # of google.auth, which may not be installed
        advice = "Check the network and your proxy (HTTPS_PROXY, NO_PROXY), then try again."
    cause = " ".join(str(why).split())
    return PreflightError(f'Logging in to Google Cloud failed: "{cause}". {advice}')


def _request_by_proxy(url: str, *args: Any, **more: Any) -> Any:
    """Send an HTTP request for google-auth, through the proxy that is set for the URL's server."""
    from google.auth.transport.urllib3 import Request

    return Request(proxies.open_pools(url))(url, *args, **more)
