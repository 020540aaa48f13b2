"""Declared data of the Hugging Face hub: the only module that uses `huggingface_hub` and
`datasets`.

If the job's environment has the package `datasets`, the folder on the host is made by
`save_to_disk`, to be read with `datasets.load_from_disk`. Otherwise the folder has the files of the
repository, and the URI must not name a split or a configuration.

The work is done in a child process, to keep these packages, and code that comes with a data set,
out of the agent.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from kinetic._datasets import cached_copy
from kinetic.errors import KineticError, NotFound, StoreError, UsageError

_REQUIRED = (
    "{source} needs the package {name} on the hosts. For a simulated slice run `pip install "
    "{name}` here; for a cluster add it to the project's requirements, or to the image."
)
ANSWER_S = 20.0
"""Limit of the time in which the hub must accept a connection, or send more data, in seconds."""
_CHECK_S = 5.0
_VALID_S = 60.0
"""Time for which a response of the hub is reused by the jobs of a batch, in seconds."""
_checked: dict[tuple[str, str | None], float] = {}
_SILENT = (
    "{} could not be read: the hub did not answer within {:g} s. Submit the job again when it "
    "does, or set HF_ENDPOINT on the hosts to a mirror that they reach."
)
_CHILD = "import sys; sys.path.append({!r}); from kinetic._datasets import hub; hub.main()"


def check(source: str, *, token: str | None, answer_s: float = _CHECK_S) -> None:
    """Raise if the hub does not have the data set. Without `huggingface_hub`, or if the check fails
    for another reason, return: the hosts will check.

    Args:
        source: The URI.
        token: Token of the hub; "" for this machine's login, None for no login at all.
        answer_s: Time in seconds that the hub may be silent.

    Raises:
        UsageError: The data set or revision does not exist, or is private.
    """
    key = (source, token)
    if find_spec("huggingface_hub") is None:
        return
    if time.monotonic() - _checked.get(key, -_VALID_S) < _VALID_S:
        return
    try:
        request = _make_request(source, False if token is None else token, answer_s)
        # Only hosts have the package `datasets`, which splits and configurations need.
        _run_in_child("resolve", request | {"split": "", "config_name": ""})
    except NotFound as error:
        raise UsageError(f"kinetic.Data({source!r}): {error}") from error
    except StoreError:
        return
    _checked[key] = time.monotonic()


def _make_request(source: str, token: str | bool, answer_s: float) -> dict[str, Any]:
    name, _, query = source.removeprefix("hf://").partition("?")
    request = {"source": source, "repo": name, "token": token, "answer_s": answer_s}
    return request | dict(parse_qsl(query))


def provide(
    source: str,
    *,
    root: Path,
    token: str = "",
    trusts_code: bool = False,
    answer_s: float = ANSWER_S,
) -> Path:
    """Return the folder with the content of a data set, at its revision's current commit.

    Args:
        source: The URI.
        root: Folder of all copies on this host.
        token: Token of the hub, for private data sets; "" for the host's login.
        trusts_code: Let the data set run its own code while it is loaded.
        answer_s: Time in seconds that the hub may be silent.

    Raises:
        NotFound: The data set or revision does not exist, or is private.
        StoreError: The data set cannot be read, or the host's disk cannot be written to.
    """
    request = _make_request(source, token, answer_s) | {"trusts_code": trusts_code}
    resolved = _run_in_child("resolve", request)
    key = f"{source}\0{resolved['commit']}\0{resolved['saved']}\0{trusts_code}"

    def fill(dest: str) -> None:
        for folder, _, _ in os.walk(dest):  # Left by an interrupted fetch.
            Path(folder).chmod(0o700)
        _run_in_child("fetch", request | resolved | {"dest": dest})
        _protect(dest)

    digest = hashlib.sha256(key.encode()).hexdigest()
    return cached_copy.provide_as(root, digest, fill, source=source)


def _run_in_child(act: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Handle a request in a child process, and return its answer."""
    own = str(Path(__file__).resolve().parents[2])
    child = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD.format(own)],
        input=json.dumps({"act": act, **request}),
        capture_output=True,
        text=True,
        check=False,
    )
    line = child.stdout.strip().rpartition("\n")[2]
    try:
        answer: dict[str, Any] = json.loads(line)
    except ValueError as error:
        last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
        raise StoreError(f"{request['source']} could not be read: {last}") from error
    if "error" in answer:
        raise (NotFound if answer["missing"] else StoreError)(answer["error"])
    return answer


