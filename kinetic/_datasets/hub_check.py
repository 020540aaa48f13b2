"""Whether a data set of the Hugging Face hub exists, before a job that needs it is created.

In: an hf:// URI, a token. Out: nothing, or an error. One request without the hub's packages, which
callers of clusters need not have; what this machine cannot find out is left to the hosts.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.parse import parse_qsl, quote

from kinetic._core.plan import HUB, Plan
from kinetic._core.values import dataclass
from kinetic.errors import UsageError

PATIENCE_S = 5.0
VALID_S = 60.0
"""How long an answer is reused, for the jobs of a batch."""
_ENDPOINT = "https://huggingface.co"
_BAD_TOKEN = "Invalid credentials"
_asked: dict[tuple[str, str], float] = {}


@dataclass(frozen=True)
class HubLogin:
    """The login that hosts will use.

    Attributes:
        token: of the hub, or "".
        is_known: whether hosts have no other token, for example in their image.
    """

    token: str
    is_known: bool


def login(plan: Plan, secrets: Mapping[str, str], variables: Mapping[str, str]) -> HubLogin:
    """Return the login that the hosts of a job will use.

    Args:
        plan: of the job.
        secrets: values of the plan's secrets.
        variables: of this machine's environment.
    """
    token = secrets.get("HF_TOKEN", "")
    if token or plan.place.is_cluster:
        return HubLogin(token, bool(token) or not plan.place.has_complete_image)
    return HubLogin(variables.get("HF_TOKEN") or _token_in_file(variables), is_known=True)


def _token_in_file(variables: Mapping[str, str]) -> str:
    """The token that `hf auth login` stored."""
    cache = variables.get("XDG_CACHE_HOME") or f"{variables.get('HOME', '')}/.cache"
    folder = variables.get("HF_HOME") or f"{cache}/huggingface"
    try:
        return Path(variables.get("HF_TOKEN_PATH") or f"{folder}/token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def check(
    source: str, who: HubLogin, variables: Mapping[str, str], *, patience_s: float = PATIENCE_S
) -> None:
    """Refuse a data set that this login cannot see.

    Raises:
        UsageError: there is no such data set or revision, it is private, or the token is wrong.
    """
    if variables.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "true", "yes"):
        return
    name, _, query = source.removeprefix(HUB).partition("?")
    revision = dict(parse_qsl(query)).get("revision", "")
    endpoint = (variables.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
    url = f"{endpoint}/api/datasets/{quote(name)}"
    if revision:
        url += f"/revision/{quote(revision, safe='')}"
    key = url, who.token
    if time.monotonic() - _asked.get(key, -VALID_S) < VALID_S:
        return
    why = _refusal(url, who, patience_s)
    if why == _NO_REVISION:
        raise UsageError(
            f"kinetic.Data({source!r}): hf://{name} has no revision {revision!r}. Check its name."
        )
    if why:
        raise UsageError(f"kinetic.Data({source!r}): {why}")
    _asked[key] = time.monotonic()


_NO_REVISION = "RevisionNotFound"
_ABSENT = (
    "there is no such data set, or it is private. Check its name; for a private one pass your "
    "token with secrets=['HF_TOKEN']."
)


def _refusal(url: str, who: HubLogin, patience_s: float) -> str:
    """Why the hub refuses it; "" if it does not, or if that cannot be known."""
    try:
        asked = urllib.request.Request(url)
        if who.token:  # Not sent to another server to which the hub may redirect.
            asked.add_unredirected_header("Authorization", f"Bearer {who.token}")
        with urllib.request.urlopen(asked, timeout=patience_s):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            said = error.headers.get("X-Error-Code", "")
            text = error.headers.get("X-Error-Message", "")
            if error.geturl() != url or error.code not in (401, 404):
                return ""
            if said == _NO_REVISION:
                return _NO_REVISION
            if not who.is_known:
                return ""
            if error.code == 401 and who.token and text.startswith(_BAD_TOKEN):
                return "the hub does not accept the token HF_TOKEN. Has it expired?"
            return _ABSENT if error.code == 401 or said == "RepoNotFound" else ""
    except (OSError, HTTPException, ValueError):
        return ""
