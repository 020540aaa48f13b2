"""The bodies of requests to Google Cloud: clusters, node pools, buckets.

In: a `Wanted`. Out: documents as Google's REST interfaces take them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kinetic._clusters.observed import Document
from kinetic._clusters.wanted import ACCOUNT, DEFAULT_POOL, LABEL, Capacity, Mode, Pool, Wanted
from kinetic._core.accelerators.topology import Topology

SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
NETWORK_LABEL = {"cloud.google.com/gke-networking-dra-driver": "true"}
NETWORK_VERSION = "1.35"
"""The version of GKE whose managed DRANET works in both modes."""
OBJECT_ROLE = "roles/storage.objectUser"
RECORDS = ("jobs/", "listed/", "refs/", "groups/")
"""The prefixes of the records of jobs, which the bucket deletes by age. Content (blobs, packs,
trees) is never deleted by age: new jobs may use old content."""
RECORDS_DAYS = 180
LONGEST_FLEX_S = 7 * 24 * 3600
_CHECKPOINT_ACCOUNT = ("gke-managed-checkpointing", "gke-checkpointing-multitier-node")


def make_cluster(wanted: Wanted, machine: str) -> Document:
    """Return the body of the request that creates the cluster; `machine` is the type of machine on
    which a Standard cluster runs the system's pods."""
    version = {"initialClusterVersion": NETWORK_VERSION} if wanted.networks else {}
    common: Document = {
        "name": wanted.name,
        **version,
        "releaseChannel": {"channel": "REGULAR"},
        "resourceLabels": {LABEL: wanted.name},
        "ipAllocationPolicy": {"useIpAliases": True},
    }
    if wanted.mode is Mode.AUTOPILOT:
        return common | {"autopilot": {"enabled": True}}
    addons: Document = {"gcsFuseCsiDriverConfig": {"enabled": True}}
    if wanted.multi_tier:
        addons["highScaleCheckpointingConfig"] = {"enabled": True}
    paths = {"networkConfig": {"datapathProvider": "ADVANCED_DATAPATH"}} if wanted.networks else {}
    pool = {
        "name": DEFAULT_POOL,
        "initialNodeCount": 1,
        "autoscaling": {"enabled": True, "minNodeCount": 1, "maxNodeCount": 3},
        "management": {"autoRepair": True, "autoUpgrade": True},
        "config": _make_config(wanted, machine),
    }
    return common | {
        "addonsConfig": addons,
        **paths,
        "workloadIdentityConfig": {"workloadPool": f"{wanted.project}.svc.id.goog"},
        "autoscaling": {"autoscalingProfile": "OPTIMIZE_UTILIZATION"},
        "nodePools": [pool],
    }


def _make_config(wanted: Wanted, machine: str) -> Document:
    return {
        "machineType": machine,
        "oauthScopes": SCOPES,
        "workloadMetadataConfig": {"mode": "GKE_METADATA"},
        "resourceLabels": {LABEL: wanted.name},
    }


def make_pool(wanted: Wanted, pool: Pool) -> Document:
    """Return a new node pool."""
    topology, capacity = pool.topology, pool.capacity
    config = _make_config(wanted, topology.machine_type)
    if topology.kind == "gpu":
        config["accelerators"] = [
            {
                "acceleratorCount": str(topology.chips_per_host),
                "acceleratorType": topology.gke_accelerator,
                "gpuDriverInstallationConfig": {"gpuDriverVersion": "LATEST"},
            }
        ]
    if pool.networks:
        config |= {"labels": NETWORK_LABEL, "gvnic": {"enabled": True}}
    if capacity is Capacity.SPOT:
        config["spot"] = True
    if capacity is Capacity.FLEX_START:
        config |= {"flexStart": True, "maxRunDuration": f"{LONGEST_FLEX_S}s"}
    config["reservationAffinity"] = (
        {
            "consumeReservationType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [pool.reservation],
        }
        if pool.reservation
        else {"consumeReservationType": "NO_RESERVATION"}
    )
    document: Document = {
        "name": pool.name,
        "initialNodeCount": pool.least,
        "autoscaling": {
            "enabled": True,
            "minNodeCount": pool.least,
            "maxNodeCount": pool.most,
            "locationPolicy": "ANY",
        },
        # Repairs and upgrades of single nodes would break up slices that wait for capacity.
        "management": {
            "autoRepair": capacity not in (Capacity.FLEX_START, Capacity.QUEUED),
            "autoUpgrade": True,
        },
        "config": config,
    }
    if topology.kind == "tpu" and topology.multi_host:
        document["placementPolicy"] = {"type": "COMPACT", "tpuTopology": topology.shape_text}
    if capacity is Capacity.QUEUED:
        document["queuedProvisioning"] = {"enabled": True}
    if pool.networks:
        document["networkConfig"] = {"acceleratorNetworkProfile": "auto"}
    return document


