"""Joins the hosts of a gang into one world of JAX, on request or when JAX's backend first starts.

Programs load this file in interpreters that may not have kinetic, so it must not need kinetic, and
must not import JAX before the program does.

JAX has no hook before its backends start. A plugin (`jax_plugins`) is called then, but its
exceptions are swallowed, and the host would run on alone; a cluster (`ClusterEnv`) is used only by
`initialize`. So this module wraps functions of JAX. A process joins only if no other process of its
host has: it locks a file in the host's folder, in which the agent also reads its progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from types import FunctionType, SimpleNamespace
from typing import Any

try:
    from kinetic._core.values import dataclass  # quicker to create
except ImportError:
    from dataclasses import dataclass

JOINING, JOINED, APART = "joining", "joined", "apart"
"""States in the host's file, each followed by the id of the process."""
MARK = "KINETIC_JAX_PROCESS"
"""Variable with the id of the process that has imported JAX. Its children are helpers and do not
join."""
ORDER = "KINETIC_PROCESS_ORDER"
"""Variable with JAX's process index of each simulated host, such as "1,0". Real slices, too, may
number processes in another order than hosts."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ORIGINAL = "_kinetic_original"
"""Attribute of a wrapper: the wrapped function of JAX."""
_CACHE_WRITE = "_cache_write"
HEARTBEAT_S = 100 if __name__ == "kinetic_joining" else 7 * 86_400
"""JAX's heartbeat timeout, in seconds. It is long in workers, whose agents notice a dead host at
once: JAX aborts healthy processes too, for example after the machine has slept. It is shorter in
programs that a function starts, because the agent may not notice the death of a shell's child."""
_BEYOND_S = 60
"""Seconds by which JAX waits longer than the leader, which names the missing host."""

_APART = """kinetic: this host joins %s, not the other hosts of its job. To join these, call \
jax.distributed.initialize() without arguments."""
_OTHER_ORDER = """kinetic: jax.process_index() is 0 on host %s, and %s on host 0. The call returns \
the value of host %s; its output: kinetic jobs logs %s --host %s"""
_log, _lock = logging.getLogger("kinetic.runner"), threading.RLock()
_held: list[int] = []  # The locked file of this process, once it has joined.


def _forget_in_fork() -> None:
    """Reset the state in a fork: a thread of the parent may have been joining."""
    global _lock
    _lock = threading.RLock()
    for fd in (_held.pop() for _ in range(len(_held))):
        with contextlib.suppress(OSError):
            os.close(fd)  # The parent keeps its lock.


os.register_at_fork(after_in_child=_forget_in_fork)


class JoinError(RuntimeError):
    """This process cannot join the gang's world, or not as requested. A RuntimeError, like the
    errors of JAX."""


@dataclass(frozen=True)
class World:
    """All processes that JAX connects (the world), as one of them sees it.

    Attributes:
        coordinator: "address:port" of JAX's coordination service.
        processes: number of processes.
        process: index of this one.
        devices: virtual devices per process when simulated, else 0.
        platform: "cpu", "gpu", "tpu", or "proxy" for devices of Pathways; with virtual devices,
            the platform that they simulate.
        simulated: the devices are virtual.
        slices: number of slices, each with the same number of processes, or of devices if there is
            one process.
        port: a free port on process 0, for programs of other frameworks.
        file: file in which the process that joins for this host records its state; "" for none.
        limit_s: seconds for which the hosts may wait for each other.
        store: the store for compiled programs; "" for none.
    """

    coordinator: str
    processes: int
    process: int
    devices: int
    platform: str
    simulated: bool
    slices: int = 1
    port: int = 0
    file: str = ""
    limit_s: float = 600.0
    store: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object whose fields are the arguments of `World`."""
        return dict(vars(self))

    @property
    def address(self) -> str:
        """Address of the leader, without a port."""
        return self.coordinator.rpartition(":")[0]


def attach(world: World, *, automatic: bool, owner: int) -> None:
    """Prepare JAX, which has just been imported, to join this world.

    Args:
        world: the world of this process.
        automatic: join when the backend first starts, unless another process of this host has
            joined.
        owner: id of the process that may join automatically; its forks may not.
    """
    _Attachment(world, automatic and world.processes > 1, owner).install()


def attach_program(text: str, owner: int) -> None:
    """Attach the world in a program that was started on a host. `text` is KINETIC_WORLD, `owner` as
    in `attach`; programs started by this program are helpers: they do not join automatically."""
    world = json.loads(text)
    automatic = world.pop("automatic") and os.environ.setdefault(MARK, str(owner)) == str(owner)
    world["store"] = world["store"] if automatic else ""
    attach(World(**world), automatic=automatic, owner=owner)


def join(world: World) -> None:
    """Join the world: from then on `jax.devices()` are all devices of the gang.

    Raises:
        JoinError: another process of this host has joined.
    """
    import jax.distributed

    _join(world, _plain_initialize(jax.distributed), {})


def _plain_initialize(module: Any) -> Callable[..., None]:
    """Return JAX's own `initialize`, even if this process or its parent has wrapped it."""
    initialize: Callable[..., None] = getattr(module.initialize, _ORIGINAL, module.initialize)
    return initialize


