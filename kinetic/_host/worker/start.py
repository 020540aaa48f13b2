"""The start message, with which a worker runs the function once the whole gang is ready.
`agent.start_message` makes it."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from kinetic._core.documents import Record
from kinetic._core.options import Elastic
from kinetic._core.values import dataclass
from kinetic._host.worker.home import Home
from kinetic._host.worker.joining import World


@dataclass(frozen=True)
class ElasticSlices:
    """The slices of a process that outlives the loss of some.

    Attributes:
        rules: the elastic rules of the job.
        machines: number of machines of all slices.
        away_s: seconds for which a lost virtual slice stays away.
    """

    rules: Elastic
    machines: int
    away_s: float


@dataclass(frozen=True)
class Start(Record, called="The start message"):
    """The start message from the agent.

    Attributes:
        attempt: number of the attempt, from 1.
        payload: file of the pickled call.
        payload_digest: SHA-256 of the payload, verified before unpickling.
        function: file of the pickled function and its SHA-256, if the payload holds only arguments;
            else "".
        env: the whole environment, except the variables in the payload.
        cwd: working directory.
        sys_path: entries that go before the interpreter's own.
        editable: entries that go before the folders of installed packages.
        scratch: folder for the value or the exception.
        world: this process's rank among the processes of JAX.
        joins_jax: when the worker joins JAX's world: True, "lazy", False or "program"; see
            `Options`.
        jax_options: options of `jax.config` to set before anything else uses JAX.
        name: display name of the function.
        tree: folder of the source tree on this host.
        client_root: its folder on the caller's machine; tracebacks name files in it.
        all_hosts: keep the value of every host, not only the leader's.
        cells: source without a file, so that tracebacks can show it.
        debugger: port and window of the job's debugger, or None in a job without one.
        places: paths of the declared data in the call, by their numbers in the payload.
        mounts: mounts for the data; see `mounts.Mount`.
        home: the host's local folder, or None.
        programs: folder for the programs that JAX compiles; "" keeps none.
        elastic: the slices, if one process has all of them and may lose some; else None.
        keeps: the process stays for the next call of its session.
        compares: number of calls to compare of each program that several processes run together; 0
            for one process.
        packages: folder of packages that calls of a session add, if its worker reports what the
            call imports; else "".
    """

    attempt: int
    payload: str
    payload_digest: str
    function: str
    env: dict[str, str]
    cwd: str
    sys_path: list[str]
    scratch: str
    world: World
    joins_jax: bool | str
    name: str
    tree: str
    client_root: str
    all_hosts: bool = False
    jax_options: dict[str, Any] = field(default_factory=dict)
    editable: list[str] = field(default_factory=list)
    cells: list[dict[str, str]] = field(default_factory=list)
    debugger: dict[str, Any] | None = None
    places: list[str] = field(default_factory=list)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    home: Home | None = None
    elastic: ElasticSlices | None = None
    programs: str = ""
    keeps: bool = False
    compares: int = 0
    packages: str = ""
