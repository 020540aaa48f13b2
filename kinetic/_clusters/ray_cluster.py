"""The manifest of a KubeRay cluster for slices: printed for the user, never applied. Pure."""

from __future__ import annotations

from collections import Counter

from kinetic._backends.kubernetes.volumes import DEVICE_CLASS, GCSFUSE, GCSFUSE_DRIVER
from kinetic._clusters.objects import count_chips, select_nodes
from kinetic._clusters.observed import Document
from kinetic._clusters.wanted import ACCOUNT, Wanted
from kinetic._core.accelerators.topology import Topology

IMAGE = "rayproject/ray:2.60.0"
HEAD = {"cpu": "8", "memory": "16Gi"}
CLAIM = "network-devices"
MEGASCALE_PORT = "9915"
_MOUNT_OPTIONS = "implicit-dirs,uid=1000,gid=1000,dir-mode=775,file-mode=664"
_DASHBOARD = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def make_ray_cluster(needs: Wanted, python: str) -> list[Document]:
    """Return the RayCluster; for network devices, also the template of their claims. If `needs`
    names a bucket, the RayCluster mounts it at /data.

    Args:
        needs: the cluster with its slices.
        python: the minor version of the caller's Python, which Ray's must equal: "3.12".
    """
    image = f"{IMAGE}-py{python.replace('.', '')}"
    groups = [
        _make_group(needs, topology, count, image)
        for topology, count in Counter(needs.slices).items()
    ]
    ports = [{"containerPort": port, "name": name} for name, port in _DASHBOARD.items()]
    resources = {"requests": HEAD, "limits": HEAD}
    container = {"name": "ray-head", "image": image, "ports": ports, "resources": resources}
    head = _make_template(needs, container)
    spec = {"headGroupSpec": {"rayStartParams": {}, "template": head}, "workerGroupSpecs": groups}
    meta = {"name": needs.name, "namespace": needs.namespace}
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": meta, "spec": spec}
    if not needs.networks:
        return [cluster]
    exactly = {"deviceClassName": DEVICE_CLASS, "allocationMode": "All"}
    devices = {"devices": {"requests": [{"name": "network", "exactly": exactly}]}}
    claim = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": CLAIM, "namespace": needs.namespace},
        "spec": {"spec": devices},
    }
    return [claim, cluster]


def _make_group(needs: Wanted, topology: Topology, count: int, image: str) -> Document:
    chips = count_chips(topology)
    variables = {"JAX_PLATFORMS": "tpu,cpu"} if topology.kind == "tpu" else {}
    if topology.kind == "tpu" and count > 1:
        variables |= {"MEGASCALE_NUM_SLICES": str(count), "MEGASCALE_PORT": MEGASCALE_PORT}
    has_claims = needs.networks and topology.kind == "tpu"
    resources: Document = {"requests": {"cpu": "8", "memory": "32Gi"} | chips, "limits": chips}
    container: Document = {
        "name": "ray-worker",
        "image": f"{image}-tpu" if topology.kind == "tpu" else image,
        "resources": resources | ({"claims": [{"name": "network"}]} if has_claims else {}),
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    template = _make_template(needs, container)
    template["spec"]["nodeSelector"] = select_nodes(topology)
    if has_claims:
        claims = [{"name": "network", "resourceClaimTemplateName": CLAIM}]
        template["spec"]["resourceClaims"] = claims
    return {
        "groupName": topology.name.replace(":", "-"),
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        "numOfHosts": topology.hosts,
        "rayStartParams": {},
        "template": template,
    }


def _make_template(needs: Wanted, container: Document) -> Document:
    mounts = [{"name": "dshm", "mountPath": "/dev/shm"}]
    volumes: list[Document] = [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]
    if needs.bucket:
        attributes = {"bucketName": needs.bucket, "mountOptions": _MOUNT_OPTIONS}
        csi = {"driver": GCSFUSE_DRIVER, "volumeAttributes": attributes}
        mounts.append({"name": "data", "mountPath": "/data"})
        volumes.append({"name": "data", "csi": csi})
    container = container | {"volumeMounts": mounts}
    spec = {"serviceAccountName": ACCOUNT, "containers": [container], "volumes": volumes}
    return {"metadata": {"annotations": GCSFUSE if needs.bucket else {}}, "spec": spec}
