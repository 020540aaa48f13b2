"""Whether a cluster takes a job: one dry run of what would be created for it.

The server checks more than we could ask about: rights, kinds, the namespace, quotas, webhooks,
every field. Beside it only what a dry run does not see is looked up: the pods' account, the queue,
and drivers that some options need. What may not be looked up counts as there.
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
"""A good answer holds for this long in the whole process, so that many submissions ask once."""
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
    "to enable the add-on GcsFuseCsiDriver, or leave fuse=True away: then the data is copied."
)
_ENABLE_NETWORKS = (
    "Ask an administrator for node pools with GKE's managed DRANET (1.34.1-gke.1829001 or later), "
    "or leave network_devices= away."
)
_WITHOUT_DRY_RUN = "does not support dry run"
"""In the refusal of a webhook that has side effects: then the dry run says nothing."""
LIMITED_MEMORY = (
    "kinetic: the cluster gives pods that request no memory %s, as GKE's Autopilot does, and ends "
    'those that take more. JAX with a model may: request what it needs, such as memory="8Gi".'
)
_log = logging.getLogger("kinetic")
_accepted_at: dict[tuple[object, ...], float] = {}


@dataclass(frozen=True)
class Needs:
    """What a job needs in a cluster beside its workload.

    Attributes:
        account: the account of its pods, or "" for the default one.
        queue: the queue that admits it, or "".
        multi_tier: the volume of multi-tier checkpointing.
        networks: network devices.
        buckets: buckets as folders.
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
    """Ask the cluster whether it takes a job, unless it took one of this kind a moment ago.

    Args:
        api: the cluster.
        documents: what would be created, the workload first.
        needs: what is looked up beside it.
        clock: for tests.

    Raises:
        PreflightError: it does not.
        BackendUnavailable: it does not answer.
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
    if any(requests_of(each) for each in sets):
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
            raise PreflightError(f"{error} {_ENABLE_NETWORKS}") from error
        raise
    except Refused as error:
        if _WITHOUT_DRY_RUN not in str(error):
            raise


def _memory_of(workload: Document) -> str:
    """The memory of a Job's pods; "" if it says nothing about it."""
    pod = ((workload.get("spec") or {}).get("template") or {}).get("spec") or {}
    amounts = (pod.get("containers") or [{}])[0].get("resources") or {}
    return str(((amounts.get("requests") or {}) | (amounts.get("limits") or {})).get("memory", ""))


def check_account(api: Api, name: str) -> None:
    """Refuse an account that does not exist."""
    if name and find(api, SERVICE_ACCOUNTS, name) is False:
        raise PreflightError(
            f"The service account {name} does not exist in namespace {api.namespace}. Create it "
            f"(kubectl create serviceaccount {name} -n {api.namespace}), or name another one: "
            "service_account=, KINETIC_SERVICE_ACCOUNT."
        )


def check_queue(api: Api, name: str) -> Document | None:
    """Return a queue of Kueue; None if it may not be looked up.

    Raises:
        PreflightError: there is none, or no Kueue: the job would wait for ever, or start at once.
    """
    other = "name another one, or none: queue=, KINETIC_QUEUE, the profile."
    for kind in LOCAL_QUEUES:
        try:
            return api.get(kind, name)
        except NotInstalled:
            continue
        except NotFound as error:
            raise PreflightError(
                f"There is no queue {name} in namespace {api.namespace}. `kubectl get localqueues "
                f"-n {api.namespace}` shows which there are; {other}"
            ) from error
        except PreflightError:
            return None
    raise PreflightError(
        f"The cluster has no Kueue, so no queue {name} can admit the job; without one it would "
        f"start at once. Ask an administrator for Kueue, or {other}"
    )


def check_memory(api: Api) -> Sequence[Document] | None:
    """Return the CheckpointConfigurations of multi-tier checkpointing; None if they may not be
    listed.

    Raises:
        PreflightError: no pod would get its memory.
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
    """Refuse pods that are larger than all nodes. A cloud that adds nodes may add larger ones."""
    try:
        nodes = api.list(NODES).items
    except (NotFound, PreflightError):
        return
    if any((node.get("spec") or {}).get("providerID") for node in nodes):
        return
    for each in sets:
        if text := why_too_large(each, nodes):
            raise PreflightError(text)


def check_networks(api: Api) -> None:
    """Refuse network devices where no pod could claim one."""
    if find(api, DEVICE_CLASSES, DEVICE_CLASS) is False:
        text = f"The cluster has no network devices of class {DEVICE_CLASS}."
        raise PreflightError(f"{text} {_ENABLE_NETWORKS}")


def find(api: Api, resource: Resource, name: str) -> bool | None:
    """Return whether an object exists; None if it may not be looked up."""
    try:
        api.get(resource, name)
    except (NotInstalled, NotFound):
        return False
    except PreflightError:
        return None
    return True
