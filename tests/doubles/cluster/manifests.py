"""Small Jobs and JobSets for tests of the double: each runs a shell command."""

from __future__ import annotations

from typing import Any

from doubles.cluster.objects import Object

SELECTOR = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
    "cloud.google.com/gke-tpu-topology": "4x4",
}
TOPOLOGY = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}


def pod_template(
    command: str, *, env: dict[str, str] | None = None, grace_s: int = 1, **spec: Any
) -> Object:
    """Return a pod template with one container that runs a shell command; $IP is its address."""
    entries: list[Object] = [{"name": k, "value": v} for k, v in (env or {}).items()]
    entries.append({"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    container = {
        "name": "main",
        "image": "example/trainer:v1",
        "command": ["sh", "-c", command],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": entries,
    }
    if "resources" in spec:
        container["resources"] = spec.pop("resources")
    base = {"restartPolicy": "Never", "terminationGracePeriodSeconds": grace_s}
    return {"spec": base | {"containers": [container]} | spec}


def job(
    name: str,
    command: str,
    *,
    env: dict[str, str] | None = None,
    pod: Object | None = None,
    **spec: Any,
) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0}
        | spec
        | {"template": pod_template(command, env=env, **(pod or {}))},
    }


def job_set(
    name: str,
    command: str,
    *,
    hosts: int,
    slices: int = 1,
    env: dict[str, str] | None = None,
    **spec: Any,
) -> Object:
    """Return a JobSet with slices of `hosts` TPU hosts each."""
    chips = {"limits": {"google.com/tpu": "4"}}
    template = pod_template(command, env=env, nodeSelector=dict(SELECTOR), resources=chips)
    job_spec = {"parallelism": hosts, "completions": hosts, "completionMode": "Indexed"}
    job_spec |= {"backoffLimit": 0, "template": template}
    replicated = {"name": "host", "replicas": slices, "template": {"spec": job_spec}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "annotations": dict(TOPOLOGY)},
        "spec": {"network": {"enableDNSHostnames": True}} | spec | {"replicatedJobs": [replicated]},
    }
