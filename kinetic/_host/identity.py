"""The identity of a host, read from the environment (on a cluster) or made by the supervisor (on
this machine).

No other module that runs on a host reads kinetic's variables from the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import NamedTuple

from kinetic._core.endpoint import Endpoint
from kinetic._core.gang.messages import HostAssignment
from kinetic._core.values import dataclass
from kinetic.errors import UsageError

ALONE_S = 1.0


def alone_s(limit_s: float | None) -> float:
    """Return the delay in seconds after which the only host of a gang connects to the coordinator.
    A small job ends before that, and so needs no coordinator. Connecting takes a while, so a job
    with a time limit connects at half of it at the latest."""
    return ALONE_S if limit_s is None else min(limit_s / 2, ALONE_S)


@dataclass(frozen=True)
class Identity:
    """The identity of a host in one attempt, and how to reach its leader and its store.

    Attributes:
        store_uri: root of the store.
        job_id: id of the job; in a call of a session, of the call.
        session: id of the session that leads the host through calls; "" outside of sessions.
        secrets: values of the plan's secrets.
        base_env: environment variables to which the worker's own are added.
        scratch: folder for the source tree and temporary files; removed at the end.

        host: index in the gang.
        hosts: size of the gang.
        role: "head" leads the job and runs no function, "host" is led by a head; "" if host 0 or
            the supervisor leads.
        simulated: the chips are virtual devices of the processor.
        is_program: this host has a program, which forks its agent; otherwise the supervisor on this
            machine forks all agents.
        is_pod: a cluster started this host, and may start it again.
        parent: id of the process whose end also ends this host's program; 0 for none.
        is_mirrored: the agent repeats the worker's output on its own standard streams.
        debug_port: port for the debugger of a debug job; 0 for any free port.

        target: gRPC target of the coordinator.
        token: the job's token.
        certificate: PEM of the coordinator's certificate over TCP; "" for a Unix socket.
        key: PEM of the certificate's private key; "" in all programs but the leader's.
        address: IP address or name at which the other hosts reach this one.
        heartbeat_s: seconds between two heartbeats.
        unreachable_after_s: seconds without the coordinator after which the worker is ended.
        join_timeout_s: seconds for which the coordinator may take to come up.

        attempt: number of the attempt, from 1.
        assignment: the host's assignment to this attempt; None if the job has only one attempt.
        assigned_index: index among all hosts of the job, the same in all attempts.
        stays: the agent process outlives the attempt, and waits for the next assignment.
        start: number of the host's start, from 1: a lost host is started again.
        restarts: how often the cluster has restarted all pods; 0 if unknown.
        turn: number of the gang among all gangs of the session; 0 outside of sessions.
        lost_at: time of the failure that this attempt recovers from, on this machine's monotonic
            clock; 0.0 for none.
    """

    store_uri: str
    job_id: str
    host: int
    hosts: int
    target: str
    token: str
    address: str
    scratch: str
    certificate: str = ""
    key: str = field(default="", repr=False)
    role: str = ""
    is_program: bool = False
    simulated: bool = False
    is_mirrored: bool = False
    attempt: int = 1
    is_pod: bool = False
    restarts: int = 0
    base_env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    heartbeat_s: float = 1.0
    assignment: HostAssignment | None = None
    lost_at: float = 0.0
    assigned_index: int = 0
    stays: bool = False
    start: int = 1
    debug_port: int = 0
    unreachable_after_s: float = 30.0
    join_timeout_s: float = 30.0
    parent: int = 0
    session: str = ""
    turn: int = 0

    @property
    def leads(self) -> bool:
        """True if this program leads the gang."""
        return _leads(self.role, self.host)

    @property
    def is_led_from_afar(self) -> bool:
        """True if a head leads, which outlives the loss of this host."""
        return self.role == "host"

    @property
    def index(self) -> int:
        """Index among all hosts of the job; names this host's files on a machine with several."""
        return self.host if self.assignment is None else self.assigned_index

    def take_place(self, place: HostAssignment) -> Identity:
        """Return the identity of this host with an assignment."""
        is_call = bool(place.job_id)
        return replace(
            self,
            job_id=place.job_id or self.job_id,
            session=(self.session or self.job_id) if is_call else "",
            turn=place.turn,
            host=place.host,
            hosts=place.hosts,
            attempt=place.attempt,
            assignment=place,
            lost_at=time.monotonic() - place.lost_s if place.lost_s else 0.0,
        )

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint at which this host calls the coordinator."""
        job_id, attempt = self.session or self.job_id, self.turn or self.attempt
        return Endpoint(self.target, self.token, job_id, attempt, self.certificate, self.restarts)


def from_environ(environ: Mapping[str, str] | None = None) -> Identity:
    """Read the identity from `KINETIC_*` variables, as a cluster's manifests set them.

    The index of the host comes from:
        - `KINETIC_HOST_INDEX`, or
        - in a template that all hosts share: `KINETIC_JOB_INDEX` (the slice), `KINETIC_POD_INDEX`
          (the host in the slice) and `KINETIC_HOSTS_PER_SLICE`.

    The secrets of the gang come from:
        - the folder `KINETIC_CREDENTIALS`: files `token`, `tls.crt` and, for the leader, `tls.key`;
          or
        - `KINETIC_TOKEN`, `KINETIC_TLS_CERTIFICATE` and, for the leader, `KINETIC_TLS_KEY`; in a
          template that all hosts share, `tls.key` in the folder `KINETIC_TLS_KEY_DIR` instead.

    Raises:
        UsageError: a variable or a file is missing or malformed.
    """
    env = dict(os.environ if environ is None else environ)
    try:
        host, job_id, role = _index(env), env["KINETIC_JOB_ID"], env.get("KINETIC_ROLE", "")
        leads = _leads(role, host)
        scratch = env.get("KINETIC_SCRATCH") or f"{env.get('TMPDIR') or '/tmp'}/kinetic"
        secrets = _secrets(env, leads=leads)
        address = env.get("KINETIC_HOST_ADDRESS", "127.0.0.1")
        return Identity(
            store_uri=env["KINETIC_STORE"],
            job_id=job_id,
            host=host,
            hosts=int(env["KINETIC_HOSTS"]),
            target=_target(env["KINETIC_COORDINATOR"], address, leads=leads),
            token=secrets.token,
            certificate=secrets.certificate,
            key=secrets.key,
            address=address,
            scratch=f"{scratch}/{job_id}-{'head' if role == 'head' else host}",
            role=role,
            simulated=env.get("KINETIC_SIMULATED") == "1",
            is_mirrored=env.get("KINETIC_TEE") == "1",
            is_program=True,
            is_pod="KINETIC_POD_INDEX" in env,
            restarts=int(env.get("KINETIC_RESTARTS") or "0"),
            base_env={k: v for k, v in env.items() if k not in HIDDEN_FROM_FUNCTION},
            debug_port=int(env.get("KINETIC_DEBUG_PORT", "5678")),
            unreachable_after_s=float(env.get("KINETIC_UNREACHABLE_AFTER_S", "10")),
            join_timeout_s=float(env.get("KINETIC_JOIN_TIMEOUT_S", "30")),
            parent=int(env.get("KINETIC_PARENT") or "0"),
        )
    except KeyError as error:
        raise UsageError(
            f"{error.args[0]} is not set. Do not start python -m kinetic.runner yourself: kinetic "
            "starts it on each host of a job."
        ) from error
    except OSError as error:
        raise UsageError(
            f"The gang's secrets cannot be read: {error.strerror}: {error.filename}. "
            "KINETIC_CREDENTIALS names a folder with token, tls.crt and, for host 0, tls.key."
        ) from error
    except ValueError as error:
        raise UsageError(
            f"A KINETIC_* variable of python -m kinetic.runner is malformed: {error}. Do not start "
            "it yourself: kinetic starts it on each host of a job."
        ) from error


def _leads(role: str, host: int) -> bool:
    return role == "head" or (not role and host == 0)


class _Secrets(NamedTuple):
    """A host's credentials in its gang; `key` is "" unless the host leads."""

    token: str
    certificate: str
    key: str


