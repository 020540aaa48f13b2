"""JAX on a host: what is imported ahead, the variables that describe the world, when it joins.

In: the shape of the world. Out: variables, a JAX that can join (see `joining`), the end of it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kinetic._core.plan import PROXY
from kinetic._host.worker import joining
from kinetic._host.worker.joining import World
from kinetic._host.worker.start import ElasticSlices
from kinetic._host.worker.startup.kinetic_awaiting import Awaiting
from kinetic._system import machine, processes

STARTUP = str(Path(__file__).parent / "startup")
"""First on the PYTHONPATH of every program that a function starts."""
_THREADS_PER_DEVICE = 4
"""Two are enough for a loop in one thread; launches in other threads and callbacks may occupy
more."""
GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Without any of them JAX passes over its client for GPUs without a word."""
_CONSEQUENCE_TYPES = ("JaxRuntimeError", "XlaRuntimeError")
_STATUS = tuple(
    f"{code}: "
    for code in ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED")
)
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


def environ(
    world: World, base: Mapping[str, str], requested: Mapping[str, str], *, automatic: bool
) -> dict[str, str]:
    """The environment of a function or program, with variables that describe the world to JAX and
    other frameworks.

    Args:
        world: the host's place in it.
        base: variables to start from.
        asked: variables that override these.
        automatic: whether programs that the function starts join when they first use JAX.
    """
    # JAX sets it, too; but what is unpickled may name jaxlib first, which logs what devices it has.
    env = {"TF_CPP_MIN_LOG_LEVEL": "1", **base} | {
        "JAX_PLATFORMS": _platforms(world),
        "KERAS_BACKEND": "jax",
    }
    env["JAX_ENABLE_PREEMPTION_SERVICE"] = (
        "0"  # It would swallow the SIGTERM that the function should see.
    )
    if world.simulated or world.platform == "cpu":  # cpu:4 has four devices also on a cluster
        env["JAX_NUM_CPU_DEVICES"] = str(world.devices)
        env["NPROC"] = str(_threads(world.devices, machine.cores()))
    if world.processes > 1:
        env |= {
            "JAX_COORDINATOR_ADDRESS": world.coordinator,
            "JAX_NUM_PROCESSES": str(world.processes),
            "JAX_PROCESS_ID": str(world.process),
        }
        if world.simulated:
            # Without it the coordination service listens on every interface of the machine.
            env["JAX_COORDINATOR_BIND_ADDRESS"] = world.coordinator
            env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    if world.platform == PROXY:  # Its machines may take as long to start as hosts may.
        env["PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"] = str(math.ceil(world.limit_s))
    return (
        env
        | _for_torch(world)
        | dict(requested)
        | {"KINETIC_WORLD": json.dumps(world.to_json() | {"automatic": automatic})}
    )


def _platforms(world: World) -> str:
    """The clients that JAX starts, the default first: "tpu,cpu", "cuda,cpu", "proxy,cpu" or "cpu".

    Callbacks (`jax.debug.print`, `pure_callback`) and `keras.distribution` need a processor beside
    an accelerator. "gpu" stands for "cuda,rocm,oneapi", of which JAX would demand all. Virtual
    devices are a processor's, unless they take the place of Pathways'.
    """
    if world.platform == "cpu" or (world.simulated and world.platform != PROXY):
        return "cpu"
    return f"{'cuda' if world.platform == 'gpu' else world.platform},cpu"


def _threads(devices: int, cores: int) -> int:
    """How many threads XLA's CPU client gets; it reads NPROC, and without it takes one for each
    core or device.

    A launch on all devices occupies a thread for each while 32 others are in flight, and a
    collective occupies another one. With one thread for each device, a loop that never waits for a
    result soon stands still forever: its launches occupy all threads.
    """
    return max(cores, _THREADS_PER_DEVICE * devices)


