"""The Kubernetes objects that jobs need in a cluster: an account, roles, bindings, a queue.

In: a `Wanted`. Out: documents with the cluster's label and a digest, which tell later whether the
object in the cluster is still the one to apply. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

from kinetic._backends.kubernetes.nodes import GPU, GPU_LABEL, TOPOLOGY_LABEL, TPU, TPU_LABEL
from kinetic._backends.kubernetes.resources import CHECKPOINT_CONFIGURATIONS, QUEUE_WORKLOADS
from kinetic._backends.kubernetes.rights import RIGHTS
from kinetic._clusters.observed import APPLIED, Document
from kinetic._clusters.wanted import ACCOUNT, LABEL, QUEUE, Wanted
from kinetic._core.accelerators.topology import Topology

RBAC = "rbac.authorization.k8s.io"
YOU = "you"
"""Stands for the user's name in a preview, before there is a cluster that knows it."""
RESOURCE = {"tpu": TPU, "gpu": GPU}
IN_MEMORY = "100Gi"
_PLENTY = {"cpu": 100_000, "memory": "1000Ti"}
_QUEUE_VERSION = QUEUE_WORKLOADS[0].api_version


def mark(document: Document, name: str) -> Document:
    """Return an object with the label of its cluster, and with the digest of its content."""
    text = json.dumps(document, sort_keys=True).encode()
    meta = document["metadata"]
    labels = (meta.get("labels") or {}) | {LABEL: name}
    notes = (meta.get("annotations") or {}) | {APPLIED: hashlib.sha256(text).hexdigest()[:16]}
    return document | {"metadata": meta | {"labels": labels, "annotations": notes}}


def make_access(wanted: Wanted, caller: str) -> list[Document]:
    """Return the namespace, the pods' account, the documented roles, and `caller`'s bindings."""
    space = wanted.namespace
    meta = {"namespace": space}
    role, cluster_role = "kinetic", "kinetic-cluster"
    binding = {"name": f"kinetic:{(caller or YOU).translate({47: '-', 37: '-'})}"}
    subjects = [{"kind": "User", "name": caller or YOU, "apiGroup": RBAC}]
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": space}}]
    return [
        *(spaces if space != "default" else ()),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT} | meta},
        _rbac("Role", {"name": role} | meta, rules=_list_rules(namespaced=True)),
        _rbac("ClusterRole", {"name": cluster_role}, rules=_list_rules(namespaced=False)),
        _rbac("RoleBinding", binding | meta, roleRef=_refer("Role", role), subjects=subjects),
        _rbac(
            "ClusterRoleBinding",
            binding,
            roleRef=_refer("ClusterRole", cluster_role),
            subjects=subjects,
        ),
    ]


def _rbac(kind: str, metadata: Document, **content: object) -> Document:
    return {"apiVersion": f"{RBAC}/v1", "kind": kind, "metadata": metadata, **content}


def _refer(kind: str, name: str) -> Document:
    return {"apiGroup": RBAC, "kind": kind, "name": name}


def _list_rules(*, namespaced: bool) -> list[Document]:
    verbs: dict[tuple[str, str], list[str]] = {}
    for right in RIGHTS:
        if right.resource.namespaced == namespaced:
            verbs.setdefault((right.resource.group, right.resource.plural), []).append(right.verb)
    return [
        {"apiGroups": [group], "resources": [plural], "verbs": listed}
        for (group, plural), listed in verbs.items()
    ]


def make_queue(wanted: Wanted) -> list[Document]:
    """Return the objects of a Kueue queue with room for the wanted slices.

    Pods without chips get the first flavor, which has no chips and no node labels, so that they
    never occupy machines with chips.
    """
    if not wanted.has_queue:
        return []
    counts = Counter(topology for topology in wanted.slices if topology.kind != "cpu")
    counted = sorted({RESOURCE[topology.kind] for topology in counts})
    flavors = [_kueue("ResourceFlavor", {"name": "cpu"}, {})]
    quotas = [_make_quota("cpu", counted, "", 0)]
    for topology, count in counts.items():
        name = topology.name.replace(":", "-")
        labels = {"nodeLabels": select_nodes(topology)}
        flavors.append(_kueue("ResourceFlavor", {"name": name}, labels))
        chips = count * topology.chips
        quotas.append(_make_quota(name, counted, RESOURCE[topology.kind], chips))
    group = {"coveredResources": [*_PLENTY, *counted], "flavors": quotas}
    return [
        *flavors,
        _kueue(
            "ClusterQueue", {"name": QUEUE}, {"namespaceSelector": {}, "resourceGroups": [group]}
        ),
        _kueue(
            "LocalQueue", {"name": QUEUE, "namespace": wanted.namespace}, {"clusterQueue": QUEUE}
        ),
    ]


def select_nodes(topology: Topology) -> Document:
    """Return the labels that GKE gives to nodes with an accelerator."""
    if topology.kind == "cpu":
        return {}
    spot = {"cloud.google.com/gke-spot": "true"} if topology.spot else {}
    if topology.kind == "gpu":
        return {GPU_LABEL: topology.gke_accelerator} | spot
    return {TPU_LABEL: topology.gke_accelerator, TOPOLOGY_LABEL: topology.shape_text} | spot


def count_chips(topology: Topology) -> Document:
    """Return the chips of one node, in the form in which pods request them; {} for processors."""
    chips = topology.chips_per_host
    return {RESOURCE[topology.kind]: str(chips)} if topology.kind != "cpu" else {}


def _kueue(kind: str, metadata: Document, spec: Document) -> Document:
    return {"apiVersion": _QUEUE_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _make_quota(name: str, counted: Sequence[str], resource: str, chips: int) -> Document:
    limits = _PLENTY | {other: chips if other == resource else 0 for other in counted}
    resources = [{"name": each, "nominalQuota": str(limit)} for each, limit in limits.items()]
    return {"name": name, "resources": resources}


def make_checkpoints(wanted: Wanted) -> list[Document]:
    """Return the configuration of multi-tier checkpoints, which GKE reads."""
    if not wanted.multi_tier:
        return []
    machine = next((t.machine_type for t in wanted.slices if t.kind == "tpu"), "")
    spec: Document = {
        "cloudStorageBucketName": wanted.bucket,
        "nodeSelector": {"node.kubernetes.io/instance-type": machine},
        "tolerations": [{"key": TPU, "operator": "Exists", "effect": "NoSchedule"}],
        "inMemoryVolumeSize": IN_MEMORY,
    }
    kind = CHECKPOINT_CONFIGURATIONS
    name = {"name": f"{wanted.name}-checkpoints"}
    document = {"apiVersion": kind.api_version, "kind": "CheckpointConfiguration"}
    return [document | {"metadata": name, "spec": spec}]
