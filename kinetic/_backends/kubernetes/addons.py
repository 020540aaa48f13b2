"""What jobs may ask of a GKE cluster beyond Kubernetes: the memory of multi-tier checkpointing, and
network devices. Whether they are there, and suit the nodes.

In: an `Api` (`multi_tier`, `networks`), then only what it answered, and nodes. Out: `Finding`s,
for the doctor and for preflights: what is wrong; a problem keeps pods from starting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kinetic._backends.kubernetes import nodes as pools
from kinetic._backends.kubernetes.api import Api
from kinetic._backends.kubernetes.errors import NotInstalled
from kinetic._backends.kubernetes.observed import Document, labels, metadata
from kinetic._backends.kubernetes.resources import (
    CHECKPOINT_CONFIGURATIONS,
    CLAIM_TEMPLATES,
    CSI_DRIVERS,
    DEVICE_CLASSES,
    Resource,
)
from kinetic._backends.kubernetes.volumes import DEVICE_CLASS, GCSFUSE_DRIVER, MULTI_TIER_DRIVER
from kinetic._core.findings import Finding, problem, warn
from kinetic._core.place import MULTI_TIER
from kinetic._core.quantities import bytes_of
from kinetic._core.values import dataclass
from kinetic.errors import NotFound, PreflightError

MEMORY, NETWORKS = "multi-tier", "network devices"
_KEEPS_PODS_OUT = ("NoSchedule", "NoExecute")
_ENABLE = (
    "Ask an administrator to enable the add-on HighScaleCheckpointing (GKE Standard, "
    '1.32.4-gke.1415000 or later), or name a size instead: local_storage="60Gi".'
)
_CONFIGURE = (
    "Ask an administrator for one: it says which nodes have the memory, how much, and in which "
    'bucket it is backed up. Or name a size instead: local_storage="60Gi".'
)
_CORRECT = "Ask an administrator to correct it: kubectl edit checkpointconfiguration {name}."
_COPY = (
    "Ask an administrator to enable the add-on GcsFuseCsiDriver, or leave fuse=True away: then the "
    "data is copied."
)
_DEVICES = (
    "Ask an administrator for node pools with GKE's managed DRANET (1.34.1-gke.1829001 or later), "
    "or leave network_devices= away."
)


@dataclass(frozen=True)
class Asked:
    """What jobs ask for.

    Attributes:
        multi_tier: the volume of multi-tier checkpointing.
        networks: network devices.
        buckets: buckets as folders.
        queue: the queue that admits them, or "".
    """

    multi_tier: bool = False
    networks: bool = False
    buckets: bool = False
    queue: str = ""


def list_asked(
    local_storage: str | None,
    network_devices: str | None,
    *,
    simulated: bool,
    buckets: bool = False,
    queue: str | None = "",
) -> Asked:
    """Return what jobs ask for by these options. Simulated accelerators need neither the driver of
    multi-tier checkpointing nor network devices."""
    if simulated:
        return Asked(buckets=buckets, queue=queue or "")
    return Asked(local_storage == MULTI_TIER, bool(network_devices), buckets, queue or "")


@dataclass(frozen=True)
class MultiTier:
    """Multi-tier checkpointing in a cluster.

    Attributes:
        has_driver: whether its CSI driver is installed; None if that may not be looked up.
        configurations: its CheckpointConfigurations; None if they may not be listed.
    """

    has_driver: bool | None
    configurations: Sequence[Document] | None


@dataclass(frozen=True)
class Networks:
    """Network devices for pods in a cluster.

    Attributes:
        has_claims: whether it knows ResourceClaimTemplates of the version that jobs use.
        has_class: whether it has the class of devices; None if that may not be looked up.
    """

    has_claims: bool
    has_class: bool | None


def multi_tier(api: Api) -> MultiTier:
    """Look for multi-tier checkpointing, and how it is configured."""
    configurations: Sequence[Document] | None
    try:
        configurations = api.list(CHECKPOINT_CONFIGURATIONS).items
    except (NotInstalled, NotFound):
        configurations = ()
    except PreflightError:
        configurations = None
    return MultiTier(_has(api, CSI_DRIVERS, MULTI_TIER_DRIVER), configurations)


def check_buckets(api: Api) -> list[Finding]:
    """Return why pods would get no bucket as a folder."""
    if _has(api, CSI_DRIVERS, GCSFUSE_DRIVER) is not False:
        return []
    text = f"the cluster mounts no buckets: it has no CSI driver {GCSFUSE_DRIVER}"
    return [problem("buckets", text, _COPY)]


def networks(api: Api) -> Networks:
    """Look for what hands out network devices."""
    if not api.knows(CLAIM_TEMPLATES):
        return Networks(has_claims=False, has_class=None)
    return Networks(has_claims=True, has_class=_has(api, DEVICE_CLASSES, DEVICE_CLASS))


def _has(api: Api, kind: Resource, name: str) -> bool | None:
    try:
        api.get(kind, name)
    except (NotInstalled, NotFound):
        return False
    except PreflightError:
        return None
    return True


def check_networks(found: Networks) -> list[Finding]:
    """Return why pods would get no network devices."""
    if not found.has_claims:
        text = "the cluster does not know ResourceClaimTemplates (resource.k8s.io/v1)"
        return [problem(NETWORKS, text, f"It needs Kubernetes 1.34 or later. {_DEVICES}")]
    if found.has_class is False:
        return [
            problem(
                NETWORKS, f"the cluster has no network devices of class {DEVICE_CLASS}", _DEVICES
            )
        ]
    return []


def missing_memory(found: MultiTier) -> list[Finding]:
    """Return why no pod at all would get the volume of multi-tier checkpointing."""
    if found.has_driver is False:
        return [problem(MEMORY, "multi-tier checkpointing is not enabled in the cluster", _ENABLE)]
    if found.configurations is not None and not found.configurations:
        text = "multi-tier checkpointing has no CheckpointConfiguration, so no node has its memory"
        return [problem(MEMORY, text, _CONFIGURE)]
    return []


def check_memory(found: MultiTier, nodes: Iterable[Document]) -> list[Finding]:
    """Return why pods would not get the volume of multi-tier checkpointing on these nodes."""
    if missing := missing_memory(found):
        return missing
    configurations = found.configurations or ()
    accelerated = [node for node in nodes if _accelerator(node)]
    wrong = [fault for each in configurations for fault in _wrong_with(each, accelerated)]
    if wrong or not configurations:
        return wrong
    served = {_pool(n) for each in configurations for n in _select_nodes(each, accelerated)}
    left = sorted({_pool(node) for node in accelerated} - served)
    if not left:
        return []
    text = f"no CheckpointConfiguration selects the nodes of {', '.join(left)}"
    remedy = f"Pods that go there do not start. {_CORRECT.format(name=_name(configurations[0]))}"
    return [(warn if served else problem)(MEMORY, text, remedy)]


def describe_multi_tier(found: MultiTier) -> str:
    """Return how multi-tier checkpointing is configured."""
    if found.configurations is None:
        return "its CheckpointConfigurations may not be listed"
    return "; ".join(
        f"{_spec(each).get('inMemoryVolumeSize')} for each node of {_name(each)}"
        for each in found.configurations
    )


def _wrong_with(configuration: Document, nodes: Sequence[Document]) -> Iterator[Finding]:
    name, spec = _name(configuration), _spec(configuration)
    this, correct = f"the CheckpointConfiguration {name}", _CORRECT.format(name=name)
    bucket, size = str(spec.get("cloudStorageBucketName") or ""), spec.get("inMemoryVolumeSize")
    if not bucket:
        yield problem(MEMORY, f"{this} names no bucket", correct)
    if "/" in bucket:
        yield problem(
            MEMORY, f"{this} has the bucket {bucket}: the name alone is expected", correct
        )
    wanted = bytes_of(str(size or ""))
    if not wanted:
        yield problem(
            MEMORY, f"{this} has no size of memory: inMemoryVolumeSize is {size!r}", correct
        )
    if error := (configuration.get("status") or {}).get("error"):
        yield problem(MEMORY, f"{this} was not accepted: {error}", correct)
    for node in _select_nodes(configuration, nodes):
        if taint := _find_taint(spec, node):
            text = f"{this} does not tolerate {taint}, which the nodes of {_pool(node)} have"
            yield problem(MEMORY, text, correct)
            return
        memory = pools.memory_of(node)
        has = bytes_of(memory)
        if wanted and has and wanted >= has:
            text = f"{this} asks for {size} of memory, and nodes of {_pool(node)} have {memory}"
            yield problem(MEMORY, text, f"Leave room for what functions need. {correct}")
            return


def _select_nodes(configuration: Document, nodes: Iterable[Document]) -> list[Document]:
    return pools.select_nodes(nodes, _spec(configuration).get("nodeSelector") or {})


def _find_taint(spec: Document, node: Document) -> str:
    """The key of a taint that keeps the configuration's own pods from a node, or ""."""
    tolerations = spec.get("tolerations") or ()
    for taint in (node.get("spec") or {}).get("taints") or ():
        keeps_out = taint.get("effect") in _KEEPS_PODS_OUT
        if keeps_out and not any(_tolerates(each, taint) for each in tolerations):
            return str(taint.get("key"))
    return ""


def _tolerates(toleration: Document, taint: Document) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    is_any = toleration.get("operator") == "Exists"
    return is_any or (toleration.get("value") or "") == (taint.get("value") or "")


def _accelerator(node: Document) -> str:
    known = labels(node)
    return known.get(pools.TPU_LABEL) or known.get(pools.GPU_LABEL) or ""


def _pool(node: Document) -> str:
    return labels(node).get(pools.POOL_LABEL) or str(metadata(node).get("name", ""))


def _name(configuration: Document) -> str:
    return str(metadata(configuration).get("name", ""))


def _spec(configuration: Document) -> Document:
    spec: Document = configuration.get("spec") or {}
    return spec
