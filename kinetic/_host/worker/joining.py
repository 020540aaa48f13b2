"""How one process joins the hosts of its gang into one world of JAX: when it asks, or when JAX's
backend first starts.

In: this process's rank (`World`). Out: an initialized `jax.distributed`; an `initialize` that needs
no arguments. Programs load this file in interpreters that may not have kinetic: it imports nothing
of kinetic, and does not import JAX before the program does.

JAX has no hook before its backends start: a plugin (`jax_plugins`) is called then, but what it
raises is swallowed, and the host would run on alone; a cluster (`ClusterEnv`) is asked only by
`initialize`. Hence the wrappers. A process joins only if no other process of its host has: it holds
a lock on a file in the host's folder, which also tells the agent how far it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import inspect
import json
import logging
import os
import pathlib
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
"""What the file says, followed by the id of the process."""
MARK = "KINETIC_JAX_PROCESS"
"""Variable: the process that has imported JAX. Its children are helpers, not the host's
program."""
ORDER = "KINETIC_PROCESS_ORDER"
"""Variable: the indices that JAX gives simulated hosts, as "1,0". A real slice numbers its hosts by
their places in it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ORIGINAL = "_kinetic_original"
"""Attribute of what replaces a function of JAX's: that function."""
_CACHE_WRITE = "_cache_write"
_ALL_COMPILED = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
HEARTBEAT_S = 100 if __name__ == "kinetic_joining" else 7 * 86_400
"""Slow on purpose: agents notice a dead host in milliseconds and end the gang; JAX would abort
healthy processes, and counts the time that a machine sleeps. Not so in a program: it may be a child
of what its agent watches, a shell for example, and die alone."""
_BEYOND_S = 60
"""How long after the gang JAX gives up: the gang can say which host was missing."""

_APART = """kinetic: this host joins %s now, not the other hosts of its job. To join these, call \
jax.distributed.initialize() without arguments."""
_OTHER_ORDER = """kinetic: jax.process_index() is 0 on host %s, and %s on host 0. The call returns \
the value of host %s; its output: kinetic jobs logs %s --host %s"""
_log, _lock = logging.getLogger("kinetic.runner"), threading.RLock()
_held: list[int] = []  # The place of this process, for as long as it has joined.


def _forget_in_fork() -> None:
    """A thread of the parent's may have been joining; who of its forks asks to join is refused."""
    global _lock
    _lock = threading.RLock()
    for fd in (_held.pop() for _ in range(len(_held))):
        with contextlib.suppress(OSError):
            os.close(fd)  # The lock is the parent's, and stays.


os.register_at_fork(after_in_child=_forget_in_fork)


class JoinError(RuntimeError):
    """This process cannot join the gang's world, or not as requested. A RuntimeError, as JAX
    raises."""


@dataclass(frozen=True)
class World:
    """The place of a process among the processes of JAX.

    Attributes:
        coordinator: "address:port" of JAX's coordination service.
        processes: number of processes.
        process: index of this one.
        devices: virtual devices per process when simulated, else 0.
        platform: "cpu", "gpu", "tpu", or "proxy" for devices of Pathways; the simulated one if
            there is one.
        simulated: whether the devices are virtual.
        slices: number of slices, with equally many processes each, or devices if there is one
            process.
        port: free on process 0, for programs of other frameworks.
        file: where the process that joins for this host records its state; "" for nowhere.
        limit_s: how long the hosts may wait for each other.
        compiled: folder of simulated devices' programs, for this host's next attempts; "" for none.
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
    compiled: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; `World(**it)` is equal."""
        return dict(vars(self))

    @property
    def address(self) -> str:
        """The leader's address."""
        return self.coordinator.rpartition(":")[0]


def attach(world: World, *, automatic: bool, owner: int) -> None:
    """Attach this world to JAX, which has just been imported.

    Args:
        world: the place of this process.
        automatic: join when the backend first starts, unless another process of this host has
            joined.
        owner: the process that may do so; this one may be a fork of it.
    """
    _WorldPlace(world, automatic and world.processes > 1, owner).take()


def attach_program(text: str, owner: int) -> None:
    """The same in a program started on a host, which may start its own helpers; `text`
    is the value of KINETIC_WORLD."""
    world = json.loads(text)
    automatic = world.pop("automatic") and os.environ.setdefault(MARK, str(owner)) == str(owner)
    attach(World(**world), automatic=automatic, owner=owner)


def join(world: World) -> None:
    """Join now: afterwards `jax.devices()` are all devices of the gang.

    Raises:
        JoinError: another process of this host has joined.
    """
    import jax.distributed

    _join(world, _plain_initialize(jax.distributed), {})


def _plain_initialize(module: Any) -> Callable[..., None]:
    """JAX's own `initialize`, even if this process, or the one that it was forked from, has
    replaced it."""
    initialize: Callable[..., None] = getattr(module.initialize, _ORIGINAL, module.initialize)
    return initialize


def complete(environ: MutableMapping[str, str], world: World, startup: str) -> None:
    """Let programs that inherit this environment join as this process does, and bypass every
    proxy to the hosts."""
    paths = [
        path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != startup
    ]
    environ["PYTHONPATH"] = os.pathsep.join([startup, *paths])
    if uses_proxies(environ):
        pass_by_proxies(environ, [world.address])


def pass_by_proxies(environ: MutableMapping[str, str], addresses: Iterable[str]) -> None:
    """Exempt this machine and these addresses from every proxy, in addition to the user's
    exemptions."""
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
    if "no_grpc_proxy" in environ or merged == "*":  # gRPC reads it first, and knows no "*".
        own = [entry.strip() for entry in environ.get("no_grpc_proxy", "").split(",")]
        environ["no_grpc_proxy"] = ",".join(
            dict.fromkeys(entry for entry in [*own, *direct] if entry)
        )


