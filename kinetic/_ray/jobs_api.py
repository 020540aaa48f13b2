"""The dashboard of a Ray cluster over HTTP: jobs, packages, nodes, and files of its logs.

In: the dashboard's address, a token. Out: what Ray says, as values. The only place of this backend
that sends; nothing of Ray is needed on this side.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from kinetic._core.values import dataclass
from kinetic._ray.refusals import explain_refusal, explain_silence, explain_stranger, last_line
from kinetic._system import proxies
from kinetic._system.distribution import make_install_command
from kinetic.errors import BackendUnavailable, NotFound, PreflightError
from kinetic.version import __version__

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

CONNECTIONS = 16
"""Kept open at once. The dashboard reads files of logs for 100 callers at a time."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_REPEATED_ON = (429, 502, 503, 504)
_NODES = 10_000
_OF_ONE_NODE = re.compile(r"(?i)node_?[0-9a-f]{32,}")
_READING_S = 3600
"""How long a file may take."""


def secrets_package(job_id: str) -> str:
    """Return the name of the package that has a job's secrets until its driver has taken them: the
    dashboard takes packages, and says whether they are there; it shows none."""
    return f"kinetic-secrets-{job_id}.zip"


@dataclass(frozen=True)
class JobsApiLimits:
    """How long calls wait, in seconds, and how often they are tried if that can do no harm."""

    connect_s: float = 10.0
    read_s: float = 60.0
    tries: int = 4
    pause_s: float = 0.2


