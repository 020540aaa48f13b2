"""The store server on a Ray cluster's head: a Ray job that is started when it is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic._ray.jobs_api import JobsApi, RayJob, Submission
from kinetic._ray.refusals import last_line
from kinetic.errors import SubmitError
from kinetic.version import __version__

MODULE = "kinetic._host.ray.store_server"
PROTOCOL = "1"
"""Version of the protocol between store servers and clients. All kinetic versions with this number
work together."""
_NAME = f"kinetic-store-server-{PROTOCOL}"


def ensure_server(api: JobsApi, entrypoint: str, runtime_env: Mapping[str, Any]) -> bool:
    """Start the store server unless it runs. Requests can be sent before it is ready.

    Args:
        api: The cluster's dashboard.
        entrypoint: Command that runs `MODULE` with an interpreter that has Ray.
        runtime_env: Runtime environment in which it finds kinetic.

    Returns:
        True if this call started it.

    Raises:
        BackendUnavailable: The cluster does not answer.
    """
    servers = _list_servers(api)
    if not all(job.has_ended for job in servers):
        return False
    return _start(api, servers, entrypoint, runtime_env)


def revive_server(api: JobsApi) -> str:
    """Restart the store server with its last command and environment, if it has ended. Unlike
    `ensure_server`, this does not need kinetic's archive.

    Returns:
        A sentence about the server's end; "" if the server runs or has never existed.

    Raises:
        BackendUnavailable: The cluster does not answer.
    """
    servers = _list_servers(api)
    if not servers or not all(job.has_ended for job in servers):
        return ""
    last = max(servers, key=_read_number)
    _start(api, servers, last.entrypoint, last.runtime_env)
    return f"{last.job_id} {last.status}: {last_line(last.message)}"


def _start(
    api: JobsApi, servers: Sequence[RayJob], entrypoint: str, runtime_env: Mapping[str, Any]
) -> bool:
    number = 1 + max(map(_read_number, servers), default=0)
    about = {"kinetic": __version__, "name": "store server of the store"}
    try:
        api.submit(Submission(f"{_NAME}-{number}", entrypoint, runtime_env, about))
    except SubmitError as error:
        if "already exists" in str(error):  # Another process was faster.
            return False
        raise
    return True


def is_running(api: JobsApi) -> bool:
    """True if a store server is running or starting."""
    return not all(job.has_ended for job in _list_servers(api))


def _list_servers(api: JobsApi) -> list[RayJob]:
    return [job for job in api.list() if _is_server(job)]


def _read_number(server: RayJob) -> int:
    return int(server.job_id.rpartition("-")[2])


def _is_server(job: RayJob) -> bool:
    prefix, _, number = job.job_id.rpartition("-")
    return prefix == _NAME and number.isdigit()