def complete(environ: MutableMapping[str, str], world: World, startup: str) -> None:
    """Complete an environment so that programs with it join as this process does, and reach the
    hosts without a proxy. `startup` is the folder of kinetic's sitecustomize."""
    paths = [
        path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != startup
    ]
    environ["PYTHONPATH"] = os.pathsep.join([startup, *paths])
    if uses_proxies(environ):
        pass_by_proxies(environ, [world.address])


def pass_by_proxies(environ: MutableMapping[str, str], addresses: Iterable[str]) -> None:
    """Exempt this machine and these addresses from every proxy; keep the user's exemptions."""
    direct = list(dict.fromkeys([*LOOPBACK, *addresses]))
    both = [
        entry.strip()
        for name in ("no_proxy", "NO_PROXY")
        for entry in environ.get(name, "").split(",")
    ]
    merged = (
        "*"
        if "*" in both
        else ",".join(dict.fromkeys(entry for entry in [*both, *direct] if entry))
    )
    for name in ("no_proxy", "NO_PROXY"):
        environ[name] = merged
    # gRPC reads no_grpc_proxy first, and has no "*".
    if "no_grpc_proxy" in environ or merged == "*":
        own = [entry.strip() for entry in environ.get("no_grpc_proxy", "").split(",")]
        environ["no_grpc_proxy"] = ",".join(
            dict.fromkeys(entry for entry in [*own, *direct] if entry)
        )


def uses_proxies(environ: Iterable[str]) -> bool:
    """True if one of these variables may name a proxy."""
    return any(
        name.lower().endswith("_proxy") and not name.lower().startswith("no_") for name in environ
    )


