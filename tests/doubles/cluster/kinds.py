"""The resources of the cluster, and the defaults of new objects."""

from __future__ import annotations

from dataclasses import dataclass

from doubles.cluster.objects import Object, clone


@dataclass(frozen=True)
class Resource:
    """One resource of the API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    counted: bool = False
    """True if its objects have a `metadata.generation`, which counts changes of the spec."""
    custom: bool = False
    """True if a custom resource definition defines it."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full(self) -> str:
        """The plural with its group, as in messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource("", "v1", "pods", "Pod", counted=True)
EVENTS = Resource("", "v1", "events", "Event")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SERVICES = Resource("", "v1", "services", "Service")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
JOBS = Resource("batch", "v1", "jobs", "Job", counted=True)
DEFINITIONS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    counted=True,
)
PRIORITIES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False
)
CSI_DRIVERS = Resource("storage.k8s.io", "v1", "csidrivers", "CSIDriver", namespaced=False)
CLAIM_TEMPLATES = Resource(
    "resource.k8s.io", "v1", "resourceclaimtemplates", "ResourceClaimTemplate"
)
DEVICE_CLASSES = Resource(
    "resource.k8s.io", "v1", "deviceclasses", "DeviceClass", namespaced=False, counted=True
)
CHECKPOINT_CONFIGURATIONS = Resource(
    "checkpointing.gke.io",
    "v1",
    "checkpointconfigurations",
    "CheckpointConfiguration",
    namespaced=False,
    counted=True,
    custom=True,
)
JOB_SETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", counted=True, custom=True)
KUEUE = "kueue.x-k8s.io"
WORKLOADS = Resource(KUEUE, "v1beta2", "workloads", "Workload", counted=True, custom=True)
LOCAL_QUEUES = Resource(KUEUE, "v1beta2", "localqueues", "LocalQueue", counted=True, custom=True)
CLUSTER_QUEUES = Resource(
    KUEUE, "v1beta2", "clusterqueues", "ClusterQueue", namespaced=False, counted=True, custom=True
)

ALWAYS = (
    PODS,
    EVENTS,
    SECRETS,
    CONFIG_MAPS,
    SERVICES,
    SERVICE_ACCOUNTS,
    QUOTAS,
    CLAIMS,
    NODES,
    NAMESPACES,
    JOBS,
    DEFINITIONS,
    PRIORITIES,
    CSI_DRIVERS,
    CLAIM_TEMPLATES,
    DEVICE_CLASSES,
)
QUEUES = (WORKLOADS, LOCAL_QUEUES, CLUSTER_QUEUES)

JOB_LABELS = "batch.kubernetes.io"
TRACKING = f"{JOB_LABELS}/job-tracking"
INDEX = f"{JOB_LABELS}/job-completion-index"


def with_defaults(resource: Resource, obj: Object) -> Object:
    """Return an object as the server stores it."""
    if resource is JOBS:
        return _job(obj)
    if resource is JOB_SETS:
        return _job_set(obj)
    if resource is PODS:
        return _pod(obj)
    if resource is SECRETS:
        return _secret(obj)
    return obj


def _secret(obj: Object) -> Object:
    import base64

    plain = obj.pop("stringData", None) or {}
    if plain:
        coded = {k: base64.b64encode(v.encode()).decode() for k, v in plain.items()}
        obj["data"] = (obj.get("data") or {}) | coded
    obj.setdefault("type", "Opaque")
    return obj


def _pod_spec(spec: Object) -> None:
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]:
        container.setdefault("resources", {})
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        latest = container.get("image", "").rpartition("/")[2].partition(":")[2] in ("", "latest")
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        for entry in container.get("env") or ():
            if "valueFrom" in entry and "fieldRef" in entry["valueFrom"]:
                entry["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")


def _job(obj: Object) -> Object:
    spec, labels = obj["spec"], {}
    uid, name = obj["metadata"]["uid"], obj["metadata"]["name"]
    if not spec.get("manualSelector"):
        labels = {
            f"{JOB_LABELS}/controller-uid": uid,
            f"{JOB_LABELS}/job-name": name,
            "controller-uid": uid,
            "job-name": name,
        }
        spec["selector"] = {"matchLabels": {f"{JOB_LABELS}/controller-uid": uid}}
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("backoffLimit", 6)
    spec["manualSelector"] = bool(spec.get("manualSelector"))
    template = spec["template"]
    template.setdefault("metadata", {})
    template["metadata"]["labels"] = (template["metadata"].get("labels") or {}) | labels
    _pod_spec(template["spec"])
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("suspend", False)
    policy = spec.get("podFailurePolicy")
    spec.setdefault("podReplacementPolicy", "Failed" if policy else "TerminatingOrFailed")
    for rule in (policy or {}).get("rules") or ():
        for pattern in rule.get("onPodConditions") or ():
            pattern.setdefault("status", "True")
    if not obj["metadata"].get("labels"):
        obj["metadata"]["labels"] = clone(template["metadata"]["labels"])
    obj["status"] = {}
    return obj


def _job_set(obj: Object) -> Object:
    spec = obj["spec"]
    network = spec.setdefault("network", {})
    network.setdefault("enableDNSHostnames", True)
    network.setdefault("publishNotReadyAddresses", True)
    spec.setdefault("startupPolicy", {}).setdefault("startupPolicyOrder", "AnyOrder")
    spec.setdefault("successPolicy", {}).setdefault("operator", "All")
    if "failurePolicy" in spec:
        spec["failurePolicy"].setdefault("restartStrategy", "Recreate")
    for replicated in spec.get("replicatedJobs") or ():
        replicated.setdefault("name", "")
        replicated.setdefault("replicas", 1)
        replicated.setdefault("groupName", "default")
        template = replicated["template"]
        template.setdefault("metadata", {})
        template["spec"].setdefault("completionMode", "Indexed")
        template["spec"]["template"].setdefault("metadata", {})
        template["spec"]["template"]["spec"].setdefault("restartPolicy", "OnFailure")
    obj.pop("status", None)
    return obj


def _pod(obj: Object) -> Object:
    spec = obj["spec"]
    _pod_spec(spec)
    for container in spec.get("containers") or ():
        limits = container["resources"].get("limits")
        if limits:
            requests = container["resources"].setdefault("requests", {})
            for name, amount in limits.items():
                requests.setdefault(name, amount)
    spec.setdefault("serviceAccountName", "default")
    spec["serviceAccount"] = spec["serviceAccountName"]
    tolerations = list(spec.get("tolerations") or ())
    for reason in ("not-ready", "unreachable"):
        key = f"node.kubernetes.io/{reason}"
        if not any(t.get("key") == key and t.get("effect") == "NoExecute" for t in tolerations):
            tolerations.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
            )
    wants_chips = any(
        "google.com/tpu" in (c["resources"].get("limits") or {}) for c in spec["containers"]
    )
    if wants_chips and not any(t.get("key") == "google.com/tpu" for t in tolerations):
        tolerations.append({"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"})
    spec["tolerations"] = tolerations
    spec.setdefault("priority", 0)
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    quality = "Burstable" if any(c["resources"] for c in spec["containers"]) else "BestEffort"
    obj["status"] = {"phase": "Pending", "qosClass": quality}
    return obj