def make_bucket(wanted: Wanted) -> Document:
    """Return the new bucket of the store."""
    levels = {"hierarchicalNamespace": {"enabled": True}} if wanted.multi_tier else {}
    return {
        "name": wanted.bucket,
        "location": wanted.region.upper(),
        "labels": {LABEL: wanted.name},
        "iamConfiguration": {
            "uniformBucketLevelAccess": {"enabled": True},
            "publicAccessPrevention": "enforced",
        },
        **levels,
        "softDeletePolicy": {"retentionDurationSeconds": "0"},
        "lifecycle": {
            "rule": [
                {
                    "action": {"type": "Delete"},
                    "condition": {"age": RECORDS_DAYS, "matchesPrefix": list(RECORDS)},
                },
                {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}},
            ]
        },
    }


def list_members(wanted: Wanted, number: str) -> list[str]:
    """Return the identities that get a role on the bucket: the pods' accounts, by Workload
    Identity. `number` is the project's number."""
    pool = (
        f"principal://iam.googleapis.com/projects/{number}/locations/global/workloadIdentityPools/"
        f"{wanted.project}.svc.id.goog/subject"
    )
    accounts = [(wanted.namespace, ACCOUNT)]
    accounts += [_CHECKPOINT_ACCOUNT] if wanted.multi_tier else []
    return [f"{pool}/ns/{space}/sa/{account}" for space, account in accounts]


_GPU_FAMILIES = ("h100", "h100-mega", "h200", "b200")
"""The GPUs that share one quota metric, whose dimensions tell the family. Every other GPU has a
metric of its own."""
_TPU_FAMILIES = {
    "v3": "CT3",
    "v4": "CT4P",
    "v5litepod": "CT5LP",
    "v5p": "CT5P",
    "v6e": "CT6E",
    "tpu7x": "TPU7X",
}


def list_quotas(wanted: Wanted) -> Iterator[tuple[Topology, str, str]]:
    """Yield each accelerator that a quota limits, with that quota: the metric of the Compute API,
    and the family in the metric's dimensions ("" if there is none). Accelerators without a quota
    are left out: processors and reserved machines."""
    capacities = {pool.topology.name: pool.capacity for pool in wanted.pools}
    for topology in dict.fromkeys(wanted.slices):
        usual = Capacity.SPOT if topology.spot else Capacity.ON_DEMAND
        capacity = capacities.get(topology.name, usual)
        prefix = "" if capacity is Capacity.ON_DEMAND else "preemptible_"
        family = topology.family
        gpu = f"nvidia_{family.replace('-', '_')}"
        if topology.kind == "cpu" or capacity is Capacity.RESERVATION:
            continue
        if topology.kind == "tpu":
            yield topology, f"{prefix}tpus_per_tpu_family", _TPU_FAMILIES[family]
        elif family in _GPU_FAMILIES:
            yield topology, f"{prefix}gpus_per_gpu_family", gpu.upper()
        else:
            yield topology, f"{prefix}{gpu}_gpus", ""


def limit_of(buckets: Iterable[Document], region: str, family: str) -> float | None:
    """Return a quota's limit for a family in a region: the most specific of the limits that apply.
    None if no limit applies; -1 for an unlimited quota."""
    limits = []
    for bucket in buckets:
        values = set((bucket.get("dimensions") or {}).values())
        if values <= {region, family} and (not family or family in values):
            limits.append((len(values), float(bucket.get("effectiveLimit") or 0)))
    return max(limits)[1] if limits else None


def list_tpu_quotas() -> Iterator[tuple[str, str, str]]:
    """Yield the quotas of TPUs: the accelerator's name for users, the quota's metric, and the
    family in the metric's dimensions."""
    for family, code in _TPU_FAMILIES.items():
        yield family, "tpus_per_tpu_family", code
        yield f"{family}:spot", "preemptible_tpus_per_tpu_family", code
