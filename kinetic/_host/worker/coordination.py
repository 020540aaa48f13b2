"""The only door to the private interfaces of JAX that a host needs to join one world after the
other: a coordination service that runs in none of the processes, and clients that leave it.

In: an address, numbers. Out: a served world, a process that has joined it, one that has left.
Programs load this file in interpreters that may not have kinetic: it imports nothing of kinetic.

JAX's public `initialize` starts the service in process 0, whose death then aborts all others; and a
process can initialize only once. `why_unknown` says whether this JAX is one that we know; where it
is not, worlds are joined by the public interface, and each by a process of its own.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn

SERVICE = "get_distributed_runtime_service"
CLIENT = "get_distributed_runtime_client"
PARAMETERS = {
    SERVICE: ("address", "num_nodes", "heartbeat_timeout", "shutdown_timeout", "recoverable"),
    CLIENT: (
        *("address", "node_id", "init_timeout", "heartbeat_timeout", "shutdown_timeout"),
        *("shutdown_on_destruction", "use_compression"),
    ),
}
"""What we call of jaxlib, and with which parameters."""
STATE = (
    *("client", "service", "process_id", "num_processes", "coordinator_address"),
    *("preemption_sync_manager", "initialize_preemption_sync_manager"),
)
"""What we read and write of `jax._src.distributed.global_state`."""
METHODS = ("connect", "shutdown")
ORIGINAL = "_kinetic_original"
"""Attribute of what replaces a function of JAX's: that function."""
_HELD = "_kinetic_held"
_LOOK_S = 0.02
_SHUTDOWN_S = 5
_END_S = 0.5
"""How long XLA's client may take to end before the next world is entered beside it: it takes less
than a tenth of a second where there is no other load, and minutes where it hangs in Gloo."""
_ending = _thread.allocate_lock()
_CACHE_WRITE = "_cache_write"
_ALL_COMPILED = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


class CannotJoin(RuntimeError):
    """This process cannot join now. A RuntimeError, as JAX raises."""


def why_unknown() -> str:
    """Return what this process's JAX does not have of what we know; "" if it has all of it."""
    try:
        import jax.extend.backend
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax
    except (ImportError, AttributeError) as error:
        return str(error)
    for name, parameters in PARAMETERS.items():
        told = str(getattr(getattr(_jax, name, None), "__doc__", "") or "")
        missing = [each for each in parameters if f"{each}: " not in told]
        if missing:
            return f"jaxlib's {name} takes no {missing[0]}"
    for owner, names in (
        (getattr(distributed, "global_state", None), STATE),
        (getattr(_jax, "DistributedRuntimeClient", None), METHODS),
        (xla_bridge, ("backends_are_initialized",)),
        (jax.extend.backend, ("clear_backends",)),
        (jax, ("clear_caches",)),
    ):
        for name in names:
            if not hasattr(owner, name):
                return f"JAX has no {name} where it was"
    return ""


def serve(address: str, processes: int, heartbeat_s: int) -> NoReturn:
    """Serve a world for as long as this process lives."""
    from jax._src.lib import _jax

    service = getattr(_jax, SERVICE)(
        address,
        processes,
        heartbeat_timeout=heartbeat_s,
        shutdown_timeout=_SHUTDOWN_S,
        recoverable=True,  # A process that leaves, or is gone, is no error for the others.
    )
    while service is not None:
        signal.pause()
    raise AssertionError  # for the type checker


