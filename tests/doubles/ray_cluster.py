"""A real Ray cluster on this machine: a head with its dashboard, and raylets that stand for the
hosts of simulated TPU slices.

In: slices, nodes. Out: the address of the dashboard; nodes that are killed at a word.

Everything of the cluster runs in namespaces of its own (network, processes, mounts): Ray insists on
the machine's own address, which is the loopback where there is no other; and with the first
process of the namespaces all others end, whatever has become of whoever started them. The tests
stay outside. A listening socket belongs to the network in which it was made: it is made out here,
and the program inside (`ray_nodes`) accepts what connects to it, and hands it on to the dashboard.
Folders, and Unix sockets in them, are shared: by one, the tests give orders.

All tests of a run, also in several processes, share one cluster, which ends with the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from doubles import ray_nodes
from doubles.ray_nodes import READY_WITHIN_S, TOKEN

LEAST_BYTES = 2 << 30
_KEPT = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class SliceShape:
    """What the nodes of one slice tell Ray."""

    accelerator: str
    topology: str
    hosts: int
    chips: int = 4

    def node(self, name: str, worker: int) -> dict[str, Any]:
        """What the node of one worker of a slice is started with."""
        generation = self.accelerator.partition("-")[0].upper()
        resources = {"TPU": self.chips, f"accelerator_type:TPU-{generation}": 1}
        if worker == 0:
            resources[f"TPU-{self.accelerator}-head"] = 1
        labels = {
            "ray.io/tpu-slice-name": name,
            "ray.io/tpu-worker-id": str(worker),
            "ray.io/tpu-pod-type": self.accelerator,
            "ray.io/tpu-topology": self.topology,
        }
        variables = {
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": self.accelerator,
            "TPU_TOPOLOGY": self.topology,
        }
        return {"resources": resources, "labels": labels, "env_vars": variables}


V6E_16 = SliceShape("v6e-16", "4x4", hosts=4)


@dataclass(frozen=True)
class GivenCluster:
    """A cluster that somebody else runs.

    Attributes:
        address: of its dashboard.
    """

    address: str


class RayCluster:
    """A running cluster.

    Attributes:
        address: of the dashboard, for whoever is on this machine: http://127.0.0.1:port.
        token: without which nobody is let in.
        folder: what Ray and the cluster's program write.
    """

    def __init__(self, folder: Path) -> None:
        ready = json.loads((folder / "ready.json").read_text())
        self.folder = folder
        self.address = f"http://127.0.0.1:{ready['port']}"
        self.token = TOKEN
        self.pid = int(ready["pid"])
        """Of the program that made the namespaces; everything ends with it."""

    def add_node(self, **settings: Any) -> int:
        """Start a node with what `ray.cluster_utils.Cluster.add_node` takes; return its index,
        from 1."""
        return int(self._ask("add_node", settings))

    def add_slice(self, name: str, shape: SliceShape = V6E_16) -> list[int]:
        """Start the nodes of a slice; return their indices by worker."""
        return [self.add_node(**shape.node(name, worker)) for worker in range(shape.hosts)]

    def kill_node(self, index: int) -> None:
        """Kill the raylet of a node, as `kill -9` does, and nothing else. Ray notices after 2 s
        here, elsewhere after more than a minute."""
        self._ask("kill_node", index)

    def drain_node(self, index: int, deadline_s: int = 600) -> None:
        """Say, as an autoscaler does, that the machine of a node is about to be preempted. Ray ends
        a node that nothing uses any more; nobody ends the others."""
        self._ask("drain_node", (index, deadline_s))

    def remove_node(self, index: int) -> None:
        """End all programs of a node, as a machine that is switched off does. It does not come
        back."""
        self._ask("remove_node", index)

    def nodes(self) -> dict[int, bool]:
        """Which nodes were started, and whether their raylets are alive."""
        return {int(index): alive for index, alive in self._ask("nodes", None).items()}

    def mend(self) -> None:
        """Replace nodes that were killed by new ones that tell the same of themselves."""
        self._ask("mend", None)

    def run_inside(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's network and among its processes."""
        program = next(_children_of(self.pid))
        inside = ["nsenter", "-n", "-p", "-m", *_user_of(program), "-t", str(program), *command]
        return subprocess.run(inside, text=True, capture_output=True, check=False, **settings)

    def _ask(self, order: str, about: Any) -> Any:
        with Client(str(self.folder / "orders"), "AF_UNIX") as connection:
            connection.send((order, about))
            answer = connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer[0]


def _children_of(pid: int) -> Iterator[int]:
    yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def _user_of(pid: int) -> list[str]:
    """Whether its namespaces belong to a user namespace of its own."""
    theirs, ours = (os.readlink(f"/proc/{who}/ns/user") for who in (pid, "self"))
    return [] if theirs == ours else ["-U", "--preserve-credentials"]


