"""The API of a Ray cluster's dashboard over HTTP: jobs, packages, nodes, and log files.

The only module of this backend that sends requests; needs no Ray. In addresses of packages, gcs://
is Ray's control store ("GCS"), not Google Cloud Storage.
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
from kinetic._ray.refusals import explain_refusal, explain_silence, explain_wrong_server, last_line
from kinetic._system import proxies
from kinetic._system.distribution import make_install_command
from kinetic.errors import BackendUnavailable, NotFound, PreflightError
from kinetic.version import __version__

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

CONNECTIONS = 16
"""Number of connections kept open. The dashboard serves log files to 100 callers at a time."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
_RETRIED_STATUSES = (429, 502, 503, 504)
_NODES = 10_000
_NODE_NAME = re.compile(r"(?i)node_?[0-9a-f]{32,}")
_READING_S = 3600
"""Time limit for reading a file, in seconds."""


def secrets_package(job_id: str) -> str:
    """Return the name of the package with a job's secrets, which its driver takes out. The
    dashboard accepts packages and tells if they exist, but does not show their content."""
    return f"kinetic-secrets-{job_id}.zip"


@dataclass(frozen=True)
class JobsApiLimits:
    """Time limits of calls, in seconds, and the number of tries for calls that are safe to
    repeat."""

    connect_s: float = 10.0
    read_s: float = 60.0
    tries: int = 4
    pause_s: float = 0.2


