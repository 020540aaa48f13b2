"""JAX's coordination service in a process of its own, so that it outlives any worker.

In: a fork server, the number of processes. Out: an address; a process until the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from kinetic._core.plan import Plan
from kinetic._host.fork_server import ForkServer
from kinetic._host.worker import coordination, joining
from kinetic._system import processes
from kinetic.errors import SetupFailed

_ADDRESS = "127.0.0.1"


def may_serve(plan: Plan) -> bool:
    """Whether a service beside the workers can serve this job: they join by private interfaces of
    JAX, which programs in other interpreters may not have, and which nobody needs where each
    attempt has new workers.

    Raises:
        SetupFailed: the workers must stay, and cannot.
    """
    elastic = plan.elastic_gang
    if elastic is None or elastic.survivors == "restart" or plan.options.joins_jax == "program":
        return False
    why = coordination.why_unknown() if "jax" in sys.modules else "it was not imported"
    if why and elastic.survivors == "keep":
        raise SetupFailed(
            f'survivors="keep" needs a JAX whose interfaces kinetic knows ({why}): leave it away.'
        )
    return not why


class Service:
    """One attempt's service.

    Attributes:
        address: "address:port".
        pid: of its process, which is a child of this one.
    """

    def __init__(self, fork_server: ForkServer, job_id: str, count: int) -> None:
        """Start it for so many processes.

        Raises:
            OSError: no process could be forked, or there is no free port.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as port:
            # gRPC binds it as well; until then, and while it listens, nobody else gets the port.
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port.bind((_ADDRESS, 0))
            self.address = f"{_ADDRESS}:{port.getsockname()[1]}"
            request = {"job_id": job_id, "address": self.address, "count": count}
            self.pid = fork_server.fork({"serve": request}, [port.fileno()])

    def end(self) -> None:
        """End it; all that have joined must have left, or JAX aborts them."""
        processes.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def serve(job_id: str, address: str, count: int) -> int:
    """Be that process."""
    processes.die_with_parent(os.getppid())
    processes.set_title(f"kinetic-service {job_id}")
    coordination.serve(address, count, joining.HEARTBEAT_S)
