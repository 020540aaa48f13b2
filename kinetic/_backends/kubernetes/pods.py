"""The pod template of hosts, for Jobs and JobSets.

In: a plan, `PodSettings`, the name of its workload. Out: a pod template, as a plain document. Pure.

This module must not set TPU_* or MEGASCALE_* variables: the cluster's webhooks inject them, unless
a pod has its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from kinetic._backends.base import Document
from kinetic._backends.kubernetes import names, volumes
from kinetic._backends.kubernetes.nodes import (
    GPU,
    GPU_LABEL,
    POOL_LABEL,
    RESERVATION_LABEL,
    SPOT_LABEL,
    TOPOLOGY_LABEL,
    TPU,
    TPU_LABEL,
)
from kinetic._backends.kubernetes.observed import (
    DEFAULT_CONTAINER,
    HEAD,
    HOSTS,
    JOB_INDEX_LABEL,
    PATHWAYS_HEAD,
    RESTART_LABEL,
)
from kinetic._core.plan import Plan
from kinetic._core.values import dataclass
from kinetic._core.variables import select_start_variables

CONTAINER = "kinetic"
_RESERVATION_PROJECT = "cloud.google.com/reservation-project"
_RESERVATION_AFFINITY = "cloud.google.com/reservation-affinity"
PORT = 7777
"""The port on which the leader's pod serves the gang."""
DEBUG_PORT = 5678
POD_INDEX = "batch.kubernetes.io/job-completion-index"
LEAST_GRACE_S = 30
GRACE_MARGIN_S = 10
"""Seconds added to the function's grace period for the agent's last reports."""
SECRETS = {"KINETIC_TOKEN": "token", "KINETIC_TLS_CERTIFICATE": "tls.crt"}
KEY = {"KINETIC_TLS_KEY": "tls.key"}
"""The gang's secrets, as environment variables, each with its key in the job's Secret. All hosts
get `SECRETS`; only the leader gets `KEY`, the certificate's private key."""
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""The capabilities needed to install packages, and to end the processes of a function."""
MOUNT_CAPABILITY = "SETFCAP"
"""The capability to enter a user namespace, in which hosts mount data at fixed paths."""
HEAD_REQUESTS = {"cpu": "1", "memory": "1Gi"}
"""Resource requests of an elastic job's head, which only keeps a connection to each host."""


@dataclass(frozen=True)
class PodSettings:
    """The settings of pods that are not in the plan.

    Attributes:
        image: the pods' image.
        store_uri: the address of the store for pods.
        python: the interpreter in the image.
        bootstrap: the program that turns a bare pod into a host; "" if the image contains kinetic.
        variables: variables for the bootstrap, or for the image.
        simulated: whether virtual devices of the processor replace chips.
        service_account: the account if the plan names none; "" for the namespace's default.
        head_pool: the node pool for the pod of a single controller, or the head of an elastic job;
            "" for any.
        pathways_version: the tag of Pathways' own images.
    """

    image: str
    store_uri: str
    python: str = "python3"
    bootstrap: str = field(default="", repr=False)
    variables: Mapping[str, str] = field(default_factory=dict)
    simulated: bool = False
    service_account: str = "kinetic"
    head_pool: str = ""
    pathways_version: str = "latest"


def workload_name(plan: Plan) -> str:
    """Return the name of all objects of a job."""
    return names.workload_of(plan.job_id)


def leading_job(plan: Plan) -> str:
    """Return the name of the replicated Job whose first pod leads the gang."""
    if plan.has_head:
        return HEAD
    return PATHWAYS_HEAD if plan.has_single_controller else HOSTS


def secret_key(variable: str) -> str:
    """Return the key under which the job's Secret object has the value of this variable."""
    return f"env.{variable}"


def labels(plan: Plan) -> Document:
    """Return the labels of all objects of a job."""
    return names.labels_of(plan.job_id)


def remarks(plan: Plan) -> Document:
    """Return the annotations of all objects of a job."""
    return {"kinetic.dev/name": plan.name}


