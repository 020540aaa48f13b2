"""JAX on a host: its preloading before forks, the variables that describe the world to it, joining
(see `joining`) and leaving the world."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kinetic._core.plan import PROXY
from kinetic._host.worker import joining, metric_sender
from kinetic._host.worker.joining import World
from kinetic._host.worker.start import ElasticSlices
from kinetic._host.worker.startup.kinetic_awaiting import Awaiting
from kinetic._system import machine, processes

STARTUP = str(Path(__file__).parent / "startup")
"""Folder that is first on the PYTHONPATH of every program that a function starts."""
_THREADS_PER_DEVICE = 4
"""Threads of XLA for each device. Two are enough for a loop in one thread; callbacks, and other
threads that start computations, may occupy more."""
GPU_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
"""Device files of GPUs. Without any of them JAX silently skips its client for GPUs."""
_WITHOUT_EFFECT = ("xla_dump", "xla_force_host", "xla_gpu_cuda_data_dir")
"""Beginnings of XLA's flags that do not change programs; see `jax._src.cache_key`."""
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
    """Return the environment of a function or program, with variables that describe the world to
    JAX and other frameworks.

    Args:
        world: the world of this host.
        base: variables to start from.
        requested: the user's variables, which override the others.
        automatic: programs that the function starts join when they first use JAX.
    """
    # JAX sets this too, but unpickling may import jaxlib earlier, which would log its devices.
    env = {"TF_CPP_MIN_LOG_LEVEL": "1", **base} | {
        "JAX_PLATFORMS": _platforms(world),
        "KERAS_BACKEND": "jax",
    }
    env["JAX_ENABLE_PREEMPTION_SERVICE"] = (
        "0"  # The service would swallow the SIGTERM that is meant for the function.
    )
    if world.simulated or world.platform == "cpu":  # cpu:4 has four devices on a cluster, too.
        env["JAX_NUM_CPU_DEVICES"] = str(world.devices)
        env["NPROC"] = str(_count_threads(world.devices, machine.cores()))
    if world.processes > 1:
        env |= {
            "JAX_COORDINATOR_ADDRESS": world.coordinator,
            "JAX_NUM_PROCESSES": str(world.processes),
            "JAX_PROCESS_ID": str(world.process),
        }
        if world.simulated:
            # By default the coordination service listens on every interface of the machine.
            env["JAX_COORDINATOR_BIND_ADDRESS"] = world.coordinator
            env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    if world.platform == PROXY:  # Give its machines as much time to start as hosts get.
        env["PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"] = str(math.ceil(world.limit_s))
    return (
        env
        | _torch_variables(world)
        | dict(requested)
        | {"KINETIC_WORLD": json.dumps(world.to_json() | {"automatic": automatic})}
    )


def _platforms(world: World) -> str:
    """Return the clients that JAX starts, the default first: "tpu,cpu", "cuda,cpu", "proxy,cpu" or
    "cpu".

    Callbacks (`jax.debug.print`, `pure_callback`) and `keras.distribution` need the CPU in addition
    to an accelerator. JAX takes "gpu" as "cuda,rocm,oneapi", and would require all three. Virtual
    devices belong to the CPU client, unless they stand in for Pathways'.
    """
    if world.platform == "cpu" or (world.simulated and world.platform != PROXY):
        return "cpu"
    return f"{'cuda' if world.platform == 'gpu' else world.platform},cpu"


def _count_threads(devices: int, cores: int) -> int:
    """Return the number of threads for XLA's CPU client, which reads it from NPROC; its default is
    one for each core or device.

    Once 32 computations on all devices are in flight, starting another one blocks one thread per
    device, and a collective occupies another. With one thread per device, a loop that never waits
    for a result would soon block forever.
    """
    return max(cores, _THREADS_PER_DEVICE * devices)


def _torch_variables(world: World) -> dict[str, str]:
    """Return the variables of torch.distributed (`env://`), of hosts in torchrun and Lightning, and
    torchrun's defaults (PET_*). Leave out TORCHELASTIC_*, with which torch would expect torchrun's
    store, and NNODES, which programs that start torchrun take as a request."""
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


