"""JobSet, which starts hosts together, and Kueue, which queues jobs: their state in a cluster.

In: an `Api`, the name of a queue. Out: `JobSets`, `Queues`: versions, whether the cluster accepts a
JobSet as kinetic makes it, whether the queue exists. For the doctor; nothing is created.
No call of the API reports the installed version, so it is read from the controller's image, if
that is allowed. What counts is the trial.
"""

from __future__ import annotations

import contextlib
import re

from kinetic._backends.kubernetes import manifests
from kinetic._backends.kubernetes.api import Api
from kinetic._backends.kubernetes.errors import Refused
from kinetic._backends.kubernetes.observed import Document
from kinetic._backends.kubernetes.pods import PodSettings
from kinetic._backends.kubernetes.resources import (
    DEPLOYMENTS,
    JOBSETS,
    LOCAL_QUEUES,
    QUEUE_WORKLOADS,
    Resource,
)
from kinetic._core.accelerators.resolve import resolve
from kinetic._core.options import Options
from kinetic._core.place import JOBSET, Place
from kinetic._core.plan import Blob, Plan, Versions
from kinetic._core.values import dataclass
from kinetic.errors import BackendUnavailable, KineticError, NotFound, PreflightError

_JOBSET_AT = ("jobset-system", "jobset-controller-manager")
_KUEUE_AT = ("kueue-system", "kueue-controller-manager")
"""Namespace and Deployment of the manifests that both projects publish."""
_NO_CONTROLLER = (
    "only their definition is installed. No controller has filled in what a JobSet leaves open, so "
    "none would start its hosts"
)
"""A controller's webhook sets `spec.successPolicy`, which has no default in the definition."""
_VERSION = re.compile(r":v?(\d+\.\d+[\w.-]*)(?:@|$)")


@dataclass(frozen=True)
class JobSets:
    """JobSet in a cluster.

    Attributes:
        is_installed: whether the cluster knows JobSets.
        version: of the controller, such as 0.10.1; "" when unknown.
        fault: why a JobSet of two hosts would be refused; "" if it would not, or that is unknown.
        is_old: whether it is accepted only without fields that JobSet has since 0.10.
    """

    is_installed: bool = False
    version: str = ""
    fault: str = ""
    is_old: bool = False


@dataclass(frozen=True)
class Queues:
    """Kueue in a cluster.

    Attributes:
        is_installed: whether the cluster knows Kueue's Workloads.
        version: of the controller; "" when unknown.
        queue: the configured queue, or "".
        has_queue: whether it exists in the namespace; None if unknown.
        stopped: why it admits no jobs now, or "".
    """

    is_installed: bool = False
    version: str = ""
    queue: str = ""
    has_queue: bool | None = None
    stopped: str = ""


def queue_workloads(api: Api) -> Resource | None:
    """Return Kueue's Workloads in the version that a cluster has, or None if Kueue is not
    installed."""
    return next((kind for kind in QUEUE_WORKLOADS if api.knows(kind)), None)


def jobsets(api: Api) -> JobSets:
    """Look for JobSet, and try it out."""
    if not api.knows(JOBSETS):
        return JobSets()
    version = _version(api, *_JOBSET_AT)
    document = _trial()
    try:
        fault = _refusal(api, document)
        is_old = manifests.MESSAGE_PATTERNS in fault
        if is_old:
            fault = _refusal(api, manifests.without_messages(document))
    except BackendUnavailable as error:
        fault, is_old = str(error), False
    return JobSets(True, version, fault, is_old)


def queues(api: Api, queue: str) -> Queues:
    """Look for Kueue, and for a queue if one is named."""
    workloads = queue_workloads(api)
    if workloads is None:
        return Queues(queue=queue)
    version = _version(api, *_KUEUE_AT)
    if not queue:
        return Queues(True, version)
    kind = next(kind for kind in LOCAL_QUEUES if kind.version == workloads.version)
    try:
        found = api.get(kind, queue)
    except NotFound:
        return Queues(True, version, queue, has_queue=False)
    except PreflightError:
        return Queues(True, version, queue)
    return Queues(True, version, queue, has_queue=True, stopped=_why_stopped(found))


def _why_stopped(queue: Document) -> str:
    conditions = (queue.get("status") or {}).get("conditions") or ()
    active: Document = next((c for c in conditions if c.get("type") == "Active"), {})
    if active.get("status", "True") == "True":
        return ""
    said = active.get("message") or active.get("reason") or "no reason given"
    return " ".join(str(said).split()).rstrip(".")


def _version(api: Api, namespace: str, name: str) -> str:
    """The version in the tag of a controller's image."""
    with contextlib.suppress(KineticError):
        spec = api.get(DEPLOYMENTS, name, namespace=namespace)["spec"]["template"]["spec"]
        for container in spec.get("containers") or ():
            if found := _VERSION.search(str(container.get("image", ""))):
                return found[1]
    return ""


def _refusal(api: Api, document: Document) -> str:
    """Why the cluster would refuse an object, or ""."""
    try:
        made = api.create(JOBSETS, document, dry_run=True)
    except Refused as error:
        return str(error)
    except PreflightError:
        return ""  # Permissions are checked separately.
    return "" if "successPolicy" in made["spec"] else _NO_CONTROLLER


def _trial() -> Document:
    """The JobSet of a job of two hosts."""
    plan = Plan(
        job_id="job-00000000",
        name="kinetic doctor",
        place=Place(JOBSET),
        options=Options(resolve("cpu"), slices=2, retries=1),
        payload=Blob("0" * 64, 0),
        versions=Versions("3.11", "3", "0"),
        created_at=0.0,
    )
    return manifests.render(plan, PodSettings(image="none", store_uri="gs://doctor"))[0]