def template(
    plan: Plan, settings: PodSettings, *, in_jobset: bool, is_head: bool = False
) -> Document:
    """Return the pod template of a plan's hosts; with `is_head`, that of the plan's head."""
    buckets = () if is_head else volumes.buckets(plan)
    on_chips = not (plan.has_single_controller or is_head)
    own: Document = {DEFAULT_CONTAINER: CONTAINER} | (volumes.GCSFUSE if buckets else {})
    mounted = [
        *buckets,
        *(() if is_head else volumes.local(plan, simulated=settings.simulated)),
        *(() if is_head else volumes.shared_memory(plan)),
        *(
            [volumes.key_of_leader(workload_name(plan), *KEY.values())]
            if _shares_template(plan, in_jobset=in_jobset)
            else ()
        ),
    ]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(
            LEAST_GRACE_S, math.ceil(plan.limits.grace_s) + GRACE_MARGIN_S
        ),
        **_place_pod(plan, settings, on_chips=on_chips),
        "containers": [
            _container(
                plan,
                settings,
                [mounted_volume.mount for mounted_volume in mounted],
                in_jobset=in_jobset,
                is_head=is_head,
            )
        ],
        "volumes": [mounted_volume.volume for mounted_volume in mounted],
        "resourceClaims": [
            {"name": name, "resourceClaimTemplateName": workload_name(plan)}
            for name in (() if is_head else _claims(plan, settings))
        ],
    }
    return {"metadata": _metadata(plan, own), "spec": _drop_empty(spec)}


def with_chips(plan: Plan, settings: PodSettings) -> Document:
    """Return the pod-template fields that place another program's pods on the plan's chips."""
    spec = _place_pod(plan, settings, on_chips=True)
    return {"metadata": _metadata(plan, {}), "spec": _drop_empty(spec)}


def _metadata(plan: Plan, own: Document) -> Document:
    # Without it, an autoscaler could remove the node, evict its pods and so end the function.
    stays: Document = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    return {"labels": labels(plan), "annotations": remarks(plan) | stays | own}


def _place_pod(plan: Plan, settings: PodSettings, *, on_chips: bool) -> Document:
    machines = {"nodeSelector": _selector(plan), "tolerations": _tolerations(plan)}
    head: Document = {
        "nodeSelector": {POOL_LABEL: settings.head_pool} if settings.head_pool else {}
    }
    return {
        "enableServiceLinks": False,  # keeps services out of the function's environment
        "serviceAccountName": plan.place.service_account or settings.service_account,
        **({} if plan.place.service_account else {"automountServiceAccountToken": False}),
        "priorityClassName": "" if plan.place.queue else plan.options.priority or "",
        **({} if settings.simulated else machines if on_chips else head),
    }


def _container(
    plan: Plan,
    settings: PodSettings,
    mounts: list[Document],
    *,
    in_jobset: bool,
    is_head: bool,
) -> Document:
    run = (
        ["-c", escape_text(settings.bootstrap)] if settings.bootstrap else ["-m", "kinetic.runner"]
    )
    ports: list[Document] = [{"name": "gang", "containerPort": PORT}]
    if plan.options.debug:
        ports.append({"name": "debugpy", "containerPort": DEBUG_PORT})
    return _drop_empty(
        {
            "name": CONTAINER,
            "image": settings.image,
            "command": [settings.python, *run],
            "env": _env(plan, settings, in_jobset=in_jobset, is_head=is_head),
            "ports": ports,
            "resources": {"requests": dict(HEAD_REQUESTS)}
            if is_head
            else _resources(plan, settings),
            "securityContext": _security(plan, is_head=is_head),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }
    )


def _shares_template(plan: Plan, *, in_jobset: bool) -> bool:
    """True if the leader's pod has the same template as other hosts' pods."""
    return in_jobset and not (plan.has_head or plan.has_single_controller)


def _security(plan: Plan, *, is_head: bool) -> Document:
    """Return the security context: the rights that installs and functions need, or `privileged`."""
    if plan.options.privileged and not is_head:
        return {"privileged": True}
    context: Document = {"allowPrivilegeEscalation": False}
    if is_head or not volumes.are_bound_by_hosts(plan):
        context["capabilities"] = {"drop": ["ALL"], "add": [*ROOT_CAPABILITIES]}
        context["seccompProfile"] = {"type": "RuntimeDefault"}  # forbids user namespaces
    else:
        context["capabilities"] = {"drop": ["ALL"], "add": [*ROOT_CAPABILITIES, MOUNT_CAPABILITY]}
    return context


def escape_text(text: str) -> str:
    """Escape text for a field in which the cluster replaces $(NAME) by a variable and $$ by $."""
    return text.replace("$", "$$")


def _drop_empty(document: Document) -> Document:
    empty: tuple[object, ...] = ("", [], {})
    return {name: value for name, value in document.items() if value not in empty}


# -- the environment -------------------------------------------------------------------------------