class _Attachment:
    """The wrappers with which a process joins its world when JAX is used."""

    def __init__(self, world: World, automatic: bool, owner: int) -> None:
        self._world = world
        self._automatic = automatic
        self._owner = owner
        self._devices = -1

    def install(self) -> None:
        """Wrap JAX's `initialize` and the start of its backends."""
        public: Any = sys.modules["jax.distributed"]
        from jax._src import distributed

        _tell_slices(self._world)
        public.initialize = distributed.initialize = self._wrap_initialize(
            _plain_initialize(public)
        )
        if self._world.simulated and self._world.platform != "cpu":
            self._devices = _cpu_devices()
        if self._automatic or self._devices > 0:
            module, name, start = _find_entrance()
            setattr(module, name, self._wrap(start, module, name))
        if self._world.store:
            try:
                from kinetic._host.worker import compilation_cache
            except ImportError:  # The interpreter of a program may lack kinetic.
                return
            compilation_cache.attach(self._world.store, keeps_all=self._world.simulated)

    def _wrap(self, original: Callable[[], Any], module: Any, name: str) -> Callable[[], Any]:
        @functools.wraps(original)
        def joining_first() -> Any:
            if self._is_mine():
                with _lock:
                    self._keep_devices()
                    if self._automatic:
                        self._join_unasked()
                    setattr(module, name, original)
            return original()

        setattr(joining_first, _ORIGINAL, original)
        return joining_first

    def _keep_devices(self) -> None:
        """Restore the number of virtual CPU devices if the program has changed it: on a simulated
        host each of them stands for a chip."""
        requested = _cpu_devices()
        if self._devices in (-1, requested):
            return
        configure({"jax_num_cpu_devices": self._devices})
        _log.warning(
            "jax_num_cpu_devices=%d has no effect: the number of devices of this simulated host "
            "is fixed at %d.",
            requested,
            self._devices,
        )

    def _is_mine(self) -> bool:
        """True in the worker that joins JAX for its host, not in a fork of it or a child of
        multiprocessing."""
        if os.getpid() != self._owner:
            return False
        multiprocessing = sys.modules.get("multiprocessing.process")
        return multiprocessing is None or multiprocessing.parent_process() is None

    def _join_unasked(self) -> None:
        import jax.distributed

        try:
            _join(self._world, _plain_initialize(jax.distributed), {})
        except HostTaken as error:
            _log.warning(
                "%s This process (%d) uses the devices of its host alone.", error, os.getpid()
            )

    def _wrap_initialize(self, original: Callable[..., None]) -> Callable[..., None]:
        world = self._world

        @functools.wraps(original)
        def initialize(
            coordinator_address: str | None = None,
            num_processes: int | None = None,
            process_id: int | None = None,
            local_device_ids: Any = None,
            cluster_detection_method: str | None = None,
            **rest: Any,
        ) -> None:
            from jax._src import distributed

            address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
            requested = {
                "coordinator_address": address,
                "num_processes": num_processes,
                "process_id": process_id,
            }
            differing = find_differing(world, requested)
            wrong = ", ".join(f"{name}={value!r}" for name, value in differing.items())
            if distributed.global_state.client is not None:
                if wrong:
                    raise JoinError(
                        f"This host has already joined, as process {world.process} of "
                        f"{world.processes} at {world.coordinator}, but "
                        f"jax.distributed.initialize({wrong}) asks for something else. Remove the "
                        "arguments, or set joins_jax=False to join in the function."
                    )
                _log.info("jax.distributed.initialize(): this host has already joined.")
                return
            apart = "coordinator_address" in differing or cluster_detection_method not in (
                None,
                "deactivate",
            )
            if apart or (cluster_detection_method and None in requested.values()):
                if address and self._automatic:
                    _log.warning(_APART, address)
                # Otherwise JAX_COORDINATOR_BIND_ADDRESS makes it listen at the gang's address.
                if coordinator_address:
                    rest.setdefault(
                        "coordinator_bind_address", f"[::]:{coordinator_address.rpartition(':')[2]}"
                    )
                original(
                    **requested,
                    local_device_ids=local_device_ids,
                    cluster_detection_method=cluster_detection_method,
                    **rest,
                )
                return
            if wrong:
                raise JoinError(
                    f"jax.distributed.initialize({wrong}) disagrees with the gang: this host is "
                    f"process {world.process} of {world.processes} at {world.coordinator}. Remove "
                    "the arguments, or name a coordinator of your own."
                )
            _join(world, original, {"local_device_ids": local_device_ids} | rest)

        setattr(initialize, _ORIGINAL, original)
        return initialize


class HostTaken(JoinError):
    """Another process of this host has joined the world."""