def uses_proxies(environ: Iterable[str]) -> bool:
    """Whether variables of these names may name a proxy."""
    return any(
        name.lower().endswith("_proxy") and not name.lower().startswith("no_") for name in environ
    )


class _WorldPlace:
    """This process's place in the world, and its wrappers in JAX."""

    def __init__(self, world: World, automatic: bool, owner: int) -> None:
        self._world = world
        self._automatic = automatic
        self._owner = owner
        self._devices = -1

    def take(self) -> None:
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
        """Many programs first request virtual CPUs, which has no effect on a host with chips, nor
        on one where chips are simulated."""
        requested = _cpu_devices()
        if self._devices in (-1, requested):
            return
        configure({"jax_num_cpu_devices": self._devices})
        _log.warning(
            "jax_num_cpu_devices=%d changes nothing here: this host of the simulated slice has "
            "%d devices.",
            requested,
            self._devices,
        )

    def _is_mine(self) -> bool:
        """Whether this is the original process: not a fork of it, and not one that
        multiprocessing has started."""
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
                        f"This host has joined already, as process {world.process} of "
                        f"{world.processes} at {world.coordinator}; "
                        f"jax.distributed.initialize({wrong}) asks for something else. Leave the "
                        "arguments out, or say joins_jax=False to join by yourself."
                    )
                _log.info("jax.distributed.initialize(): this host has joined already.")
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
                    f"process {world.process} of {world.processes} at {world.coordinator}. Leave "
                    "the arguments out, or name a coordinator of your own."
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
        configure({"jax_check_proxy_envs": False})  # It would warn of what was just fixed.
        if world.simulated and world.processes > 1:
            if not jax.config.jax_cpu_collectives_implementation:
                configure({"jax_cpu_collectives_implementation": "gloo"})
            if not (world.compiled and keep_compiled(world.compiled)):
                configure({"jax_enable_compilation_cache": False})  # see `keep_compiled`
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
            accepted = inspect.signature(initialize).parameters  # Older versions have fewer.
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
    """Virtual devices of this process by its configuration; -1 if that is left to JAX."""
    import jax

    return int(getattr(jax.config, "jax_num_cpu_devices", -1))


@contextlib.contextmanager
def _claim_place(file: str) -> Iterator[None]:
    """Hold this host's place; it is free again once this process has ended, or could not join."""
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
            f"{' '.join(['Process', *by])} of this host has joined the others already, and only "
            "one can."
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


def _write(fd: int, state: str) -> None:
    with contextlib.suppress(OSError):
        os.pwrite(fd, f"{state} {os.getpid()}".ljust(40).encode(), 0)


def join_state(file: str) -> str:
    """How far this host is: JOINING, JOINED, APART, or "" while no process has tried."""
    with contextlib.suppress(OSError, ValueError):
        with open(file) as text:
            state, pid = text.read().split()
        has_ended = not os.path.exists(f"/proc/{pid}")  # noqa: PTH110
        return APART if state == JOINING and has_ended else state
    return ""


def _wait_for_leader(world: World, limit_s: float) -> None:
    """Wait until the coordination service listens: a client that is too early pauses for a whole
    second before it tries again."""
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
    """Return where every call for a backend comes through, without a lock of JAX's (`initialize`
    takes the one that backends() holds): the module, the name, JAX's own function."""
    from jax._src import xla_bridge

    name = "_discover_and_register_pjrt_plugins"
    name = name if hasattr(xla_bridge, name) else "backends"
    start = getattr(xla_bridge, name)  # Replaced already in a fork of a process that did so.
    return xla_bridge, name, getattr(start, _ORIGINAL, start)


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
        names = vars(compiler) | {"distributed": first}
        as_first = FunctionType(write.__code__, names, write.__name__, write.__defaults__)
        setattr(compiler, _CACHE_WRITE, as_first)
        _remove_cut_off(pathlib.Path(folder))
    for name, value in _ALL_COMPILED.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", folder)
    return True


def exchange_in_scatter() -> None:
    """Have `psum_scatter` between processors exchange the parts and add them up. Of Gloo's
    collectives, its reduce-scatter alone gives up after 30 s, and has no option for that."""
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
        # Without its marks: an exchange of what is marked as unreduced is refused.
        aval = core.ShapedArray(context.avals_in[0].shape, context.avals_in[0].dtype)
        return rule(context.replace(avals_in=[aval]), x, **options)

    rule = mlir.lower_fun(scatter, multiple_results=False)
    for name in ("reduce_scatter_p", "unreduced_reduce_scatter_p"):
        if hasattr(parallel, name):  # Older versions have one.
            mlir.register_lowering(getattr(parallel, name), lower, platform="cpu")


def _number_processes(world: World) -> None:
    """Have JAX number simulated processes as a variable says."""
    from jax._src import xla_bridge

    if order := os.environ.get(ORDER):
        client, index = xla_bridge.xla_client, int(order.split(",")[world.process])
        make = client.make_cpu_client
        client.make_cpu_client = lambda **options: make(**options | {"node_id": index})


def _watch_numbers(world: World) -> None:
    """Say on host 0, once JAX's backend has started, if process 0 is on another host."""
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
    """Have simulated devices tell their slice: JAX says 0 for all processors, and has no public way
    to change that. Slices of processors stay 0: `jax.make_mesh` refuses several slices, but takes
    any number of such machines."""
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