def _env(plan: Plan, settings: PodSettings, *, in_jobset: bool, is_head: bool) -> list[Document]:
    workload = workload_name(plan)
    single = plan.has_single_controller
    leader = f"{workload}-{leading_job(plan)}-0-0.{workload}" if in_jobset else "127.0.0.1"
    literals = {
        **({} if is_head else select_start_variables(plan.options.env)),
        "KINETIC_JOB_ID": plan.job_id,
        "KINETIC_HOSTS": str(plan.hosts),
        "KINETIC_HOSTS_PER_SLICE": str(1 if single else plan.topology.hosts),
        "KINETIC_STORE": settings.store_uri,
        "KINETIC_COORDINATOR": f"{leader}:{PORT}",
        "KINETIC_JOIN_TIMEOUT_S": f"{plan.limits.start_timeout_s:g}",
        "KINETIC_TEE": "1",
    }
    if plan.has_head:
        literals["KINETIC_ROLE"] = "head" if is_head else "host"
    if settings.simulated:
        literals["KINETIC_SIMULATED"] = "1"
    if plan.options.debug:
        literals["KINETIC_DEBUG_PORT"] = str(DEBUG_PORT)
    folder = "" if is_head else volumes.local_folder(plan)
    if folder:
        literals[volumes.LOCAL_DIR] = folder
    fields = {
        "KINETIC_HOST_ADDRESS": "status.podIP",
        "KINETIC_POD_INDEX": f"metadata.annotations['{POD_INDEX}']",
    }
    if in_jobset:
        fields["KINETIC_JOB_INDEX"] = f"metadata.labels['{JOB_INDEX_LABEL}']"
        fields["KINETIC_RESTARTS"] = f"metadata.labels['{RESTART_LABEL}']"
    else:
        literals["KINETIC_JOB_INDEX"] = "0"
    literals |= settings.variables
    gang = SECRETS
    if _shares_template(plan, in_jobset=in_jobset):
        literals[volumes.KEY_DIR] = volumes.KEY_FOLDER
    elif is_head or not plan.has_head:
        gang = SECRETS | KEY
    own = literals.keys() | fields.keys() | KEY.keys() | {volumes.KEY_DIR}
    secret = {name: secret_key(name) for name in plan.secrets if name not in own} | gang
    return [
        *({"name": n, "value": escape_text(value)} for n, value in literals.items()),
        *(
            {"name": n, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for n, path in fields.items()
        ),
        *(
            {"name": n, "valueFrom": {"secretKeyRef": {"name": workload, "key": key}}}
            for n, key in secret.items()
        ),
    ]


# -- machines --------------------------------------------------------------------------------------


def _selector(plan: Plan) -> Document:
    topology = plan.topology
    selector: Document = {}
    if topology.kind == "tpu":
        selector = {TPU_LABEL: topology.gke_accelerator, TOPOLOGY_LABEL: topology.shape_text}
    elif topology.kind == "gpu":
        selector = {GPU_LABEL: topology.gke_accelerator}
    if topology.spot:
        selector[SPOT_LABEL] = "true"
    if plan.options.reservation:
        selector |= _reservation(plan.options.reservation)
    return selector


def _reservation(reservation: str) -> Document:
    """Return the labels of nodes in a reservation. Of a reservation with its project,
    `projects/P/reservations/R`, they also let GKE create nodes in it for the pods."""
    project, _, name = reservation.removeprefix("projects/").rpartition("/reservations/")
    shared = {_RESERVATION_PROJECT: project, _RESERVATION_AFFINITY: "specific"}
    return {RESERVATION_LABEL: name} | (shared if project else {})


def _tolerations(plan: Plan) -> list[Document]:
    tolerations: list[Document] = []
    if resource := _resource(plan):
        tolerations.append({"key": resource, "operator": "Exists", "effect": "NoSchedule"})
    if plan.topology.spot:
        tolerations.append(
            {"key": SPOT_LABEL, "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    return tolerations


def _resources(plan: Plan, settings: PodSettings) -> Document:
    """Return the resources of a host: all chips and network devices of a machine, and the CPU and
    memory that the plan asks for."""
    amounts = {"cpu": plan.options.cpu or "", "memory": plan.options.memory or ""}
    if settings.simulated or plan.has_single_controller:
        return _drop_empty({"requests": _drop_empty(amounts)})
    resource = _resource(plan)
    chips = {resource: str(plan.topology.chips_per_host)} if resource else {}
    claims = [{"name": name} for name in _claims(plan, settings)]
    requests = chips | _drop_empty(
        amounts | {"memory": amounts["memory"] or volumes.folder_memory(plan)}
    )
    return _drop_empty({"limits": chips, "requests": requests, "claims": claims})


def _claims(plan: Plan, settings: PodSettings) -> list[str]:
    """Return the names of the resource claims that each pod makes."""
    return [volumes.NETWORK] if plan.options.network_devices and not settings.simulated else []


def _resource(plan: Plan) -> str:
    return {"tpu": TPU, "gpu": GPU}.get(plan.topology.kind, "")
