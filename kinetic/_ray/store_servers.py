"""The server of the store on a Ray cluster's head: a job that is started when it is missing.

In: the cluster's dashboard, how programs of kinetic start there. Out: a running store server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kinetic._ray.jobs_api import JobsApi, RayJob, Submission
from kinetic._ray.refusals import last_line
from kinetic.errors import SubmitError
from kinetic.version import __version__

MODULE = "kinetic._host.ray.store_server"
PROTOCOL = "1"
"""Of the requests. Store servers of any version of kinetic serve those who speak the same."""
_NAME = f"kinetic-store-server-{PROTOCOL}"


def ensure_server(api: JobsApi, entrypoint: str, runtime_env: Mapping[str, Any]) -> bool:
    """Start the store server unless it runs; return whether this call did. Requests wait for it.

    Args:
        api: the cluster's dashboard.
        entrypoint: the command that runs `MODULE` with an interpreter that has Ray.
        runtime_env: in which it finds kinetic.

    Raises:
        BackendUnavailable: the cluster does not answer.
    """
    servers = _find_all(api)
    if not all(job.has_ended for job in servers):
        return False
    return _start(api, servers, entrypoint, runtime_env)


def revive_server(api: JobsApi) -> str:
    """Start the store server again as it was started last, if it has ended: whoever writes in the
    middle of a job has no archive at hand. Return how it had ended, "" if it runs or there never
    was one.

    Raises:
        BackendUnavailable: the cluster does not answer.
    """
    servers = _find_all(api)
    if not servers or not all(job.has_ended for job in servers):
        return ""
    last = max(servers, key=_number_of)
    _start(api, servers, last.entrypoint, last.runtime_env)
    return f"{last.job_id} {last.status}: {last_line(last.message)}"


def _start(
    api: JobsApi, servers: Sequence[RayJob], entrypoint: str, runtime_env: Mapping[str, Any]
) -> bool:
    number = 1 + max(map(_number_of, servers), default=0)
    about = {"kinetic": __version__, "name": "store server of the store"}
    try:
        api.submit(Submission(f"{_NAME}-{number}", entrypoint, runtime_env, about))
    except SubmitError as error:
        if "already exists" in str(error):  # somebody else was quicker
            return False
        raise
    return True


def is_running(api: JobsApi) -> bool:
    """Whether a store server runs, or is about to."""
    return not all(job.has_ended for job in _find_all(api))


def _find_all(api: JobsApi) -> list[RayJob]:
    return [job for job in api.list() if _is_server(job)]


def _number_of(server: RayJob) -> int:
    return int(server.job_id.rpartition("-")[2])


def _is_server(job: RayJob) -> bool:
    prefix, _, number = job.job_id.rpartition("-")
    return prefix == _NAME and number.isdigit()
