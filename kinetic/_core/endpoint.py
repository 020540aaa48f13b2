"""Address, token and certificate of a gang's coordinator."""

from __future__ import annotations

from dataclasses import field

from kinetic._core.values import dataclass


@dataclass(frozen=True)
class Endpoint:
    """Everything needed to call the coordinator of one job.

    Attributes:
        target: "unix:/path", or "host:port" for TCP.
        token: secret that authenticates the caller.
        job_id: the job; the coordinator of another job refuses the caller.
        attempt: the caller's attempt, from 1; 0 for users, who belong to no attempt.
        restarts: how often the cluster had restarted all hosts of the job before it started this
            process. A caller and a coordinator with different numbers refuse each other. None for
            users.
        certificate: PEM of the certificate that the coordinator must present over TCP; "" for a
            Unix socket.
    """

    target: str
    token: str = field(repr=False)
    job_id: str
    attempt: int = 0
    certificate: str = field(default="", repr=False)
    restarts: int | None = None

    @property
    def is_unix(self) -> bool:
        """True if the target is a Unix socket of this machine, protected by its file mode."""
        return self.target.startswith("unix:")

    @property
    def tls_name(self) -> str:
        """The host name in the job's certificate; it does not depend on the leader's machine."""
        return f"{self.job_id}.kinetic.internal"