@dataclass(frozen=True)
class Submission:
    """A job to be created.

    Attributes:
        job_id: names it: no second one of this name is created.
        entrypoint: the command of its driver, for a shell.
        runtime_env: what its processes find, in Ray's words. Everybody can read it.
        metadata: kept with the job. Everybody can read it.
    """

    job_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what the dashboard takes."""
        return {
            "submission_id": self.job_id,
            "entrypoint": self.entrypoint,
            "runtime_env": dict(self.runtime_env),
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True)
class RayJob:
    """What Ray says of a job.

    Attributes:
        job_id: its submission id; "" for a driver that nobody submitted.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: why, as a sentence of Ray's.
        metadata: as it was submitted.
        exit_code: of the driver, once it has ended.
        error_type: in Ray's words; "" while nothing failed.
        entrypoint, runtime_env: as they were submitted.
    """

    job_id: str
    status: str
    message: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    entrypoint: str = ""
    runtime_env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    error_type: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether the driver has."""
        return self.status in ENDED


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        node_id: Ray's.
        address: its IP address.
        is_alive: whether Ray believes so: it takes more than a minute to notice a death.
        is_head: whether the control store and the dashboard are there.
        resources: what it has in all, by name.
        labels: by name.
    """

    node_id: str
    address: str
    is_alive: bool
    is_head: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]


class JobsApi:
    """Calls over HTTP. Threads may share it."""

    def __init__(
        self, address: str, token: str = "", *, limits: JobsApiLimits | None = None
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: of the dashboard, as `address.resolve_address` returns it.
            token: what it asks for; "" for none.
            limits: how long calls wait.
        """
        self.address = address
        self._token = token
        self._limits = limits or JobsApiLimits()
        self._pools: PoolManager | None = None
        _all.add(self)

    def __repr__(self) -> str:
        return f"JobsApi({self.address!r})"

    # --- the cluster

    def version(self) -> str:
        """Return the version of Ray: the cheapest call that shows that a dashboard answers."""
        try:
            document = self._ask("GET", "/api/version")
        except NotFound as error:
            raise explain_stranger(self.address) from error
        if "ray_version" not in document:
            raise explain_stranger(self.address)
        return str(document["ray_version"])

    def versions(self) -> tuple[str, str]:
        """Return the versions of Ray and of its Python, "" where an older Ray does not say it."""
        ray, python = self.version(), ""
        with contextlib.suppress(NotFound):
            document = self._ask("GET", "/api/v0/cluster_metadata").get("data") or {}
            python = str(document.get("pythonVersion") or "")
        return ray, python

    def nodes(self) -> list[RayNode]:
        """Return all nodes, dead ones too."""
        rows = self._ask_state("/api/v0/nodes", {"detail": "1", "limit": str(_NODES)})
        return [_read_node(row) for row in rows["result"]]

    def can_grow(self) -> bool:
        """Whether an autoscaler may add nodes. Where there is none, each node is of a type of its
        own that is named for it."""
        document = self._ask("GET", "/api/cluster_status?format=0").get("data") or {}
        report = (document.get("clusterStatus") or {}).get("autoscalerReport") or {}
        kinds = {*(report.get("activeNodes") or {}), *(report.get("idleNodes") or {})}
        return any(not _OF_ONE_NODE.fullmatch(kind) for kind in kinds)

    # --- jobs

    def submit(self, submission: Submission) -> None:
        """Create a job. Not repeated: if the answer is lost, `find` tells whether it is there.

        Raises:
            SubmitError: Ray refuses it, for example because there is one of this name.
        """
        self._ask("POST", "/api/jobs/", json.dumps(submission.to_json()).encode())

    def find(self, job_id: str) -> RayJob | None:
        """Return what Ray says of a job, or None if it knows none of this name."""
        try:
            return _read_job(self._ask("GET", f"/api/jobs/{quote(job_id, safe='')}"))
        except NotFound:
            return None

    def list(self) -> list[RayJob]:
        """Return all jobs that were submitted, and drivers that nobody submitted."""
        return [_read_job(row) for row in self._ask("GET", "/api/jobs/", kind=list)]

    def stop(self, job_id: str) -> bool:
        """Ask a job to end: SIGTERM, and SIGKILL three seconds later. Return whether it ran."""
        try:
            document = self._ask("POST", f"/api/jobs/{quote(job_id, safe='')}/stop")
        except NotFound:
            return False
        return bool(document.get("stopped"))

    def logs(self, job_id: str) -> str:
        """Return what the driver has printed so far.

        Raises:
            NotFound: Ray knows no job of this name.
        """
        document = self._ask("GET", f"/api/jobs/{quote(job_id, safe='')}/logs")
        return str(document.get("logs") or "")

    # --- packages

    def has_package(self, name: str) -> bool:
        """Whether gcs://name is there. It is kept for ten minutes more, for a job that names it."""
        try:
            self._send("GET", f"/api/packages/gcs/{quote(name, safe='')}")
        except NotFound:
            return False
        return True

    def put_package(self, name: str, data: bytes) -> None:
        """Send gcs://name, which takes the place of one that is there."""
        self._send("PUT", f"/api/packages/gcs/{quote(name, safe='')}", data)

    def lend_package(self, name: str, data: bytes) -> None:
        """Send gcs://name, which Ray deletes after ten minutes unless somebody else has."""
        self.put_package(name, data)
        self.has_package(name)

    def send_package(self, name: str, data: bytes) -> bool:
        """Send gcs://name unless it is there; return whether it was sent. Names are to tell the
        content."""
        if self.has_package(name):
            return False
        self.put_package(name, data)
        return True

    # --- files below the folder of a node's logs

    def read_log(self, node_id: str, path: str) -> Iterator[bytes]:
        """Yield a file in parts.

        Raises:
            NotFound: there is none; now and then nothing is yielded instead. The dashboard notes a
                traceback then: list it first.
        """
        query = {"node_id": node_id, "filename": path, "lines": "-1", "timeout": str(_READING_S)}
        response = self._send("GET", f"/api/v0/logs/file?{urlencode(query)}", preload=False)
        try:
            while data := response.read1(1 << 16):
                yield data
        except Exception as error:
            raise explain_silence(self.address, error) from error
        finally:
            response.close()

    def list_logs(self, node_id: str, pattern: str) -> Sequence[str]:
        """Return the paths of files and folders that match; folders end in "/"."""
        files = self._ask_state("/api/v0/logs", {"node_id": node_id, "glob": pattern})
        return [path for paths in files.values() for path in paths]

    # --- sending

    def close(self) -> None:
        """Close idle connections. The object can still be used."""
        pools, self._pools = self._pools, None
        if pools is not None:
            pools.clear()

    def _ask_state(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        document = self._ask("GET", f"{path}?{urlencode(query)}")
        if not document.get("result"):
            raise BackendUnavailable(
                f"The Ray cluster at {self.address} could not say what was asked: "
                f"{last_line(str(document.get('msg', '')))}. Try again later."
            )
        return dict((document.get("data") or {}).get("result") or {})

    def _ask(self, method: str, path: str, body: bytes | None = None, *, kind: type = dict) -> Any:
        """Make a call whose answer is a document."""
        data = self._send(method, path, body).data
        try:
            document = json.loads(data)
        except ValueError as error:
            raise explain_stranger(self.address) from error
        if not isinstance(document, kind):
            raise explain_stranger(self.address)
        return document

    def _send(
        self, method: str, path: str, body: bytes | None = None, *, preload: bool = True
    ) -> BaseHTTPResponse:
        import urllib3

        headers = {"user-agent": f"kinetic/{__version__}"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        if method == "POST":
            headers["content-type"] = "application/json"
        if body is not None:
            headers["content-length"] = str(len(body))
        limits = self._limits
        try:
            response = self._connect().request(
                method,
                self.address + path,
                # Sent in pieces: the time for connecting also limits each call that sends.
                body=None if body is None else io.BytesIO(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=limits.connect_s, read=limits.read_s),
                retries=_repetition(limits),
                redirect=False,
                preload_content=preload,
            )
            refusal = response.data if response.status >= 300 else b""
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise explain_silence(self.address, error) from error
        if response.status >= 300:
            raise explain_refusal(self.address, response, refusal, has_token=bool(self._token))
        return response

    def _connect(self) -> PoolManager:
        if self._pools is None:
            self._pools = _open_pools(self.address)
        return self._pools


_all: weakref.WeakSet[JobsApi] = weakref.WeakSet()


def _forget_connections() -> None:
    """In a process that was forked they are another's."""
    for api in list(_all):
        api._pools = None


os.register_at_fork(after_in_child=_forget_connections)


def _open_pools(address: str) -> PoolManager:
    try:
        return proxies.open_pools(address, maxsize=CONNECTIONS)
    except ImportError as error:
        raise PreflightError(
            f"Jobs on a Ray cluster need urllib3: {make_install_command('ray')}"
        ) from error


def _repetition(limits: JobsApiLimits) -> Any:
    """A POST is not made twice: it may have had its effect."""
    import urllib3

    return urllib3.Retry(
        total=limits.tries - 1,
        redirect=False,
        allowed_methods={"GET", "PUT"},
        status_forcelist=_REPEATED_ON,
        backoff_factor=limits.pause_s,
        raise_on_status=False,
    )


def _read_job(row: Mapping[str, Any]) -> RayJob:
    return RayJob(
        str(row.get("submission_id") or ""),
        str(row.get("status") or ""),
        str(row.get("message") or ""),
        {str(name): str(value) for name, value in (row.get("metadata") or {}).items()},
        row.get("driver_exit_code"),
        str(row.get("entrypoint") or ""),
        dict(row.get("runtime_env") or {}),
        str(row.get("error_type") or ""),
    )


def _read_node(row: Mapping[str, Any]) -> RayNode:
    return RayNode(
        str(row["node_id"]),
        str(row.get("node_ip") or ""),
        row.get("state") == "ALIVE",
        bool(row.get("is_head_node")),
        dict(row.get("resources_total") or {}),
        dict(row.get("labels") or {}),
    )
