"""From the name of a backend to the backend: the only place that knows which there are.

In: what the caller asked for, the accelerator, the settings. Out: a `Selection`, and the `Backend`
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kinetic._backends.base import Backend
from kinetic._config.settings import Setting, Settings, worker_environ
from kinetic._core.ref import JobRef
from kinetic._store.base import Store
from kinetic.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from kinetic._core.accelerators.topology import Topology

NAMES = ("gke", "pathways", "local", "ray")
Maker = Callable[[Store], Backend]


@dataclass(frozen=True)
class Selection:
    """Which backend takes a job.

    Attributes:
        requested: what the caller, the settings or the accelerator ask for; kept in the plan.
        name: what takes the job.
        notice: a line for the caller when one stands in for the other, or "".
    """

    requested: str
    name: str
    notice: str = ""


def check(name: str | None) -> str | None:
    """Return a valid name, or None when none is given.

    Raises:
        UsageError: there is no such backend.
    """
    if name is not None and name not in NAMES:
        raise UsageError(f"There is no backend {name!r}. Backends are: {', '.join(NAMES)}.")
    return name


def select(
    requested: str | None, topology: Topology, settings: Settings, *, slices: int = 1
) -> Selection:
    """Decide which backend takes a job. Without a cluster, the local one stands in for it.

    Raises:
        UsageError: the settings name a backend that does not exist.
        PreflightError: the backend is not built into this version.
    """
    several = topology.multi_host or slices > 1
    name = (
        check(requested)
        or check(settings.backend)
        or ("pathways" if topology.kind == "tpu" and several else "gke")
    )
    if name == "local":
        return Selection(name, name)
    if name == "ray":
        raise PreflightError(
            'This version has no Ray backend yet. Use backend="local", which simulates the slice '
            "on this machine."
        )
    if settings.cluster_settings:
        raise PreflightError(
            _no_cluster_yet(name, settings.cluster_settings, fixed=requested is not None)
        )
    return Selection(name, "local", _standing_in(topology, slices))


def make(name: str, store: Store) -> Backend:
    """Return the backend with this name, over this store.

    Raises:
        PreflightError: the backend is not built into this version.
    """
    if name in _makers:
        return _makers[name](store)
    raise PreflightError(
        f"This version has no {name!r} backend: it can run and read jobs of {', '.join(_makers)}."
    )


def backend_of(ref: JobRef, settings: Settings | None = None) -> Backend:
    """Return the backend that took a job; `settings` are for backends that need them."""
    from kinetic._store.open import open_store

    return make(ref.backend, open_store(ref.store_uri))


@contextmanager
def substituted(name: str, maker: Maker) -> Iterator[None]:
    """Let another backend answer to a name, for tests."""
    before = _makers.get(name)
    _makers[name] = maker
    try:
        yield
    finally:
        if before is None:
            del _makers[name]
        else:
            _makers[name] = before


def _local(store: Store) -> Backend:
    from kinetic._backends.local.backend import LocalBackend
    from kinetic._store.local import LocalStore

    if not isinstance(store, LocalStore):
        raise PreflightError(
            f"The local backend needs a store in a folder of this machine, not {store.uri}."
        )
    return LocalBackend(store, worker_environ())


_makers: dict[str, Maker] = {"local": _local}


def _standing_in(topology: Topology, slices: int) -> str:
    hosts = slices * topology.hosts
    unit = "device" if topology.kind == "cpu" else "chip"
    shape = f"{_counted(hosts, 'host')} x {_counted(topology.chips_per_host, unit)}"
    name = topology.name if slices == 1 else f"{slices} slices of {topology.name}"
    return f"kinetic: no cluster configured; simulating {name} ({shape}) here"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _no_cluster_yet(name: str, named: Mapping[str, Setting], *, fixed: bool) -> str:
    told = " and ".join(
        f"{setting_name} is {s.value!r} ({_origin(s)})" for setting_name, s in named.items()
    )
    instead = (
        f'write backend="local" for backend="{name}"'
        if fixed
        else 'set KINETIC_BACKEND=local (or backend="local")'
    )
    return (
        f"A cluster is configured: {told}. This version has no {name!r} backend yet, it runs jobs "
        f"on this machine only. Take the setting away, or {instead} to simulate the slice here."
    )


def _origin(setting: Setting) -> str:
    return "an argument or a flag" if setting.source == "flag" else setting.source
