"""The start message: what a worker needs to run the function, once the whole gang is ready.

In: the fields that `agent.start_message` writes. Out: `Start`.
"""

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
    """The slices of one process that outlives the loss of some.

    Attributes:
        rules: what follows a loss.
        machines: that the slices have together.
        away_s: how long a virtual slice that was lost stays away.
    """

    rules: Elastic
    machines: int
    away_s: float


@dataclass(frozen=True)
class Start(Record, called="The start message"):
    """What the agent sends the worker when the whole gang is ready.

    Attributes:
        attempt: of the job, from 1.
        payload: file of the pickled call.
        payload_digest: its SHA-256, verified before anything is unpickled.
        function: file of the pickled function and its SHA-256, if the payload holds only arguments;
            else "".
        env: the whole environment, without what the payload carries.
        cwd: working directory.
        sys_path: entries that go before the interpreter's own.
        editable: entries that go before the folders of installed packages.
        scratch: folder for the value or the exception.
        world: this process's rank among the processes of JAX.
        joins_jax: when the worker joins the world: True, "lazy", False, or "program"; see `Plan`.
        jax_options: options of `jax.config` to set before anything else uses JAX.
        name: display name of the function.
        tree: where the source tree lies on this host.
        client_root: where it lies on the caller's machine; tracebacks name files there.
        all_hosts: whether the value of every host is kept, not only the leader's.
        cells: source without a file, so that tracebacks can show it.
        debugger: port and window of the job's debugger, or None in a job without one.
        places: paths of the declared data that the call holds, by its numbers there.
        mounts: what must be mounted for the data; see `mounts.Mount`.
        home: what makes this host look like a machine of its own, or None.
        programs: folder that keeps what JAX compiles here; "" keeps nothing.
        elastic: the slices, where one process has all of them and they may be lost; else None.
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