@dataclass(frozen=True)
class Submission:
    """A job to be created.

    Attributes:
        job_id: Submission id; Ray refuses a second job with the same id.
        entrypoint: Shell command of its driver.
        runtime_env: Ray's runtime environment. Everybody can read it.
        metadata: Stored with the job. Everybody can read it.
    """

    job_id: str
    entrypoint: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the body of the request."""
        return {
            "submission_id": self.job_id,
            "entrypoint": self.entrypoint,
            "runtime_env": dict(self.runtime_env),
            "metadata": dict(self.metadata),
        }


@dataclass(frozen=True)
class RayJob:
    """A job as Ray describes it.

    Attributes:
        job_id: Submission id; "" for a driver that was started without a submission.
        status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED.
        message: Ray's explanation of the status.
        metadata: Metadata of the submission.
        exit_code: Exit code of the driver, once it has ended.
        error_type: Ray's name of the error; "" if nothing failed.
        entrypoint, runtime_env: From the submission.
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
        """True if the driver has ended."""
        return self.status in ENDED


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster.

    Attributes:
        node_id: Ray's id.
        address: IP address.
        is_alive: True if Ray considers the node alive: it takes more than a minute to notice a
            death.
        is_head: True for the node of the control store and the dashboard.
        resources: Total resources, by name.
        labels: Labels, by name.
    """

    node_id: str
    address: str
    is_alive: bool
    is_head: bool
    resources: Mapping[str, float]
    labels: Mapping[str, str]


class JobsApi:
    """Client of a dashboard. Threads may share it."""

    def __init__(
        self, address: str, token: str = "", *, limits: JobsApiLimits | None = None
    ) -> None:
        """Set up a client; nothing is connected yet.

        Args:
            address: URL of the dashboard, from `address.resolve_address`.
            token: Token of the cluster; "" for none.
            limits: Time limits of calls.
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
        """Return the version of Ray: the cheapest call that shows if a dashboard answers."""
        try:
            document = self._call("GET", "/api/version")
        except NotFound as error:
            raise explain_wrong_server(self.address) from error
        if "ray_version" not in document:
            raise explain_wrong_server(self.address)
        return str(document["ray_version"])

    def versions(self) -> tuple[str, str]:
        """Return the versions of Ray and of its Python; "" for the latter if Ray is too old to
        say."""
        ray, python = self.version(), ""
        with contextlib.suppress(NotFound):
            document = self._call("GET", "/api/v0/cluster_metadata").get("data") or {}
            python = str(document.get("pythonVersion") or "")
        return ray, python

    def nodes(self) -> list[RayNode]:
        """Return all nodes, including dead ones."""
        rows = self._call_state("/api/v0/nodes", {"detail": "1", "limit": str(_NODES)})
        return [_read_node(row) for row in rows["result"]]

    def can_grow(self) -> bool:
        """True if an autoscaler may add nodes. Without one, each node has a type of its own, named
        after the node."""
        document = self._call("GET", "/api/cluster_status?format=0").get("data") or {}
        report = (document.get("clusterStatus") or {}).get("autoscalerReport") or {}
        kinds = {*(report.get("activeNodes") or {}), *(report.get("idleNodes") or {})}
        return any(not _NODE_NAME.fullmatch(kind) for kind in kinds)

    # --- jobs

    def submit(self, submission: Submission) -> None:
        """Create a job. Not repeated: after a lost answer, `find` tells whether the job exists.

        Raises:
            SubmitError: Ray refuses the job, for example because the id exists.
        """
        self._call("POST", "/api/jobs/", json.dumps(submission.to_json()).encode())

    def find(self, job_id: str) -> RayJob | None:
        """Return a job, or None if Ray does not know its id."""
        try:
            return _read_job(self._call("GET", f"/api/jobs/{quote(job_id, safe='')}"))
        except NotFound:
            return None

    def list(self) -> list[RayJob]:
        """Return all submitted jobs, and drivers without a submission."""
        return [_read_job(row) for row in self._call("GET", "/api/jobs/", kind=list)]

    def stop(self, job_id: str) -> bool:
        """Ask a job to end: SIGTERM, and SIGKILL three seconds later.

        Returns:
            True if the job was running.
        """
        try:
            document = self._call("POST", f"/api/jobs/{quote(job_id, safe='')}/stop")
        except NotFound:
            return False
        return bool(document.get("stopped"))

    def logs(self, job_id: str) -> str:
        """Return the driver's output so far.

        Raises:
            NotFound: Ray does not know this job.
        """
        document = self._call("GET", f"/api/jobs/{quote(job_id, safe='')}/logs")
        return str(document.get("logs") or "")

    # --- packages

    def has_package(self, name: str) -> bool:
        """True if the package gcs://name exists. Ray then keeps it for ten more minutes, so that a
        job that uses it can be submitted."""
        try:
            self._send("GET", f"/api/packages/gcs/{quote(name, safe='')}")
        except NotFound:
            return False
        return True

    def put_package(self, name: str, data: bytes) -> None:
        """Upload gcs://name, replacing an existing one."""
        self._send("PUT", f"/api/packages/gcs/{quote(name, safe='')}", data)

    def lend_package(self, name: str, data: bytes) -> None:
        """Upload gcs://name, which Ray deletes after ten minutes unless a job uses it."""
        self.put_package(name, data)
        self.has_package(name)

    def send_package(self, name: str, data: bytes) -> bool:
        """Upload gcs://name unless it exists. The name must identify the content.

        Returns:
            True if the package was uploaded.
        """
        if self.has_package(name):
            return False
        self.put_package(name, data)
        return True

    # --- files below the folder of a node's logs

    def read_log(self, node_id: str, path: str) -> Iterator[bytes]:
        """Yield a file in chunks.

        Raises:
            NotFound: The file does not exist. Now and then the result is empty instead, and the
                dashboard logs a traceback: call `list_logs` first.
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
        files = self._call_state("/api/v0/logs", {"node_id": node_id, "glob": pattern})
        return [path for paths in files.values() for path in paths]

    # --- sending

    def close(self) -> None:
        """Close idle connections. The client can still be used."""
        pools, self._pools = self._pools, None
        if pools is not None:
            pools.clear()

    def _call_state(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        document = self._call("GET", f"{path}?{urlencode(query)}")
        if not document.get("result"):
            raise BackendUnavailable(
                f"The Ray cluster at {self.address} could not answer a request: "
                f"{last_line(str(document.get('msg', '')))}. Try again later."
            )
        return dict((document.get("data") or {}).get("result") or {})

    def _call(self, method: str, path: str, body: bytes | None = None, *, kind: type = dict) -> Any:
        """Make a call whose answer is a JSON document."""
        data = self._send(method, path, body).data
        try:
            document = json.loads(data)
        except ValueError as error:
            raise explain_wrong_server(self.address) from error
        if not isinstance(document, kind):
            raise explain_wrong_server(self.address)
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
                # Send it in pieces: each write to the socket must end within the connect timeout.
                body=None if body is None else io.BytesIO(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=limits.connect_s, read=limits.read_s),
                retries=_make_retry(limits),
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
    """Drop the parent's connections in a forked process."""
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


def _make_retry(limits: JobsApiLimits) -> Any:
    """Return the rules for repeated calls. A POST is not repeated: it may have had its effect."""
    import urllib3

    return urllib3.Retry(
        total=limits.tries - 1,
        redirect=False,
        allowed_methods={"GET", "PUT"},
        status_forcelist=_RETRIED_STATUSES,
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
