"""The volumes of a host's pod, and its claim of network devices.

In: a plan. Out: volumes with their mounts, and the template of a claim, as plain documents. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kinetic._backends.base import Document
from kinetic._core.place import ALL_DEVICES, MULTI_TIER
from kinetic._core.plan import BUCKETS, Dataset, Plan

LOCAL_DIR = "KINETIC_LOCAL_DIR"
LOCAL_FOLDER = "/_kinetic/local"
"""The path of the in-memory folder for local checkpoints, unless `env=` names another path."""
SHM = "/dev/shm"
KEY_DIR = "KINETIC_TLS_KEY_DIR"
KEY_FOLDER = "/_kinetic/leader"
"""The folder with the key of the gang's certificate; it is empty in all pods but the leader's."""
MULTI_TIER_DRIVER = "multitier-checkpoint.csi.storage.gke.io"
DEVICE_CLASS = "netdev.google.com"
"""The class of network devices of TPU machines, by GKE's managed DRANET."""
NETWORK = "network"
"""The name of the claim in a pod."""
GCSFUSE_DRIVER = "gcsfuse.csi.storage.gke.io"
_UNLIMITED = ("cpu-limit", "memory-limit", "ephemeral-storage-limit")
GCSFUSE = {"gke-gcsfuse/volumes": "true"} | {f"gke-gcsfuse/{name}": "0" for name in _UNLIMITED}
"""The annotations of pods with buckets. The values "0" remove the limits of the gcsfuse sidecar."""


class Mounted(NamedTuple):
    """A volume of a pod, and the entry that mounts it in the container."""

    volume: Document
    mount: Document


def buckets(plan: Plan) -> list[Mounted]:
    """Return the buckets that the cluster mounts."""
    return [
        _bucket(f"data-{number}", plan.data[number], folder)
        for number, folder in plan.cluster_mounts().items()
    ]


def _bucket(name: str, data: Dataset, folder: str) -> Mounted:
    bucket, _, path = data.source.removeprefix(BUCKETS).partition("/")
    inside = (path if data.is_dir else path.rpartition("/")[0]).strip("/")
    options = f"implicit-dirs,only-dir={inside}" if inside else "implicit-dirs"
    attributes = {"bucketName": bucket, "mountOptions": options}
    read_only: Document = {} if data.writable else {"readOnly": True}
    csi = {"driver": GCSFUSE_DRIVER} | read_only | {"volumeAttributes": attributes}
    return Mounted({"name": name, "csi": csi}, {"name": name, "mountPath": folder} | read_only)


def key_of_leader(secret: str, key: str) -> Mounted:
    """Return the volume with the key of the gang's certificate, for pods that share a template.
    Each pod mounts the path made of its Job's and its own index. The volume contains only host 0's
    path, so other hosts get an empty folder
    (https://github.com/kubernetes/kubernetes/issues/65452).

    Args:
        secret: the name of the Secret.
        key: the name of the key in the Secret.
    """
    items = [{"key": key, "path": f"0-0/{key}"}]
    volume: Document = {"name": "leader", "secret": {"secretName": secret, "items": items}}
    own = {"subPathExpr": "$(KINETIC_JOB_INDEX)-$(KINETIC_POD_INDEX)", "readOnly": True}
    return Mounted(volume, {"name": "leader", "mountPath": KEY_FOLDER} | own)


def are_bound_by_hosts(plan: Plan) -> bool:
    """True if hosts themselves mount some data at fixed paths, because the cluster does not."""
    mounts = plan.cluster_mounts()
    return any(data.mount and mounts.get(n) != data.mount for n, data in enumerate(plan.data))


def local_folder(plan: Plan) -> str:
    """Return the path of a host's in-memory folder for local checkpoints; "" if it has none."""
    if plan.has_single_controller:
        return ""
    return plan.options.env.get(LOCAL_DIR) or LOCAL_FOLDER


def local(plan: Plan, *, simulated: bool) -> list[Mounted]:
    """Return the volume in memory for local checkpoints. Without a size it takes free memory as
    files are written.

    Args:
        plan: the job's plan.
        simulated: true to ignore the size, which nodes need not have.
    """
    folder, storage = local_folder(plan), "" if simulated else plan.options.local_storage
    if not folder:
        return []
    volume: Document
    if storage == MULTI_TIER:
        volume = {"csi": {"driver": MULTI_TIER_DRIVER}}
    else:
        volume = {"emptyDir": {"medium": "Memory"} | ({"sizeLimit": storage} if storage else {})}
    return [Mounted({"name": "local"} | volume, {"name": "local", "mountPath": folder})]


def folder_memory(plan: Plan) -> str:
    """Return the memory that a pod requests for its local checkpoints; "" for none."""
    storage = plan.options.local_storage or ""
    return "" if storage == MULTI_TIER else storage


def shared_memory(plan: Plan) -> list[Mounted]:
    """Return the volume at /dev/shm, the memory that a pod's processes share. The default, 64 MB,
    is too little for a data loader. If the plan gives no size, the limit is the pod's memory."""
    if local_folder(plan).rstrip("/") == SHM:
        return []  # Local checkpoints already have a volume at this path.
    size = plan.options.shm or half_of(plan.options.memory)
    volume: Document = {"medium": "Memory"} | ({"sizeLimit": size} if size else {})
    return [Mounted({"name": "shm", "emptyDir": volume}, {"name": "shm", "mountPath": SHM})]


def half_of(size: str | None) -> str:
    """Return half of a size in the same unit; "" without a size."""
    written = re.fullmatch(r"([\d.]+)(\w+)", size or "")
    return f"{float(written[1]) / 2:.12g}{written[2]}" if written else ""


def claim_template(plan: Plan) -> Document:
    """Return the template of each pod's claim of network devices."""
    devices = plan.options.network_devices or ALL_DEVICES
    amount: Document = (
        {"allocationMode": "All"}
        if devices == ALL_DEVICES
        else {"allocationMode": "ExactCount", "count": int(devices)}
    )
    request = {"name": NETWORK, "exactly": {"deviceClassName": DEVICE_CLASS} | amount}
    return {"spec": {"devices": {"requests": [request]}}}
