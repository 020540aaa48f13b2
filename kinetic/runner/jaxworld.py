"""The door to JAX: joining the hosts of a gang into one world, before the function starts.

In: the shape of the world. Out: an initialised `jax.distributed`, or variables for a process that will do it itself. Called
by the worker and the preloader; nothing else on a host imports JAX.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

_HEARTBEAT_S = 100
_LEADER_S = 300.0
_CONSEQUENCE_TYPES = ("JaxRuntimeError", "XlaRuntimeError")
_CONSEQUENCE_WORDS = (
    "gloo",
    "connection closed",
    "connection reset",
    "connect timeout",
    "socket closed",
    "coordination",
    "heartbeat",
    "deadline_exceeded",
    "unavailable:",
    "cancelled:",
    "barrier",
    "another task died",
    "peer",
)


@dataclass(frozen=True)
class World:
    """Where a process stands among the processes of JAX.

    Attributes:
        coordinator: "address:port" of JAX's coordination service, hosted by process 0.
        processes: number of processes.
        process: index of this one.
        devices: virtual devices per process when simulated, else 0.
        platform: "cpu", "gpu" or "tpu"; always "cpu" when simulated.
        simulated: whether the devices are virtual.
    """

    coordinator: str
    processes: int
    process: int
    devices: int
    platform: str
    simulated: bool

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; `World(**it)` is equal."""
        return dict(vars(self))

    def environ(self) -> dict[str, str]:
        """Variables that tell JAX, and people, about the world; they must be set before JAX is imported."""
        env = {"JAX_PLATFORMS": "cpu" if self.simulated else self.platform, "KERAS_BACKEND": "jax"}
        if self.simulated:
            env |= {"JAX_NUM_CPU_DEVICES": str(self.devices), "JAX_ENABLE_PREEMPTION_SERVICE": "0"}
        if self.processes > 1:
            env |= {
                "JAX_COORDINATOR_ADDRESS": self.coordinator,
                "JAX_NUM_PROCESSES": str(self.processes),
                "JAX_PROCESS_ID": str(self.process),
                "JAX_CHECK_PROXY_ENVS": "0",
            }
            if self.simulated:
                # Without it the coordination service listens on every interface of the machine.
                env["JAX_COORDINATOR_BIND_ADDRESS"] = self.coordinator
                env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        return env


def is_installed() -> bool:
    """Whether JAX can be imported here."""
    return importlib.util.find_spec("jax") is not None


def preload(modules: tuple[str, ...]) -> None:
    """Import modules that workers will need, without starting a backend or a thread (see `is_fork_safe`)."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if "jax" in sys.modules:
        import jax.experimental.multihost_utils
        import jax.numpy  # noqa: F401


def is_fork_safe() -> bool:
    """Whether a fork of this process gets a JAX that still works: no backend has been started and one thread runs."""
    if "jax" in sys.modules:
        from jax._src import xla_bridge  # There is no public call that asks without starting one.

        if xla_bridge.backends_are_initialized():
            return False
    return not os.path.isdir("/proc/self/task") or len(os.listdir("/proc/self/task")) == 1


def join(world: World) -> None:
    """Join this process to the world: afterwards `jax.devices()` are all devices of the gang.

    JAX's own heartbeat is left slow on purpose: the agents notice a dead host in milliseconds and end the gang; JAX would
    abort healthy processes.
    """
    import jax

    _configure(world)
    if world.processes > 1 and not jax.distributed.is_initialized():
        if world.process != 0:
            _wait_for_leader(world.coordinator)
        jax.distributed.initialize(
            world.coordinator,
            world.processes,
            world.process,
            cluster_detection_method="deactivate",
            coordinator_bind_address=world.coordinator if world.simulated else None,
            heartbeat_timeout_seconds=_HEARTBEAT_S,
        )


def _wait_for_leader(coordinator: str) -> None:
    """Wait until the coordination service listens: a client that comes first pauses a whole second before it tries again."""
    address, _, port = coordinator.rpartition(":")
    deadline, pause_s = time.monotonic() + _LEADER_S, 0.002
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, int(port)), timeout=1.0).close()
        except OSError:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.1)
        else:
            return


def configure_preloaded(world: World) -> None:
    """Tell an already imported JAX what `World.environ` would have told it at import."""
    if "jax" in sys.modules:
        _configure(world)


def _configure(world: World) -> None:
    import jax

    if world.simulated:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", world.devices)
        # JAX's notifier would swallow SIGTERM; the function shall get it.
        jax.config.update("jax_enable_preemption_service", False)
        jax.config.update("jax_check_proxy_envs", False)
        if world.processes > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")


def leave(world: World) -> None:
    """Leave the world, together with all others: a barrier, so call it only when every host is well."""
    if world.processes > 1 and "jax" in sys.modules:
        import jax

        jax.distributed.shutdown()


def is_consequence(error: BaseException) -> bool:
    """Whether an exception looks like the echo of a peer's death: a collective that broke, here or in its causes."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        if type(at).__name__ in _CONSEQUENCE_TYPES and any(word in str(at).lower() for word in _CONSEQUENCE_WORDS):
            return True
        at = at.__cause__ or at.__context__
    return False
