"""The leader of a job, as the driver that Ray's Jobs API starts.

In: `KINETIC_*` variables of the submission (see _backends.ray.submission), the job's records. Out:
a `ProgramCode`; the job's events and verdict in the store. It runs no function: hosts are programs
that actors start, and join over TCP with a token and a certificate that are made here. They are in
no variable of the submission, which Ray shows to everybody.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping

from kinetic._core import layout, record
from kinetic._core.endpoint import Endpoint
from kinetic._core.exits import ProgramCode
from kinetic._core.plan import Plan
from kinetic._core.quantities import amount_of, bytes_of
from kinetic._host import identity, program
from kinetic._host.ray import cluster
from kinetic._host.ray.cluster import HostPlace, Needs
from kinetic._host.ray.hosts import RayHosts
from kinetic._ray.jobs_api import secrets_package
from kinetic._rpc import certificate
from kinetic._store.base import Store
from kinetic.errors import KineticError, SubmitError

_JOIN_S = "30"
"""How long the program of a host tries to reach this one, which serves before it is started."""


class _Driver:
    """What the programs of this job are started with."""

    def __init__(self, given: Mapping[str, str], address: str, port: int) -> None:
        endpoint = Endpoint(f"{address}:{port}", os.urandom(16).hex(), given["KINETIC_JOB_ID"])
        made = certificate.make(endpoint.tls_name)
        self._gang = {
            "KINETIC_JOB_ID": endpoint.job_id,
            "KINETIC_STORE": cluster.locate_store(given["KINETIC_STORE"]),
            "KINETIC_COORDINATOR": endpoint.target,
            "KINETIC_TOKEN": endpoint.token,
            "KINETIC_TLS_CERTIFICATE": made.certificate,
            "KINETIC_JOIN_TIMEOUT_S": _JOIN_S,
            "KINETIC_SIMULATED": given.get("KINETIC_SIMULATED", ""),
            "KINETIC_TEE": "1",
            "RAY_ADDRESS": cluster.find_address(),  # For functions that use Ray themselves.
        }
        self._address, self._key = address, made.key
        self._secrets: Mapping[str, str] = {}
        self.hosts: RayHosts | None = None

    def own_variables(self) -> dict[str, str]:
        """Return who this program is."""
        return self._gang | {
            "KINETIC_ROLE": "head",
            "KINETIC_HOSTS": "1",
            "KINETIC_HOST_INDEX": "0",
            "KINETIC_POD_INDEX": "0",
            "KINETIC_HOST_ADDRESS": self._address,
            "KINETIC_TLS_KEY": self._key,
        }

    def make_hosts(self, plan: Plan, store: Store) -> RayHosts:
        """Return the hosts of the job; nothing of them is there yet."""
        self._secrets = _take_secrets(plan)
        self._gang["KINETIC_HOSTS"] = str(plan.hosts)
        most, limit_s = plan.options.most_slices, plan.limits.start_timeout_s
        elastic = plan.elastic_gang
        self.hosts = RayHosts(
            plan.hosts,
            most,
            needs_of(plan),
            self._variables_of,
            starts_each=elastic is not None,
            limit_s=math.inf if elastic is not None else limit_s,
            tell=_WaitingNote(store, plan.job_id).tell,
        )
        self.hosts.reserve_all()
        return self.hosts

    def _variables_of(self, index: int, place: HostPlace) -> dict[str, str]:
        own = {
            "KINETIC_ROLE": "host",
            "KINETIC_HOST_INDEX": str(index),
            "KINETIC_POD_INDEX": str(index),
            "KINETIC_HOST_ADDRESS": place.address,
            "KINETIC_DEBUG_PORT": "0",  # Nodes may have hosts of several jobs.
        }
        return {**self._secrets, **self._gang, **own}


class _WaitingNote:
    """Leaves in the store what the job waits for."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store, self._key, self._told = store, layout.JobKeys(job_id).wait_note, ""

    def tell(self, reason: str) -> None:
        """Write it if it has changed; "" is not worth forgetting what it was."""
        if reason and reason != self._told:
            self._told = reason
            with contextlib.suppress(KineticError):
                self._store.put(self._key, json.dumps({"reason": reason}).encode())


def needs_of(plan: Plan) -> Needs:
    """Return what each slice of a job takes."""
    cpus, memory = plan.options.cpu, plan.options.memory
    most = {"cpus": amount_of(cpus)} if cpus else {}
    return Needs(plan.topology, memory_bytes=bytes_of(memory or ""), **most)


def _take_secrets(plan: Plan) -> dict[str, str]:
    """Return the values of the user's secrets; the cluster has them only until this moment.

    Raises:
        SubmitError: it has them no more.
    """
    if not plan.secrets:
        return {}
    package = cluster.take_package(secrets_package(plan.job_id))
    if package is None:
        raise SubmitError(
            f"the values of secrets={sorted(plan.secrets)} are not in the cluster any more: Ray "
            "keeps them for ten minutes, and the driver did not start within that time. Call the "
            "function again."
        )
    return {str(name): str(value) for name, value in record.parse(package).items()}


@contextlib.contextmanager
def _hold_port(address: str) -> Iterator[int]:
    """A free port, bound without listening: this program can bind it as well, and no other."""
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((address, 0))
        yield port.getsockname()[1]


def main() -> int:
    """Lead the job until it has ended; leave nothing of it in the cluster."""
    try:
        address = cluster.connect()
    except KineticError as error:
        sys.stderr.write(f"kinetic: {error}\n")
        return ProgramCode.UNUSABLE
    with _hold_port(address) as port:
        driver = _Driver(identity.environ_with({}), address, port)
        try:
            return program.main(driver.own_variables(), driver.make_hosts)
        finally:
            if driver.hosts is not None:
                driver.hosts.release_all()
            cluster.disconnect()
