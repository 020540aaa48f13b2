"""The configured cluster: its connection, its checks, its machines, the backend of its jobs.

Connections are opened by the first call, not before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kinetic._config import settings as configuration
from kinetic._core.findings import Finding, problem
from kinetic._core.place import JOB, MULTI_TIER, Place
from kinetic._system.distribution import make_install_command
from kinetic.errors import KineticError, PreflightError

if TYPE_CHECKING:
    from kinetic._backends.base import PoolRow
    from kinetic._backends.kubernetes.api import Api, CallLimits
    from kinetic._backends.kubernetes.backend import KubernetesBackend
    from kinetic._backends.kubernetes.image_builds import BundledImages
    from kinetic._backends.kubernetes.pods import PodSettings
    from kinetic._config.settings import Settings
    from kinetic._store.base import Store

_PACKAGES = ("kubernetes",)


def make_backend(place: Place, store: Store) -> KubernetesBackend:
    """Return the backend of a place, with the settings of this process."""
    from kinetic._backends.kubernetes.backend import KubernetesBackend

    chosen = configuration.load()
    return KubernetesBackend(
        place.backend,
        store,
        _pod_settings(store, chosen),
        lambda: connect(place, configuration.variables()),
        supply=_images,
    )


def settle(place: Place) -> Place:
    """Return the place with the kubeconfig's current context and namespace filled in, since the
    kubeconfig may change before the job is read again. Without a kubeconfig, return the place as it
    is."""
    if (place.cluster and place.namespace) or _list_missing():
        return place
    from kinetic._backends.kubernetes import kubeconfig

    try:
        access = kubeconfig.find(
            configuration.variables(), cluster=place.cluster, project=place.project, zone=place.zone
        )
    except PreflightError:
        return place
    context = "" if place.cluster else access.context
    return replace(place, context=context, namespace=place.namespace or access.namespace)


def list_accelerators(settings: Settings) -> tuple[PoolRow, ...]:
    """List the machines in the node pools of the configured cluster.

    Raises:
        PreflightError: there is no such cluster, or the user may not list its nodes.
        BackendUnavailable: the cluster does not answer.
    """
    from kinetic._backends.kubernetes import nodes
    from kinetic._backends.kubernetes.resources import NODES

    api = connect(_place_of(settings), configuration.variables())
    return nodes.live_accelerators(api.list(NODES).items)


def check(settings: Settings) -> tuple[Finding, ...]:
    """Check that the configured cluster can run jobs."""
    from kinetic._backends.kubernetes import probes
    from kinetic._backends.kubernetes.api import CallLimits
    from kinetic._backends.kubernetes.preflight import Needs

    is_real = not settings.pod_simulated
    needs = Needs(
        account=settings.service_account or "",
        queue=settings.queue or "",
        multi_tier=settings.local_storage == MULTI_TIER and is_real,
        networks=bool(settings.network_devices) and is_real,
    )
    patience = CallLimits(connect_s=5.0, tries=2)
    try:
        api = connect(_place_of(settings), configuration.variables(), patience)
    except KineticError as error:
        return (problem("cluster", str(error)),)
    with contextlib.closing(api):
        return probes.examine(api, needs)


def connect(place: Place, variables: Mapping[str, str], patience: CallLimits | None = None) -> Api:
    """Return this process's shared connection to a place's cluster. With `patience`, return a new
    connection with these time limits instead.

    Raises:
        PreflightError: there is no such cluster, or packages are missing; the message says where
            else to run.
    """
    check_packages()
    from kinetic._backends.kubernetes import kubeconfig
    from kinetic._backends.kubernetes.connection import HttpApi, share_connection
    from kinetic._backends.local import simulation

    try:
        access = kubeconfig.find(
            variables,
            cluster=place.cluster or place.context,
            project=place.project,
            zone=place.zone,
        )
    except PreflightError as error:
        if not simulation.can_simulate(sys.platform):
            raise
        raise PreflightError(
            f'{error} To simulate the job here, set backend="local" or KINETIC_BACKEND=local.'
        ) from None
    if patience is None:
        return share_connection(access, variables, namespace=place.namespace)
    return HttpApi(access, variables, namespace=place.namespace, patience=patience)


def check_packages() -> None:
    """Check that the packages of the extra `gcp` are installed.

    Raises:
        PreflightError: a package is missing.
    """
    if missing := _list_missing():
        raise PreflightError(
            f"Packages that jobs on clusters need are not installed: {', '.join(missing)}. "
            f"Install them: {make_install_command('gcp')}"
        )


def _list_missing() -> list[str]:
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def _place_of(settings: Settings) -> Place:
    return Place(
        JOB,
        cluster=settings.cluster or "",
        project=settings.project or "",
        zone=settings.zone or "",
        namespace=settings.namespace or "",
    )


@functools.cache
def _images() -> BundledImages:
    """Return this process's shared `BundledImages`: the login and the list of images are cached."""
    from kinetic._backends.kubernetes.image_builds import BundledImages

    return BundledImages()


def _pod_settings(store: Store, chosen: Settings) -> PodSettings:
    from kinetic._backends.kubernetes.pods import PodSettings
    from kinetic._source import runtime

    return PodSettings(
        image="",
        store_uri=chosen.pod_store or store.uri,
        python=chosen.pod_python or "python3",
        bootstrap="" if chosen.pod_python else runtime.bootstrap(),
        simulated=chosen.pod_simulated,
        service_account=chosen.service_account,
        head_pool=chosen.pathways_head_pool or "",
        pathways_version=chosen.pathways_version,
    )
