"""The actor of one host: it starts the host's program, and takes it along when it dies.

In: the variables of a host. Out: where the actor runs; how its program has ended. Ray makes an
actor of `HostActor`; this module does without Ray.

The program is a process of its own, so that what the function does to it (signals, threads, `exec`,
memory) does nothing to Ray's. Children of an actor that is killed live on, therefore the kernel
kills the program when its parent dies, and the agent when it reads end-of-file of the program.
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
"""Ray sets it to the number of processors that were asked for: 1."""


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor runs.

    Attributes:
        worker: the number of its machine in a TPU slice; 0 elsewhere.
        python: the version of its interpreter.
        executable: its path.
    """

    worker: int
    python: str
    executable: str


class HostActor:
    """One host, on a machine that Ray has chosen."""

    def __init__(self) -> None:
        """End with the node's raylet: an actor that works would not notice that it is gone, and Ray
        takes the node for alive for a minute more."""
        raylet = os.getppid()
        if identity.environ_with({}).get("RAY_RAYLET_PID") == str(raylet):
            processes.die_with_parent(raylet)
        self._started: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def describe(self) -> ActorPlace:
        """Return where this runs."""
        worker = identity.environ_with({}).get("TPU_WORKER_ID", "0")
        version = ".".join(map(str, sys.version_info[:3]))
        return ActorPlace(int(worker or 0), version, sys.executable)

    def run(self, variables: Mapping[str, str]) -> tuple[int, str]:
        """Run the host's program to its end; return its exit code, and its last lines on stderr.

        It is called once, in a thread that lives as long as the actor: whoever is killed with a
        parent is killed with the thread that has started it.
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
        """Tell the host's program that its machine goes, as a cluster tells a pod: called once, in
        another thread than `run`, and perhaps before the program has started."""
        self._started.get().terminate()