def _join(world: World, initialize: Callable[..., None], options: dict[str, Any]) -> None:
    import jax
    from jax._src import distributed

    with _lock:
        if distributed.global_state.client is not None:
            return
        if uses_proxies(os.environ):
            pass_by_proxies(os.environ, [world.address])
        configure({"jax_check_proxy_envs": False})  # JAX's warning ignores the exemptions.
        if world.simulated and world.processes > 1:
            if not jax.config.jax_cpu_collectives_implementation:
                configure({"jax_cpu_collectives_implementation": "gloo"})
            if not write_from_all_processes():
                configure({"jax_enable_compilation_cache": False})
            exchange_in_scatter()
            _number_processes(world)
        with _claim_place(world.file):
            own = {
                "cluster_detection_method": "deactivate",
                "coordinator_bind_address": world.coordinator if world.simulated else None,
                "heartbeat_timeout_seconds": HEARTBEAT_S,
                "initialization_timeout": int(world.limit_s + _BEYOND_S),
            } | options
            if world.process != 0:
                _wait_for_leader(world, own["initialization_timeout"])
            accepted = inspect.signature(initialize).parameters  # Older versions of JAX have fewer.
            own = {name: value for name, value in own.items() if name in accepted}
            initialize(world.coordinator, world.processes, world.process, **own)
            _watch_numbers(world)


def configure(options: dict[str, Any]) -> None:
    """Set options of an imported JAX, as far as its version has them."""
    import jax

    for name, value in options.items():
        with contextlib.suppress(AttributeError):
            jax.config.update(name, value)


def _cpu_devices() -> int:
    """Return JAX's option for the number of virtual CPUs; -1 if it is unset."""
    import jax

    return int(getattr(jax.config, "jax_num_cpu_devices", -1))


@contextlib.contextmanager
def _claim_place(file: str) -> Iterator[None]:
    """Lock the host's file, so that no other process of the host joins. The lock lasts until this
    process ends, or fails to join."""
    if not file:
        yield
        return
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A record lock: forks of this process do not hold it.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        by = os.pread(fd, 100, 0).decode(errors="replace").split()[1:]
        os.close(fd)
        raise HostTaken(
            f"{' '.join(['Process', *by])} of this host has already joined the other hosts, and "
            "only one process of a host can."
        ) from None
    _write(fd, JOINING)
    try:
        yield
    except BaseException:
        _write(fd, APART)
        os.close(fd)
        raise
    _write(fd, JOINED)
    _held.append(fd)


def move_place(file: str) -> None:
    """Lock the host's file of the next call, if this process has joined: the file of the last call
    was removed with its folder."""
    if _held:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write(fd, JOINED)
        os.close(_held.pop())
        _held.append(fd)


def _write(fd: int, state: str) -> None:
    with contextlib.suppress(OSError):
        os.pwrite(fd, f"{state} {os.getpid()}".ljust(40).encode(), 0)


def join_state(file: str) -> str:
    """Return the state in a host's file: JOINING, JOINED, APART, or "" if no process has tried to
    join."""
    with contextlib.suppress(OSError, ValueError):
        with open(file) as text:
            state, pid = text.read().split()
        has_ended = not os.path.exists(f"/proc/{pid}")  # noqa: PTH110
        return APART if state == JOINING and has_ended else state
    return ""


def _wait_for_leader(world: World, limit_s: float) -> None:
    """Wait until the coordination service listens. JAX's client would pause for a whole second
    between two tries."""
    port = int(world.coordinator.rpartition(":")[2])
    deadline, pause_s = time.monotonic() + limit_s, 0.002
    while time.monotonic() < deadline:
        try:
            socket.create_connection((world.address, port), timeout=1.0).close()
        except OSError:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.1)
        else:
            return