def compiler_flags(options: Iterable[tuple[str, Any]] = ()) -> tuple[str, ...]:
    """Return the flags of XLA and of the TPU compiler, in order, and a program's own options,
    without those that only print."""
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
    flags = " ".join(os.environ.get(name, "") for name in names).split()
    own = (f"{name}={value}" for name, value in options)
    return tuple(
        flag
        for flag in (*sorted(flags), *own)
        if not flag.removeprefix("--").startswith(_WITHOUT_EFFECT)
    )


def is_installed() -> bool:
    """True if JAX can be imported."""
    return importlib.util.find_spec("jax") is not None


def preload(modules: tuple[str, ...]) -> None:
    """Import modules for workers, and parts of JAX if they import it. Does not itself start a
    backend or a thread (see `is_fork_safe`)."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    if "jax" in sys.modules:
        import jax.experimental.multihost_utils
        import jax.extend.backend
        import jax.numpy  # noqa: F401


def is_fork_safe() -> bool:
    """True if a fork of this process would have a working JAX: no backend has been started, and
    the process has one thread."""
    if "jax" in sys.modules:
        from jax._src import xla_bridge  # All public calls would start a backend.

        if xla_bridge.backends_are_initialized():
            return False
    return processes.threads(os.getpid()) <= 1


def enter(world: World, joins: bool | str, slices: ElasticSlices | None = None) -> None:
    """Have this worker join the world.

    Args:
        world: the world of this host.
        joins: True to join now, "lazy" to join when JAX is first used; otherwise the function or
            its program joins.
        slices: slices that the process may lose and live on, or None.
    """
    joining.complete(os.environ, world, STARTUP)
    if _platforms(world).startswith("cuda") and not any(Path(file).exists() for file in GPU_FILES):
        print(  # noqa: T201
            "kinetic: this host has no NVIDIA GPU, so JAX will compute on its processor.",
            file=sys.stderr,
        )
    if "jax" in sys.modules:  # It has not read the new environment.
        options = {"jax_enable_preemption_service": False, "jax_platforms": _platforms(world)}
        joining.configure(options)
        if world.simulated:
            joining.configure({"jax_num_cpu_devices": world.devices})

    owner = os.getpid()  # A fork that imports JAX first does not join.

    def attach() -> None:
        joining.attach(world, automatic=joins == "lazy", owner=owner)
        metric_sender.watch_compiles()

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


def enter_again(world: World) -> None:
    """Enter the world in which this process has run a call already."""
    joining.complete(os.environ, world, STARTUP)
    joining.move_place(world.file)


def set_options(options: Mapping[str, Any]) -> list[str]:
    """Set the caller's options of JAX; return the names that this host's JAX does not accept."""
    if not options or not is_installed():
        return list(options)
    import jax

    refused = []
    for name, value in options.items():
        try:
            jax.config.update(name, value)
        except (AttributeError, TypeError, ValueError):  # The host has another version of JAX.
            refused.append(name)
    return refused


def leave() -> None:
    """Leave the world together with all other hosts. A barrier: call it only when every host has
    returned."""
    if "jax" in sys.modules:
        import jax

        jax.distributed.shutdown()


def await_computations() -> None:
    """Wait for the computations that a failed call has launched. If one waits for a host that will
    never launch its part, this never returns, and the agent ends the process."""
    bridge, jax = sys.modules.get("jax._src.xla_bridge"), sys.modules.get("jax")
    if jax is None or bridge is None or not bridge.backends_are_initialized():
        return
    for array in jax.live_arrays():
        with contextlib.suppress(Exception):
            array.block_until_ready()


def process_index(world: World) -> int:
    """Return this host's index among the processes of JAX; the host's own index if JAX has not
    joined, or its backends have not started."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    if world.processes == 1 or bridge is None or not bridge.backends_are_initialized():
        return world.process
    is_joined = bridge.process_count() == world.processes
    return int(bridge.process_index()) if is_joined else world.process


def is_consequence(error: BaseException) -> bool:
    """True if an exception, or a cause of it, is a collective that broke because a peer died."""
    visited: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in visited:
        visited.add(id(at))
        # Errors while a computation is launched, a small one for example, are raised by jaxlib as a
        # plain ValueError with XLA's text.
        is_text = type(at) is ValueError and str(at).startswith(_STATUS)
        is_of_jax = is_text or type(at).__name__ in _CONSEQUENCE_TYPES
        if is_of_jax and any(word in str(at).lower() for word in _CONSEQUENCE_WORDS):
            return True
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return False