def connect(address: str, processes: int, process: int, options: Mapping[str, Any]) -> None:
    """Join the world that is served at this address, as `jax.distributed.initialize` does.

    Args:
        address: "address:port".
        processes: number of processes.
        process: index of this one.
        options: further arguments of `initialize`.

    Raises:
        CannotJoin: JAX has started its backends already, or is not one that we know.
        RuntimeError: not all have joined in time.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax

    if why := why_unknown():
        raise CannotJoin(f"This JAX cannot join a world that none of its hosts serves: {why}.")
    if xla_bridge.backends_are_initialized():
        raise CannotJoin(
            "jax.distributed.initialize() must be called before anything that starts JAX's "
            "backends: a computation, jax.devices(), jax.device_put()."
        )
    if (local := options.get("local_device_ids")) is not None:
        import jax

        chosen = str(local) if isinstance(local, int) else ",".join(map(str, local))
        jax.config.update("jax_cuda_visible_devices", chosen)
        jax.config.update("jax_rocm_visible_devices", chosen)
    state: Any = distributed.global_state
    state.coordinator_address = address
    state.process_id, state.num_processes = process, processes
    state.client = getattr(_jax, CLIENT)(
        address,
        process,
        init_timeout=options["initialization_timeout"],
        heartbeat_timeout=options["heartbeat_timeout_seconds"],
        shutdown_timeout=_SHUTDOWN_S,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    try:
        state.client.connect()
    except BaseException:
        _reset(state)
        raise
    state.initialize_preemption_sync_manager()
    if hasattr(state, "partition_index"):
        state.partition_index = options.get("partition_index", options.get("slice_index"))


def hang_up() -> None:
    """Say good-bye to the coordination service. From any thread: calls that wait for it in others,
    at a barrier or for a key, raise."""
    distributed: Any = sys.modules.get("jax._src.distributed")
    client = None if distributed is None else distributed.global_state.client
    if client is not None:
        with contextlib.suppress(Exception):  # It was shut down before, or the service is gone.
            client.shutdown()


def count_shared_arrays() -> int:
    """Return how many arrays live on that cannot be used in another world: they lie on chosen
    devices, or on those of several processes."""
    import jax

    if not has_backends():
        return 0
    return sum(array.committed for array in jax.live_arrays())


def forget_effects() -> None:
    """Forget what the effects of failed computations wait for: tokens on the devices of the world,
    which would count as its arrays, and fail again as the backends are cleared."""
    dispatch: Any = sys.modules.get("jax._src.dispatch")
    if (tokens := getattr(dispatch, "runtime_tokens", None)) is not None:
        tokens.clear()


def leave() -> None:
    """Leave the world, and forget what belongs to it: backends, devices, compiled functions, the
    mesh and the device that were set as the default."""
    distributed: Any = sys.modules.get("jax._src.distributed")
    if distributed is None:
        return
    import jax.extend.backend
    from jax._src import xla_bridge

    if hasattr(jax, "set_mesh"):
        jax.set_mesh(None)
    if isinstance(jax.config.jax_default_device, jax.Device):
        jax.config.update("jax_default_device", None)
    hang_up()
    state = distributed.global_state
    if state.preemption_sync_manager is not None:
        with contextlib.suppress(Exception):
            state.preemption_sync_manager.shutdown()
    _reset(state)
    clients = [*getattr(xla_bridge, "_backends", {}).values()]
    jax.clear_caches()
    jax.extend.backend.clear_backends()
    gc.collect()
    _end(clients)


def _end(clients: list[Any]) -> None:
    """Give up XLA's clients, and wait a moment for their threads. One may wait in Gloo for a
    connection from a host that is gone: there is nothing to shut, and Gloo gives up after minutes
    only."""
    ended = _thread.allocate_lock()
    ended.acquire()

    def end() -> None:
        with _ending:
            clients.clear()
            gc.collect()  # They are parts of cycles. It does nothing while another thread does.
        ended.release()

    _thread.start_new_thread(end, ())
    ended.acquire(timeout=_END_S)


def entrance() -> tuple[Any, str, Callable[[], Any]]:
    """Return where every call for a backend comes through, without a lock of JAX's (`initialize`
    takes the one that backends() holds): the module, the name, JAX's own function."""
    from jax._src import xla_bridge

    name = "_discover_and_register_pjrt_plugins"
    name = name if hasattr(xla_bridge, name) else "backends"
    start = getattr(xla_bridge, name)  # Replaced, if an attempt before has not used JAX.
    return xla_bridge, name, getattr(start, ORIGINAL, start)


def hold_backends() -> None:
    """Have threads that call for a backend wait for `release_backends`: those that the function has
    left would start one of this host alone, between two worlds, and the next function would
    compute with it."""
    module, name, start = entrance()
    owner = os.getpid()

    @functools.wraps(start)
    def wait() -> Any:
        while getattr(module, name) is wait:
            if os.getpid() != owner:  # Nobody releases it in a fork.
                return start()
            time.sleep(_LOOK_S)
        return getattr(module, name)()

    setattr(wait, ORIGINAL, start)
    setattr(wait, _HELD, True)
    setattr(module, name, wait)


def release_backends() -> None:
    """Let them go on, by the way that leads to the backends now."""
    module, name, start = entrance()
    if hasattr(getattr(module, name), _HELD):
        setattr(module, name, start)


def has_backends() -> bool:
    """Return whether JAX has started its backends."""
    return bool(sys.modules["jax._src.xla_bridge"].backends_are_initialized())


def keep_compiled(folder: str) -> bool:
    """Keep what this process compiles in a folder of its host's own, where the next attempts find
    it; return whether this JAX can.

    JAX's cache is made for one folder of all hosts: only process 0 writes, because programs for
    TPUs are alike. Those for processors are not: each process has keys of its own. If only process
    0 finds its programs, it waits in Gloo for the others to compile, which gives up after 30 s.
    """
    import jax
    from jax._src import compiler

    write = getattr(compiler, _CACHE_WRITE, None)
    if not isinstance(write, FunctionType) or "distributed" not in write.__code__.co_names:
        return False
    if write.__globals__ is vars(compiler):
        first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
        around = vars(compiler) | {"distributed": first}
        as_first = FunctionType(write.__code__, around, write.__name__, write.__defaults__)
        setattr(compiler, _CACHE_WRITE, as_first)
        _remove_cut_off(pathlib.Path(folder))
    for name, value in _ALL_COMPILED.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", folder)
    return True


def tell_slices(world: Any) -> None:
    """Have simulated devices tell their slice: JAX says 0 for all processors, and has no public way
    to change that. Slices of processors stay 0: `jax.make_mesh` refuses several slices, but takes
    any number of such machines."""
    if world.slices == 1 or not world.simulated or world.platform == "cpu":
        return
    from jax._src.lib import xla_client

    if world.processes > 1:
        each = world.processes // world.slices
        told = property(lambda device: device.process_index // each)
    else:
        each = world.devices // world.slices
        told = property(lambda device: device.id // each)
    xla_client.Device.slice_index = told


def _remove_cut_off(folder: pathlib.Path) -> None:
    """Remove what the process before this one was writing when it was killed: JAX would warn of it
    at each start, and never replace it."""
    from jax._src import compilation_cache

    written = [(each.stat().st_mtime_ns, each) for each in folder.glob("*-cache")]
    if written:
        _, last = max(written)
        with contextlib.suppress(Exception):
            compilation_cache.decompress_executable(last.read_bytes())
            return
        last.unlink(missing_ok=True)


def _reset(state: Any) -> None:
    state.preemption_sync_manager = state.client = state.coordinator_address = None
    state.process_id, state.num_processes = 0, 1
