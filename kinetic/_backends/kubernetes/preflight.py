"""Checks that a cluster accepts a job, by a dry run of the job's objects.

In a dry run the server checks rights, kinds, the namespace, quotas, webhooks and every field. A
dry run does not check the pods' account, the queue, and the drivers that some options need, so this
module reads those. An object that the caller may not read counts as existing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kinetic._backends.kubernetes.api import Api, Document
from kinetic._backends.kubernetes.errors import NotInstalled, Refused
from kinetic._backends.kubernetes.observed import PodSet, shape_of
from kinetic._backends.kubernetes.resources import (
    BY_KIND,
    CHECKPOINT_CONFIGURATIONS,
    CLAIM_TEMPLATES,
    CSI_DRIVERS,
    DEVICE_CLASSES,
    LOCAL_QUEUES,
    NODES,
    SERVICE_ACCOUNTS,
    Resource,
)
from kinetic._backends.kubernetes.scheduling import requests_of, why_too_large
from kinetic._backends.kubernetes.volumes import DEVICE_CLASS, GCSFUSE_DRIVER, MULTI_TIER_DRIVER
from kinetic._core.values import dataclass
from kinetic.errors import NotFound, PreflightError

COUNTS_S = 60.0
"""A successful check is reused for this many seconds, so that many submissions check only once."""
_ENABLE_MEMORY = (
    "Multi-tier checkpointing is not enabled in the cluster. Ask an administrator to enable the "
    "add-on HighScaleCheckpointing (GKE Standard, 1.32.4-gke.1415000 or later), or name a size "
    'instead: local_storage="60Gi".'
)
_CONFIGURE_MEMORY = (
    "Multi-tier checkpointing has no CheckpointConfiguration, so no node has its memory. Ask an "
    "administrator for one: it says which nodes have the memory, how much, and in which bucket it "
    'is backed up. Or name a size instead: local_storage="60Gi".'
)
_ENABLE_BUCKETS = (
    f"The cluster mounts no buckets: it has no CSI driver {GCSFUSE_DRIVER}. Ask an administrator "
    "to enable the add-on GcsFuseCsiDriver, or remove fuse=True to have the data copied."
)
_ENABLE_NETWORKS = (
    "Ask an administrator for node pools with GKE's managed DRANET (1.34.1-gke.1829001 or later), "
    "or remove network_devices=."
)
_WITHOUT_DRY_RUN = "does not support dry run"
"""Substring of the error if a webhook has side effects: a dry run cannot check the job then."""
LIMITED_MEMORY = (
    "kinetic: the cluster limits pods that request no memory to %s, as GKE's Autopilot does, and "
    'ends those that use more. If JAX and your model need more, request it: memory="8Gi".'
)
_log = logging.getLogger("kinetic")
_accepted_at: dict[tuple[object, ...], float] = {}


@dataclass(frozen=True)
class Needs:
    """The needs of a job that a dry run of its workload does not check.

    Attributes:
        account: the account of its pods, or "" for the default one.
        queue: the queue that admits it, or "".
        multi_tier: true if the job needs the volume of multi-tier checkpointing.
        networks: true if the job needs network devices.
        buckets: true if the job needs buckets mounted as folders.
    """

    account: str = ""
    queue: str = ""
    multi_tier: bool = False
    networks: bool = False
    buckets: bool = False


def check(
    api: Api,
    documents: Sequence[Document],
    needs: Needs,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Check that the cluster accepts a job. Does nothing if the cluster accepted a similar job less
    than `COUNTS_S` seconds ago.

    Args:
        api: the cluster.
        documents: the job's objects, the workload first.
        needs: the job's needs that a dry run does not check.
        clock: returns the time in seconds; replaced by tests.

    Raises:
        PreflightError: the cluster does not accept the job.
        BackendUnavailable: the cluster does not answer.
    """
    kinds = tuple(document["kind"] for document in documents)
    sets = shape_of(documents[0]).sets
    question = (api.server, api.namespace, kinds, needs, *map(str, map(requests_of, sets)))
    if clock() < _accepted_at.get(question, float("-inf")) + COUNTS_S:
        return
    for document in documents:
        _try_to_create(api, document)
    check_account(api, needs.account)
    if needs.queue:
        check_queue(api, needs.queue)
    if needs.multi_tier:
        check_memory(api)
    if needs.networks:
        check_networks(api)
    if needs.buckets and find(api, CSI_DRIVERS, GCSFUSE_DRIVER) is False:
        raise PreflightError(_ENABLE_BUCKETS)
    if any(requests_of(pods) for pods in sets):
        check_sizes(api, sets)
    _accepted_at[question] = clock()