def _for_torch(world: World) -> dict[str, str]:
    """What torch.distributed reads (`env://`), what torchrun and Lightning call a host, and
    torchrun's defaults (PET_*). Not TORCHELASTIC_*: with it torch looks for torchrun's store. Not
    NNODES: programs that start torchrun themselves take it as a request."""
    rank, size, port = str(world.process), str(world.processes), str(world.port)
    env = {"MASTER_ADDR": world.address, "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": size}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"NODE_RANK": rank, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": size}
    if world.processes > 1:
        env |= {
            "PET_MASTER_ADDR": world.address,
            "PET_MASTER_PORT": port,
            "PET_NODE_RANK": rank,
            "PET_NNODES": size,
        }
        if world.simulated:
            env |= {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    return env


def is_installed() -> bool:
    """Whether JAX can be imported here."""
    return importlib.util.find_spec("jax") is not None


def preload(modules: tuple[str, ...]) -> None:
    """Import modules that workers will need, without starting a backend or a thread (see
    `is_fork_safe`)."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if "jax" in sys.modules:
        import jax.experimental.multihost_utils
        import jax.extend.backend
        import jax.numpy  # noqa: F401


def is_fork_safe() -> bool:
    """Whether a fork of this process gets a JAX that still works: no backend has been started and
    one thread runs."""
    if "jax" in sys.modules:
        from jax._src import xla_bridge  # No public call can tell without starting one.

        if xla_bridge.backends_are_initialized():
            return False
    return processes.threads(os.getpid()) <= 1


def enter(world: World, joins: bool | str, slices: ElasticSlices | None = None) -> None:
    """Have this worker join the world: now (True), when JAX is first used ("lazy"), or when the
    function asks. `slices` are those that may be lost while it lives on."""
    joining.complete(os.environ, world, STARTUP)
    if _platforms(world).startswith("cuda") and not any(Path(file).exists() for file in GPU_FILES):
        print(  # noqa: T201
            "kinetic: this host has no NVIDIA GPU, so JAX will compute on its processor.",
            file=sys.stderr,
        )
    if "jax" in sys.modules:
        _configure(world)
    attach = functools.partial(joining.attach, world, automatic=joins == "lazy", owner=os.getpid())
    if "jax.distributed" in sys.modules:
        attach()
    else:
        sys.meta_path.insert(0, Awaiting("jax.distributed", attach))
    if world.platform == PROXY and joins != "program":
        from kinetic._host.worker import proxy

        if proxy.register(world, slices) and joins is not False:
            proxy.await_devices(world, is_elastic=slices is not None)
        return
    if joins is not True or world.processes == 1:
        return
    if is_installed():
        joining.join(world)
    elif world.process == 0:
        print(  # noqa: T201
            "kinetic: JAX is not installed, so the hosts are not joined: pip install jax.",
            file=sys.stderr,
        )


def set_options(options: Mapping[str, Any]) -> list[str]:
    """Set the caller's options of JAX; return those that this host's JAX does not accept."""
    if not options or not is_installed():
        return list(options)
    import jax

    refused = []
    for name, value in options.items():
        try:
            jax.config.update(name, value)
        except (AttributeError, TypeError, ValueError):  # Another version.
            refused.append(name)
    return refused


def _configure(world: World) -> None:
    """Set what an already imported JAX would have read from the environment."""
    joining.configure({"jax_enable_preemption_service": False})
    if world.simulated:
        platforms = _platforms(world)
        joining.configure({"jax_platforms": platforms, "jax_num_cpu_devices": world.devices})


def leave() -> None:
    """Leave the world together with all other hosts. A barrier, so call it only when every host has
    returned."""
    if "jax" in sys.modules:
        import jax

        jax.distributed.shutdown()


def process_index(world: World) -> int:
    """This host's index among the processes of JAX. Until its backends have started, and where JAX
    has not joined, it is the host's own."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if world.processes == 1 or bridge is None or not bridge.backends_are_initialized():
        return world.process
    is_joined = bridge.process_count() == world.processes
    return int(bridge.process_index()) if is_joined else world.process


def is_consequence(error: BaseException) -> bool:
    """Whether an exception, or a cause of it, is a collective that broke because a peer died."""
    visited: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in visited:
        visited.add(id(at))
        # What breaks while a computation is launched, a small one for example, jaxlib raises as a
        # plain ValueError with the text of XLA.
        is_text = type(at) is ValueError and str(at).startswith(_STATUS)
        is_of_jax = is_text or type(at).__name__ in _CONSEQUENCE_TYPES
        if is_of_jax and any(word in str(at).lower() for word in _CONSEQUENCE_WORDS):
            return True
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False