def find_differing(world: World, requested: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `initialize` that disagree with this world."""
    own = {
        "coordinator_address": world.coordinator,
        "num_processes": world.processes,
        "process_id": world.process,
    }
    return {
        name: value
        for name, value in requested.items()
        if value is not None and _to_ip(value) != own[name]
    }


def _to_ip(value: Any) -> Any:
    return value.replace("localhost", "127.0.0.1", 1) if isinstance(value, str) else value


def _find_entrance() -> tuple[Any, str, Callable[[], Any]]:
    """Return the function of JAX that every start of a backend calls: its module, its name and the
    function itself. JAX calls it without the lock of backends(), which `initialize` needs."""
    from jax._src import xla_bridge

    name = "_discover_and_register_pjrt_plugins"
    name = name if hasattr(xla_bridge, name) else "backends"
    start = getattr(xla_bridge, name)  # It may be wrapped already, in a fork.
    return xla_bridge, name, getattr(start, _ORIGINAL, start)


def write_from_all_processes() -> bool:
    """Let every process write to JAX's compilation cache; return False if this version of JAX does
    not allow it.

    JAX lets only process 0 write, because programs for TPUs are the same on all hosts. Programs for
    CPUs have different keys in each process. If the cache had only those of process 0, this process
    would wait in Gloo for the others to compile, and Gloo gives up after 30 s.
    """
    from jax._src import compiler

    write = getattr(compiler, _CACHE_WRITE, None)
    if not isinstance(write, FunctionType) or "distributed" not in write.__code__.co_names:
        return False
    if write.__globals__ is vars(compiler):
        first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
        names = vars(compiler) | {"distributed": first}
        as_first = FunctionType(write.__code__, names, write.__name__, write.__defaults__)
        setattr(compiler, _CACHE_WRITE, as_first)
    return True


def exchange_in_scatter() -> None:
    """Have `psum_scatter` on CPUs exchange the parts and add them up. Gloo's reduce-scatter, unlike
    its other collectives, gives up after 30 s, and has no option for that."""
    from jax import core, lax
    from jax._src.lax import parallel
    from jax.interpreters import mlir

    def scatter(
        x: Any, *, axis_name: Any, scatter_dimension: int, axis_size: int, **options: Any
    ) -> Any:
        at, shape = scatter_dimension, x.shape
        if options["tiled"]:
            x = x.reshape(*shape[:at], axis_size, shape[at] // axis_size, *shape[at + 1 :])
        groups = options.get("axis_index_groups")
        parts = lax.all_to_all(x, axis_name, at, at, axis_index_groups=groups)
        return parts.sum(at, dtype=x.dtype)

    def lower(context: Any, x: Any, **options: Any) -> Any:
        # Drop the mark "unreduced": JAX refuses to exchange marked values.
        aval = core.ShapedArray(context.avals_in[0].shape, context.avals_in[0].dtype)
        return rule(context.replace(avals_in=[aval]), x, **options)

    rule = mlir.lower_fun(scatter, multiple_results=False)
    for name in ("reduce_scatter_p", "unreduced_reduce_scatter_p"):
        if hasattr(parallel, name):  # Older versions of JAX have only one.
            mlir.register_lowering(getattr(parallel, name), lower, platform="cpu")


def _number_processes(world: World) -> None:
    """Make JAX give simulated processes the indices in the variable `ORDER`."""
    from jax._src import xla_bridge

    if order := os.environ.get(ORDER):
        client, index = xla_bridge.xla_client, int(order.split(",")[world.process])
        make = client.make_cpu_client
        client.make_cpu_client = lambda **options: make(**options | {"node_id": index})


def _watch_numbers(world: World) -> None:
    """Warn on host 0, once JAX's backend has started, if process 0 is on another host."""
    from jax._src import distributed, xla_bridge

    def compare(backend: Any) -> None:
        client, index = distributed.global_state.client, backend.process_index()
        if index == 0 < world.process:
            client.key_value_set(ORDER, str(world.process), allow_overwrite=True)
        elif world.process == 0 < index:
            first = client.blocking_key_value_get(ORDER, _BEYOND_S * 1000)
            _log.warning(_OTHER_ORDER, first, index, first, os.environ["KINETIC_JOB_ID"], first)

    getattr(xla_bridge, "_backend_initialization_hooks", []).append(compare)


def _tell_slices(world: World) -> None:
    """Set `slice_index` of simulated devices: JAX has 0 for all CPUs, and no public way to change
    it. With the platform "cpu" it stays 0, because `jax.make_mesh` refuses several slices of CPUs,
    but accepts any number of hosts."""
    if world.slices == 1 or not world.simulated or world.platform == "cpu":
        return
    from jax._src.lib import xla_client

    if world.processes > 1:
        per_slice = world.processes // world.slices
        slice_index = property(lambda device: device.process_index // per_slice)
    else:
        per_slice = world.devices // world.slices
        slice_index = property(lambda device: device.id // per_slice)
    xla_client.Device.slice_index = slice_index
