"""Find the backend that runs the jobs of a place. Only this module knows all backends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kinetic._backends.base import Backend
from kinetic._core.place import JOB, JOBSET, Place
from kinetic._core.ref import JobRef
from kinetic._store.base import Store
from kinetic.errors import PreflightError, UsageError

if TYPE_CHECKING:
    from kinetic._config.settings import Settings
    from kinetic._core.accelerators.topology import Topology
    from kinetic._core.options import Options

Maker = Callable[[Place, Store], Backend]
_WITHOUT_CLUSTER = ("local", "ray")


def select(
    options: Options, settings: Settings, *, system: str = sys.platform
) -> tuple[Place, str]:
    """Decide where a job goes; return the place and a notice for the user, or "".

    If no cluster is configured, the local backend simulates it, and the notice says so. The local
    backend later refuses the job if this machine cannot simulate slices.

    Args:
        options: the options of the call.
        settings: the caller's settings, including those of the cluster.
        system: the operating system of this machine, as in `sys.platform`.

    Raises:
        UsageError: the settings name a backend that does not exist.
        PreflightError: the backend is not built into this version.
    """
    from kinetic._backends.local import simulation  # not needed for lists of jobs
    from kinetic._core import checks

    topology, slices = options.topology, options.most_slices
    single = options.controller == "single"
    several = topology.multi_host or slices > 1 or single
    name = (
        options.backend
        or checks.backend("backend", settings.backend)
        or ("ray" if settings.names_ray else "")
        or (JOBSET if several else JOB)
    )
    if single and name == JOB:
        raise UsageError(
            'controller="single" needs the backend "pathways", but "gke" runs jobs of one host. '
            'Remove backend= and KINETIC_BACKEND, or set backend="pathways".'
        )
    place = Place(
        name,
        cluster=settings.cluster or "",
        project=settings.project or "",
        zone=settings.zone or "",
        namespace=settings.namespace or "",
        image=options.container_image or "",
        image_repo=settings.base_image_repo or "",
        queue=settings.queue or "",
        service_account=settings.service_account if "service_account" in settings.sources else "",
    )
    if _makers.get(name) is _ray:
        from kinetic._backends.ray import backend as ray

        return replace(place, address=ray.find_address(settings)), ""
    if name in _WITHOUT_CLUSTER:
        return place, ""
    if name in _makers and settings.cluster_settings:
        return _settle(place), ""
    stand_in = replace(place, backend="local", stands_in_for=name)
    simulates = simulation.can_simulate(system)
    notice = _describe_simulation(topology, slices, single=single) if simulates else ""
    return stand_in, notice


def make(place: Place, store: Store) -> Backend:
    """Return the backend that runs the jobs of a place and writes their records to a store.

    Raises:
        PreflightError: the backend is not built into this version.
    """
    if place.session:
        from kinetic._backends.session import SessionBackend  # few jobs run on sessions

        return SessionBackend(place.session, store, make(replace(place, session=""), store))
    if place.backend in _makers:
        return _makers[place.backend](place, store)
    raise PreflightError(
        f"This version of kinetic has no backend {place.backend!r}, only {', '.join(_makers)}. "
        "Update kinetic, or use one of these."
    )


def backend_of(ref: JobRef) -> Backend:
    """Return the backend that runs a job."""
    from kinetic._store.open import open_store

    return make(ref.place, open_store(ref.store_uri, existing=True))


def has_cluster(settings: Settings) -> bool:
    """True if jobs with these settings go to a cluster; options of a call may say otherwise."""
    return bool(settings.cluster_settings) and settings.backend not in _WITHOUT_CLUSTER


@contextmanager
def substitute_backend(name: str, maker: Maker) -> Iterator[None]:
    """Replace the backend that has this name in the `with` block, for tests."""
    before = _makers.get(name)
    _makers[name] = maker
    try:
        yield
    finally:
        if before is None:
            del _makers[name]
        else:
            _makers[name] = before


def _local(_: Place, store: Store) -> Backend:
    from kinetic._backends.local.backend import LocalBackend

    return LocalBackend(store)


def _kubernetes(place: Place, store: Store) -> Backend:
    from kinetic._backends.kubernetes import cluster

    return cluster.make_backend(place, store)


def _settle(place: Place) -> Place:
    from kinetic._backends.kubernetes import cluster

    return cluster.settle(place)


def _ray(place: Place, store: Store) -> Backend:
    from kinetic._backends.ray import backend as ray

    return ray.make_backend(place, store)


_makers: dict[str, Maker] = {
    "local": _local,
    "ray": _ray,
    JOB: _kubernetes,
    JOBSET: _kubernetes,
}


def _describe_simulation(topology: Topology, slices: int, *, single: bool) -> str:
    hosts = slices * topology.hosts
    unit = {"cpu": "device", "gpu": "GPU", "tpu": "chip"}[topology.kind]
    shape = f"{_count_noun(hosts, 'host')} x {_count_noun(topology.chips_per_host, unit)}"
    if single:
        shape = f"one process with {slices * topology.chips} chips"
    name = topology.name if slices == 1 else f"{slices} slices of {topology.name}"
    return f"kinetic: no cluster configured; simulating {name} ({shape}) here"


def _count_noun(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
