"""The Ray actor of one host: it runs the host's program, which dies with the actor. `cluster` makes
an actor of `HostActor`; this module does not import Ray.

The program is a separate process, so that the function (signals, threads, `exec`, memory) does not
affect Ray's process. The kernel kills the program when the actor dies. The program's agent ends
when it reads end-of-file from the program.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Mapping

from kinetic._core.values import dataclass
from kinetic._host import identity
from kinetic._system import processes

_PROGRAM = ("-m", "kinetic.runner")
_LAST_LINES = 20
_SET_BY_RAY = ("OMP_NUM_THREADS",)
"""Variables that the program must not inherit: Ray sets them to the number of requested CPUs, 1."""


@dataclass(frozen=True)
class ActorPlace:
    """The machine and interpreter of an actor.

    Attributes:
        worker: number of the machine in a TPU slice; 0 on other machines.
        python: version of the interpreter.
        executable: path of the interpreter.
    """

    worker: int
    python: str
    executable: str


class HostActor:
    """One host, on a machine that Ray has chosen."""

    def __init__(self) -> None:
        """Have this process die with the node's raylet: a busy actor would not notice the raylet's
        death, and Ray would count the node as alive for another minute."""
        raylet = os.getppid()
        if identity.environ_with({}).get("RAY_RAYLET_PID") == str(raylet):
            processes.die_with_parent(raylet)
        self._started: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def describe(self) -> ActorPlace:
        """Return the machine and the interpreter of this actor."""
        worker = identity.environ_with({}).get("TPU_WORKER_ID", "0")
        version = ".".join(map(str, sys.version_info[:3]))
        return ActorPlace(int(worker or 0), version, sys.executable)

    def run(self, variables: Mapping[str, str]) -> tuple[int, str]:
        """Run the host's program to its end; return its exit code and its last lines on stderr.

        Called once, in a thread that lives as long as the actor: the kernel kills the program when
        the thread that has started it ends.
        """
        own = {**variables, "KINETIC_PARENT": str(os.getpid())}
        last: deque[str] = deque(maxlen=_LAST_LINES)
        with subprocess.Popen(
            [sys.executable, *_PROGRAM],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=identity.environ_with(own, without=_SET_BY_RAY),
            text=True,
            errors="replace",
        ) as program:
            self._started.put(program)
            for line in program.stderr or ():
                last.append(line)
                sys.stderr.write(line)
        return program.returncode, "".join(last)

    def take_away(self) -> None:
        """Tell the host's program with SIGTERM, as a cluster tells a pod, that its machine is taken
        away. Called once, in another thread than `run`, perhaps before the program has started."""
        self._started.get().terminate()