def _try_to_create(api: Api, document: Document) -> None:
    resource = BY_KIND[document["apiVersion"], document["kind"]]
    try:
        stored = api.create(resource, document, dry_run=True)
        if (limit := _memory_of(stored)) and not _memory_of(document):
            _log.warning(LIMITED_MEMORY, limit)
    except NotInstalled as error:
        if resource == CLAIM_TEMPLATES:
            raise PreflightError(
                f"The cluster does not support network_devices=: it has no {resource.full_name} "
                f"({resource.version}). {_ENABLE_NETWORKS}"
            ) from error
        raise
    except Refused as error:
        if _WITHOUT_DRY_RUN not in str(error):
            raise


def _memory_of(workload: Document) -> str:
    """Return the memory of a Job's pods; "" if it is not set."""
    pod = ((workload.get("spec") or {}).get("template") or {}).get("spec") or {}
    amounts = (pod.get("containers") or [{}])[0].get("resources") or {}
    return str(((amounts.get("requests") or {}) | (amounts.get("limits") or {})).get("memory", ""))


def check_account(api: Api, name: str) -> None:
    """Refuse an account that does not exist."""
    if name and find(api, SERVICE_ACCOUNTS, name) is False:
        raise PreflightError(
            f"The service account {name!r} does not exist in namespace {api.namespace!r}. Create "
            f"it (kubectl create serviceaccount {name} -n {api.namespace}), or name another one "
            "with service_account= or KINETIC_SERVICE_ACCOUNT."
        )


def check_queue(api: Api, name: str) -> Document | None:
    """Return a queue of Kueue; None if the caller may not read it.

    Raises:
        PreflightError: the queue does not exist, so the job would wait for ever; or Kueue is
            missing, so it would start at once.
    """
    other = "change or remove queue=, KINETIC_QUEUE or the profile's queue."
    for kind in LOCAL_QUEUES:
        try:
            return api.get(kind, name)
        except NotInstalled:
            continue
        except NotFound as error:
            raise PreflightError(
                f"The queue {name!r} does not exist in namespace {api.namespace!r}. List the "
                f"queues with `kubectl get localqueues -n {api.namespace}`, then {other}"
            ) from error
        except PreflightError:
            return None
    raise PreflightError(
        f"The cluster has no Kueue, so the job would start at once instead of waiting in the queue "
        f"{name!r}. Ask an administrator for Kueue, or {other}"
    )


def check_memory(api: Api) -> Sequence[Document] | None:
    """Return multi-tier checkpointing's configurations; None if the caller may not list them.

    Raises:
        PreflightError: the cluster has no memory for multi-tier checkpointing.
    """
    if find(api, CSI_DRIVERS, MULTI_TIER_DRIVER) is False:
        raise PreflightError(_ENABLE_MEMORY)
    configurations: Sequence[Document] = ()
    try:
        configurations = api.list(CHECKPOINT_CONFIGURATIONS).items
    except (NotInstalled, NotFound):
        pass
    except PreflightError:
        return None
    if not configurations:
        raise PreflightError(_CONFIGURE_MEMORY)
    return configurations


def check_sizes(api: Api, sets: Sequence[PodSet]) -> None:
    """Refuse pods larger than every node, except on clouds, which may add larger nodes."""
    try:
        nodes = api.list(NODES).items
    except (NotFound, PreflightError):
        return
    if any((node.get("spec") or {}).get("providerID") for node in nodes):
        return
    for pods in sets:
        if text := why_too_large(pods, nodes):
            raise PreflightError(text)


def check_networks(api: Api) -> None:
    """Raise an error if the cluster has no network devices that pods can claim."""
    if find(api, DEVICE_CLASSES, DEVICE_CLASS) is False:
        text = f"The cluster has no network devices of class {DEVICE_CLASS}."
        raise PreflightError(f"{text} {_ENABLE_NETWORKS}")


def find(api: Api, resource: Resource, name: str) -> bool | None:
    """Return True if an object exists, False if it does not; None if the caller may not read it."""
    try:
        api.get(resource, name)
    except (NotInstalled, NotFound):
        return False
    except PreflightError:
        return None
    return True