# --- for the tests


def why_impossible() -> str:
    """Return why there can be no cluster on this machine, or ""."""
    try:
        import ray  # noqa: F401
    except ImportError:
        return 'Ray is not installed: pip install "ray[default]"'
    if not shutil.which("unshare"):
        return "there is no unshare (package util-linux), which makes namespaces"
    tried = subprocess.run([*_unshare(), "true"], capture_output=True, text=True, check=False)
    return f"the kernel forbids namespaces ({tried.stderr.strip()})" if tried.returncode else ""


def _unshare() -> list[str]:
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def share_cluster(folder: Path, owner: int, *, sends_output: bool) -> RayCluster:
    """Return the cluster of this run of tests, started if it is not there.

    Args:
        folder: common to all processes of the run.
        owner: the process with which the cluster ends.
        sends_output: see `start_cluster`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = folder / "cluster"
        if known.exists():
            place = Path(known.read_text())
            with contextlib.suppress(OSError, RuntimeError):
                cluster = RayCluster(place)
                cluster.nodes()
                return cluster
        cluster = start_cluster(owner, sends_output=sends_output)
        known.write_text(str(cluster.folder))
        return cluster


def end_shared_cluster(folder: Path) -> None:
    """End the cluster of this run of tests, if it was started."""
    known = folder / "cluster"
    if known.exists():
        place = Path(known.read_text())
        known.unlink()
        with contextlib.suppress(OSError, RuntimeError):
            end_cluster(place, RayCluster(place).pid)


def start_cluster(
    owner: int | None = None,
    *,
    slices: Mapping[str, SliceShape] | None = None,
    variables: Mapping[str, str] | None = None,
    sends_output: bool = True,
) -> RayCluster:
    """Start a cluster that lives as long as a process does: this one, unless told otherwise.

    Args:
        owner: the id of the process.
        slices: by name; one slice of v6e-16 unless told otherwise.
        variables: what Ray's programs have in their environment besides, such as RAY_AUTH_MODE.
        sends_output: what actors print goes to their drivers; the program that does it takes a
            tenth of a processor.
    """
    # Sockets of Ray have long names, and a socket's path has at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kr-", dir=_find_place()))
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    life = os.pidfd_open(owner or os.getpid())
    shapes = {"slice-0": V6E_16} if slices is None else slices
    nodes = [shape.node(name, i) for name, shape in shapes.items() for i in range(shape.hosts)]
    (folder / "settings.json").write_text(
        json.dumps(
            {"nodes": nodes, "port": listener.getsockname()[1], "sends_output": sends_output}
        )
    )
    log = (folder / "log").open("w")
    with listener, log:
        given = str(folder), str(listener.fileno()), str(life)
        program = subprocess.Popen(
            [*_unshare(), sys.executable, ray_nodes.__file__, *given],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environ(folder, variables or {}),
            pass_fds=[listener.fileno(), life],
            start_new_session=True,
        )
    os.close(life)
    _programs[folder] = program
    ready = folder / "ready.json"
    deadline = time.monotonic() + READY_WITHIN_S
    while not ready.exists():
        if program.poll() is not None or time.monotonic() > deadline:
            said = (folder / "log").read_text()
            end_cluster(folder, program.pid)
            raise RuntimeError(f"no cluster came to be:\n{said}")
        time.sleep(0.05)
    ready.write_text(json.dumps(json.loads(ready.read_text()) | {"pid": program.pid}))
    return RayCluster(folder)


def _find_place() -> str:
    """Memory, where there is some: a busy disk takes long for many small files."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free > LEAST_BYTES and os.access(memory, os.W_OK):
            return str(memory)
    return "/tmp"


_programs: dict[Path, subprocess.Popen[bytes]] = {}
"""Kept, because one that is forgotten while it runs is a warning."""


def end_cluster(folder: Path, pid: int) -> None:
    """End a cluster now, and remove what it left."""
    children = []
    with contextlib.suppress(OSError):
        children = list(_children_of(pid))
    for each in (*children, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    if folder in _programs:
        _programs.pop(folder).wait()
    shutil.rmtree(folder, ignore_errors=True)


def _environ(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the tests' own, by which they know the processes of jobs."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        # Else each node keeps a Python ready, which is memory.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_metrics_report_interval_ms": "60000",
        # Ray runs workers, and jobs with all that they start, 15 steps below others: beside other
        # tests they would hardly run.
        "RAY_worker_niceness": "0",
        # A busy machine is slow, not dead: it may take a minute to answer. Where nobody listens any
        # more, each try fails at once; Ray's own settings make that 15 s and more.
        "RAY_health_check_timeout_ms": "60000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
    }
    return kept | own | variables