def _protect(dest: str) -> None:
    for folder, _, names in os.walk(dest, topdown=False):
        for name in names:
            Path(folder, name).chmod(0o444)
        Path(folder).chmod(0o555)


# -- in the child process --------------------------------------------------------------------------


def main() -> None:
    """Read a request from stdin, handle it, and write one line of JSON."""
    request = json.loads(sys.stdin.read())
    _limit_waits(request["answer_s"])
    try:
        answer = {"resolve": _resolve, "fetch": _fetch}[request["act"]](request)
    except KineticError as error:
        answer = {"error": str(error), "missing": isinstance(error, NotFound)}
    except Exception as error:  # noqa: BLE001 - the packages' errors are shown to the user
        text = f"{request['source']} could not be read: {type(error).__name__}: {error}"
        if _is_silence(error):
            text = _SILENT.format(request["source"], request["answer_s"])
        answer = {"error": text, "missing": False}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _is_silence(error: BaseException | None) -> bool:
    """True if the hub did not answer in time. Errors are recognized by name, because the hub's
    package has changed its HTTP library twice."""
    while error is not None:
        if "Timeout" in type(error).__name__:
            return True
        error = error.__cause__ or error.__context__
    return False


def _limit_waits(limit_s: float) -> None:
    """Limit the time that connections of this process wait for data. The limit is set on sockets,
    because the hub's package sends most requests without one."""
    plain = socket.socket.settimeout

    def settimeout(own: socket.socket, value: float | None, /) -> None:
        plain(own, limit_s if value is None else min(value, limit_s))

    socket.setdefaulttimeout(limit_s)
    socket.socket.settimeout = settimeout  # type: ignore[method-assign, assignment]


def _resolve(request: dict[str, Any]) -> dict[str, Any]:
    """Return the current commit of the revision, and True if `datasets` is installed."""
    source = request["source"]
    if find_spec("huggingface_hub") is None:
        raise StoreError(_REQUIRED.format(source=source, name="huggingface_hub"))
    saved = find_spec("datasets") is not None
    if not saved and (request.get("split") or request.get("config_name")):
        raise StoreError(
            _REQUIRED.format(source=source, name="datasets")
            + f" Without the package, use hf://{request['repo']}: it has all files, as they are."
        )
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi(token=None if request["token"] == "" else request["token"])
    try:
        info = api.dataset_info(request["repo"], revision=request.get("revision"))
    except RevisionNotFoundError as error:
        raise NotFound(
            f"The data set hf://{request['repo']} has no revision {request.get('revision')!r}. "
            "Name one of its branches, tags or commits in ?revision=."
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"The data set hf://{request['repo']} does not exist, or is private. Check the name; "
            "for a private data set, pass your token with secrets=['HF_TOKEN']."
        ) from error
    return {"commit": info.sha, "saved": saved}


def _fetch(request: dict[str, Any]) -> dict[str, Any]:
    dest = Path(request["dest"])
    token = request["token"] or None
    if request["saved"]:
        import datasets

        trust = {"trust_remote_code": True} if request["trusts_code"] else {}
        loaded = datasets.load_dataset(
            request["repo"],
            request.get("config_name"),
            split=request.get("split"),
            revision=request["commit"],
            token=token,
            **trust,
        )
        loaded.save_to_disk(str(dest))
        return {}
    import shutil

    from huggingface_hub import snapshot_download

    snapshot_download(
        request["repo"],
        repo_type="dataset",
        revision=request["commit"],
        local_dir=dest,
        token=token,
    )
    shutil.rmtree(dest / ".cache", ignore_errors=True)  # Files of interrupted downloads.
    return {}
