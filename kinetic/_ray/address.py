"""Where the dashboard of a Ray cluster is, and the token that it asks for.

In: what the place says, the caller's variables. Out: the dashboard's address; a token. Ray's own
variables are understood as Ray understands them, though nothing of Ray is needed here.
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
HERE = f"http://127.0.0.1:{DASHBOARD_PORT}"
"""Where the dashboard of a cluster on this machine is, unless somebody has moved it."""
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_SCHEMES = ("http", "https", "ray")
_OTHER_PORTS = (6379, 10001)
"""Of the head's control store and of Ray Client, which people have at hand."""
_TOKEN_FILE = "~/.ray/auth_token"


def resolve_address(address: str, variables: Mapping[str, str]) -> str:
    """Return the URL of the dashboard.

    Args:
        given: by the place; "" leaves it to the variables, and these to this machine.
        variables: of the caller's environment.

    Raises:
        UsageError: it is not an address.
    """
    named = [(name, variables[name]) for name in VARIABLES if variables.get(name)]
    name, text = ("address", address) if address else next(iter(named), ("", AUTO))
    if text.strip() in (AUTO, "local"):
        return HERE
    return _dashboard_of(name, text.strip())


def _dashboard_of(name: str, text: str) -> str:
    harmless = re.sub(r"(^|//)[^/]*@", r"\1***@", text)  # a password is for nobody's eyes
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
    """Return the dashboard with this URL, and the token of this process's environment: whoever
    opens a store by its address has no settings at hand.

    Args:
        url: where it is.
        patience_s: how long each call waits, once; as long as `JobsApiLimits` says if not given.
    """
    from kinetic._ray.jobs_api import JobsApi, JobsApiLimits  # settings need only the address

    limits = None if patience_s is None else JobsApiLimits(patience_s, patience_s, tries=1)
    return JobsApi(url, find_token(os.environ), limits=limits)


def find_token(variables: Mapping[str, str]) -> str:
    """Return the token to send, or "".

    Raises:
        PreflightError: the file of the token that the environment names cannot be read, or what it
            holds cannot be a token.
    """
    token = _read_token(variables)
    if not token.isascii() or not token.isprintable():  # Nothing else fits into a header.
        raise PreflightError(
            "The token for the Ray cluster (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or "
            "~/.ray/auth_token) is more than one line, or has characters that no token has. "
            "`ray get-auth-token` shows it on the head."
        )
    return token


def _read_token(variables: Mapping[str, str]) -> str:
    if variables.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return ""
    if variables.get("RAY_AUTH_TOKEN"):
        return variables["RAY_AUTH_TOKEN"].strip()
    named = variables.get("RAY_AUTH_TOKEN_PATH")
    try:
        home = variables.get("HOME", "")
        path = Path(named) if named else Path(home, *Path(_TOKEN_FILE).parts[1:])
        return path.read_text().strip() if named or home else ""
    except (OSError, ValueError) as error:
        if not named:
            return ""
        raise PreflightError(
            f"The token for the Ray cluster could not be read: RAY_AUTH_TOKEN_PATH={named} "
            f"({error})."
        ) from error