def _index(env: Mapping[str, str]) -> int:
    if "KINETIC_HOST_INDEX" in env or "KINETIC_POD_INDEX" not in env:
        return int(env["KINETIC_HOST_INDEX"])
    slice_, per_slice = env["KINETIC_JOB_INDEX"], env["KINETIC_HOSTS_PER_SLICE"]
    return int(slice_) * int(per_slice) + int(env["KINETIC_POD_INDEX"])


def _secrets(env: Mapping[str, str], *, leads: bool) -> _Secrets:
    if "KINETIC_CREDENTIALS" in env or "KINETIC_TOKEN" not in env:
        folder = Path(env["KINETIC_CREDENTIALS"])
        key = (folder / "tls.key").read_text() if leads else ""
        token = (folder / "token").read_text()
        return _Secrets(token.strip(), (folder / "tls.crt").read_text(), key)
    key, key_folder = "", env.get("KINETIC_TLS_KEY_DIR")
    if leads:
        key = (Path(key_folder) / "tls.key").read_text() if key_folder else env["KINETIC_TLS_KEY"]
    return _Secrets(env["KINETIC_TOKEN"].strip(), env["KINETIC_TLS_CERTIFICATE"], key)


def _target(coordinator: str, address: str, *, leads: bool) -> str:
    """Return the address at which this host reaches the leader. The leader listens on its own
    address: several leaders may share a machine, and the leader's name may not resolve yet."""
    if not leads:
        return coordinator
    port = coordinator.rpartition(":")[2]
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


HIDDEN_FROM_FUNCTION = frozenset(
    f"KINETIC_{name}"
    for name in (
        *("ATTEMPT", "COORDINATOR", "CREDENTIALS", "DEBUG_PORT", "HOST_ADDRESS"),
        *("HOSTS_PER_SLICE", "JOB_INDEX", "POD_INDEX", "SCRATCH", "SIMULATED", "STORE", "TEE"),
        *("TLS_CERTIFICATE", "TLS_KEY", "TLS_KEY_DIR", "TOKEN", "UNREACHABLE_AFTER_S"),
        *("JOIN_TIMEOUT_S", "PARENT", "RESTARTS", "ROLE"),
        # Variables of the bootstrap.
        *("IMAGE_REQUIREMENTS", "IMAGE_RUNTIME", "POD_PATIENCE_S"),
        *("REQUIREMENTS", "RUNTIME", "VERSION"),
    )
)


def variables_of_the_job() -> dict[str, str]:
    """Return the KINETIC_* variables of this process, which tell a function its job and host."""
    return {name: value for name, value in os.environ.items() if name.startswith("KINETIC_")}


def environ_with(variables: Mapping[str, str], without: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of this process with `variables`, but without those named in
    `without`, for a program that this process starts."""
    excluded = set(without)
    return {n: value for n, value in os.environ.items() if n not in excluded} | dict(variables)
