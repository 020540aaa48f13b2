"""How to reach a gang's coordinator: address, token, certificate.

In: what its leader, a manifest or a record says. Out: `Endpoint`.
"""

from __future__ import annotations

from dataclasses import field

from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Endpoint:
    """How to call the coordinator of one job.

    Attributes:
        target: "unix:/path", or "host:port" of TCP.
        token: authenticates the caller.
        job_id: the job; the coordinator of another one refuses the caller.
        attempt: the attempt that the caller belongs to, from 1; 0 for users, who belong to none.
        restarts: how often the cluster had restarted all hosts of the job when it started the
            caller, or the coordinator; those of another start refuse each other. None for users.
        certificate: PEM; over TCP the coordinator must present exactly this one. "" for a Unix
            socket.
    """

    target: str
    token: str = field(repr=False)
    job_id: str
    attempt: int = 0
    certificate: str = field(default="", repr=False)
    restarts: int | None = None

    @property
    def is_unix(self) -> bool:
        """Whether it is a Unix socket of this machine, protected by its file mode."""
        return self.target.startswith("unix:")

    @property
    def tls_name(self) -> str:
        """The name in the job's certificate, independent of the leader's host name."""
        return f"{self.job_id}.kinetic.internal"
