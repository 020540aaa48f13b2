"""A real Ray cluster on this machine: a head with its dashboard, and raylets for the hosts of
simulated TPU slices.

The cluster runs in separate network, process and mount namespaces, where the machine's address is
the loopback. All processes end when the first process of the namespaces does, even if the tests
were killed. The tests run outside. A listening socket belongs to the network in which it was
created: this module creates one outside, and the program inside (`ray_nodes`) accepts its
connections and relays them to the dashboard. Both sides share folders and the Unix sockets in them;
one of these sockets controls the nodes.

All tests of a run, in all its processes, share one cluster, which ends with the run.
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
_INHERITED = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class SliceShape:
    """The shape of a slice, as its nodes report it to Ray."""

    accelerator: str
    topology: str
    hosts: int
    chips: int = 4

    def node(self, name: str, worker: int) -> dict[str, Any]:
        """Return the settings of the node of one worker of a slice."""
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
    """An existing cluster, which the tests neither start nor end.

    Attributes:
        address: the address of its dashboard.
    """

    address: str


class RayCluster:
    """A running cluster.

    Attributes:
        address: the address of the dashboard, for programs on this machine: http://127.0.0.1:port.
        token: the token that the cluster requires.
        folder: the folder to which Ray and the cluster's program write.
    """

    def __init__(self, folder: Path) -> None:
        ready = json.loads((folder / "ready.json").read_text())
        self.folder = folder
        self.address = f"http://127.0.0.1:{ready['port']}"
        self.token = TOKEN
        self.pid = int(ready["pid"])
        """The id of the program that made the namespaces; the cluster ends with it."""

    def add_node(self, **settings: Any) -> int:
        """Start a node with the settings of `ray.cluster_utils.Cluster.add_node`; return its index,
        from 1."""
        return int(self._ask("add_node", settings))

    def add_slice(self, name: str, shape: SliceShape = V6E_16) -> list[int]:
        """Start the nodes of a slice; return their indices by worker."""
        return [self.add_node(**shape.node(name, worker)) for worker in range(shape.hosts)]

    def kill_node(self, index: int) -> None:
        """Kill only the raylet of a node, like `kill -9`. This cluster notices that after 2 s; with
        Ray's defaults it would take more than a minute."""
        self._ask("kill_node", index)

    def drain_node(self, index: int, deadline_s: int = 600) -> None:
        """Announce, like an autoscaler, that a node's machine will be preempted. Ray ends the node
        as soon as it is idle."""
        self._ask("drain_node", (index, deadline_s))

    def remove_node(self, index: int) -> None:
        """End all programs of a node for good, as if its machine were switched off."""
        self._ask("remove_node", index)

    def nodes(self) -> dict[int, bool]:
        """Return the started nodes by index: True if the raylet is alive."""
        return {int(index): alive for index, alive in self._ask("nodes", None).items()}

    def mend(self) -> None:
        """Replace killed nodes by new ones with the same settings."""
        self._ask("mend", None)

    def run_inside(self, command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the network and process namespaces of the cluster."""
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
    """Return the options of nsenter to join a process's user namespace, if it has its own."""
    theirs, ours = (os.readlink(f"/proc/{process}/ns/user") for process in (pid, "self"))
    return [] if theirs == ours else ["-U", "--preserve-credentials"]


# --- for the tests


def why_impossible() -> str:
    """Return the reason why this machine cannot run a cluster, or ""."""
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
    """Return the cluster of this run of tests; start it if needed.

    Args:
        folder: a folder that all processes of the run share.
        owner: the id of the process with which the cluster ends.
        sends_output: see `start_cluster`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        record = folder / "cluster"
        if record.exists():
            with contextlib.suppress(OSError, RuntimeError):
                cluster = RayCluster(Path(record.read_text()))
                cluster.nodes()
                return cluster
        cluster = start_cluster(owner, sends_output=sends_output)
        record.write_text(str(cluster.folder))
        return cluster


def end_shared_cluster(folder: Path) -> None:
    """End the cluster of this run of tests, if it has one."""
    record = folder / "cluster"
    if record.exists():
        cluster_folder = Path(record.read_text())
        record.unlink()
        with contextlib.suppress(OSError, RuntimeError):
            end_cluster(cluster_folder, RayCluster(cluster_folder).pid)


def start_cluster(
    owner: int | None = None,
    *,
    slices: Mapping[str, SliceShape] | None = None,
    variables: Mapping[str, str] | None = None,
    sends_output: bool = True,
) -> RayCluster:
    """Start a cluster that ends with a process.

    Args:
        owner: the id of that process; by default this one.
        slices: shapes of slices by name; by default one slice of v6e-16.
        variables: further environment variables of Ray's programs, such as RAY_AUTH_MODE.
        sends_output: send the output of actors to their drivers; takes a tenth of a processor.
    """
    # The path must be short: Ray adds long names of sockets, whose paths have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="kr-", dir=_find_base()))
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
        arguments = str(folder), str(listener.fileno()), str(life)
        program = subprocess.Popen(
            [*_unshare(), sys.executable, ray_nodes.__file__, *arguments],
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
            output = (folder / "log").read_text()
            end_cluster(folder, program.pid)
            raise RuntimeError(f"the Ray cluster did not start:\n{output}")
        time.sleep(0.05)
    ready.write_text(json.dumps(json.loads(ready.read_text()) | {"pid": program.pid}))
    return RayCluster(folder)


def _find_base() -> str:
    """Return a folder in memory if it has space: on a busy disk, many small files are slow."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free > LEAST_BYTES and os.access(memory, os.W_OK):
            return str(memory)
    return "/tmp"


_programs: dict[Path, subprocess.Popen[bytes]] = {}
"""The running programs, by folder. Python would warn if a `Popen` were freed before its end."""


def end_cluster(folder: Path, pid: int) -> None:
    """End a cluster now, and remove its folder."""
    children = []
    with contextlib.suppress(OSError):
        children = list(_children_of(pid))
    for process in (*children, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    if folder in _programs:
        _programs.pop(folder).wait()
    shutil.rmtree(folder, ignore_errors=True)


def _environ(folder: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Ray's programs, without variables that mark jobs of tests."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(folder),
        "TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        # Otherwise each node keeps an idle Python process, which takes memory.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_metrics_report_interval_ms": "60000",
        # The default niceness of 15 would let workers and jobs starve next to other tests.
        "RAY_worker_niceness": "0",
        # A busy machine may take a minute to answer. If nothing listens any more, each attempt
        # fails at once, so a death is noticed in 2 s; with Ray's defaults that takes at least 15 s.
        "RAY_health_check_timeout_ms": "60000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
    }
    return inherited | own | variables
