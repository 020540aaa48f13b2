"""Address and token of a Ray cluster's dashboard.

Ray's own variables are read as Ray reads them; Ray need not be installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kinetic.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from kinetic._ray.jobs_api import JobsApi

DASHBOARD_PORT = 8265
AUTO = "auto"
LOCAL_URL = f"http://127.0.0.1:{DASHBOARD_PORT}"
"""Default address of the dashboard of a cluster on this machine."""
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_SCHEMES = ("http", "https", "ray")
_OTHER_PORTS = (6379, 10001)
"""Ports of the head's control store and of Ray Client, which users may take for the dashboard's."""
_TOKEN_FILE = "~/.ray/auth_token"


def resolve_address(address: str, variables: Mapping[str, str]) -> str:
    """Return the URL of the dashboard.

    Args:
        address: Address in the place of the job; "" to use the variables, or else this machine.
        variables: The caller's environment variables.

    Raises:
        UsageError: The text is not an address.
    """
    named = [(name, variables[name]) for name in VARIABLES if variables.get(name)]
    name, text = ("address", address) if address else next(iter(named), ("", AUTO))
    if text.strip() in (AUTO, "local"):
        return LOCAL_URL
    return _parse_address(name, text.strip())


def _parse_address(name: str, text: str) -> str:
    harmless = re.sub(r"(^|//)[^/]*@", r"\1***@", text)  # Hide a password.
    problem = (
        f"{name}={harmless!r} is not the address of a Ray cluster. Write http://host:8265 "
        '(the address of its dashboard), ray://host:10001, host:port, or "auto".'
    )
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(problem) from error
    if parts.scheme not in _SCHEMES or host.split() != [host] or parts.username is not None:
        raise UsageError(problem)
    if ":" in host:
        host = f"[{host}]"
    if parts.scheme == "ray" or ("://" not in text and (port is None or port in _OTHER_PORTS)):
        return f"http://{host}:{DASHBOARD_PORT}"
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path.rstrip('/')}"


def connect(url: str, *, patience_s: float | None = None) -> JobsApi:
    """Return a client of this dashboard. The token comes from this process's environment, because a
    store that is opened by its address has no settings.

    Args:
        url: URL of the dashboard.
        patience_s: Time limit of each call, which is not repeated; None for the default
            `JobsApiLimits`.
    """
    from kinetic._ray.jobs_api import JobsApi, JobsApiLimits  # Not needed to read settings.

    limits = None if patience_s is None else JobsApiLimits(patience_s, patience_s, tries=1)
    return JobsApi(url, find_token(os.environ), limits=limits)


def find_token(variables: Mapping[str, str]) -> str:
    """Return the token to send, or "".

    Raises:
        PreflightError: The token file named by the environment cannot be read, or its content
            cannot be a token.
    """
    token = _read_token(variables)
    if not token.isascii() or not token.isprintable():  # Other text cannot be sent in a header.
        raise PreflightError(
            "The token for the Ray cluster (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            "~/.ray/auth_token) has several lines or invalid characters. `ray get-auth-token` on "
            "the cluster's head node shows the right one."
        )
    return token


def _read_token(variables: Mapping[str, str]) -> str:
    if variables.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return ""
    if variables.get("RAY_AUTH_TOKEN"):
        return variables["RAY_AUTH_TOKEN"].strip()
    token_path = variables.get("RAY_AUTH_TOKEN_PATH")
    try:
        home = variables.get("HOME", "")
        path = Path(token_path) if token_path else Path(home, *Path(_TOKEN_FILE).parts[1:])
        return path.read_text().strip() if token_path or home else ""
    except (OSError, ValueError) as error:
        if not token_path:
            return ""
        raise PreflightError(
            f"The token for the Ray cluster cannot be read from RAY_AUTH_TOKEN_PATH={token_path} "
            f"({error}). Set the variable to a file that you can read."
        ) from error
