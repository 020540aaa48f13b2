"""The JobSet of a job with a single controller: Pathways' own pods, merged with kinetic's.

In: a plan, `PodSettings`, the template of the pod that runs the function. Out: the replicated Jobs
of a JobSet and its policies, as plain documents.

The head's pod runs the function together with Pathways' resource manager and proxy; the pods of the
slices run Pathways' workers and none of the user's code. Google's builder renders their images and
arguments, and this module adds the fields of all kinetic pods. The builder imports JAX and the
kubernetes package, so it is loaded for these jobs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kinetic._backends.base import Document
from kinetic._backends.kubernetes.observed import EXCLUSIVE, PATHWAYS_WORKERS
from kinetic._backends.kubernetes.pods import CONTAINER, PodSettings, escape_text
from kinetic._core import layout
from kinetic._core.plan import BUCKETS, Plan
from kinetic.errors import PreflightError

MISSING = (
    'controller="single" needs a package that describes Pathways\' pods. Install it: pip install '
    "'pathwaysutils[gke]'."
)
_WORKER_STARTS = 4
"""Most starts of a worker in one attempt; if they do not suffice, its slice counts as lost."""
_CONTAINERS = {
    "server": "pathways-rm",
    "proxy-server": "pathways-proxy",
    "worker": "pathways-worker",
}
"""The containers of Pathways' components."""
_IDLE = (
    "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
    "signal.sigwait([signal.SIGTERM])"
)
"""The program that replaces Pathways' programs if the chips are simulated."""


def spec(
    plan: Plan,
    settings: PodSettings,
    head: Document,
    worker: Document,
    head_rules: list[Document],
) -> Document:
    """Return the spec of the JobSet.

    Args:
        plan: the job's plan.
        settings: the settings of its pods.
        head: the template of the pod that runs the function.
        worker: fields to merge into the template of the pods with chips.
        head_rules: the rules for failures of the head's pod.

    Raises:
        PreflightError: the builder is not installed.
    """
    built: Document = _build_jobset(plan, settings)["spec"]
    for replicated in built["replicatedJobs"]:
        is_worker = replicated["name"] == PATHWAYS_WORKERS
        job = replicated["template"]
        theirs = job["spec"]["template"]
        if is_worker:
            job["spec"]["template"] = _merge_documents(theirs, worker)
        else:
            job["spec"]["template"] = _with_function(theirs, head)
            job["spec"]["podFailurePolicy"] = {"rules": head_rules}
        _add_flags(job["spec"]["template"]["spec"], plan.options.pathways_flags)
        job["metadata"] = _merge_documents(
            job["metadata"], {"labels": worker["metadata"]["labels"]}
        )
        if settings.simulated:
            _simulate(job, settings)
    return built


def check(settings: PodSettings) -> None:
    """Refuse a store that Pathways cannot write to.

    Raises:
        PreflightError: the store is not a bucket.
    """
    if not settings.simulated and not settings.store_uri.startswith(BUCKETS):
        raise PreflightError(
            'controller="single" needs a store in a bucket, to which Pathways writes compiled '
            f"programs, but the store is {settings.store_uri}. Set KINETIC_STORE=gs://BUCKET."
        )


def _build_jobset(plan: Plan, settings: PodSettings) -> dict[str, Any]:
    try:
        from pathwaysutils.experimental.gke.jobset import PathwaysJobSet
    except ImportError as error:
        raise PreflightError(MISSING) from error
    topology, elastic = plan.topology, plan.elastic_controller
    attempts = 1 + (plan.options.retries if elastic is None else elastic.max_failures)
    workload = PathwaysJobSet(
        name=plan.job_id,
        namespace=plan.place.namespace,
        pathways_dir=f"{settings.store_uri.rstrip('/')}/{layout.JobKeys(plan.job_id).pathways}",
        tpu_type=topology.machine_type,
        topology=topology.shape_text,
        num_slices=plan.options.most_slices,
        max_slice_restarts=_WORKER_STARTS * attempts,
        # The most slices that may be lost at a time; at least 1, so that a job can wait for one.
        elastic_slices=0 if elastic is None else max(elastic.most - elastic.least, 1),
        pathways_version=settings.pathways_version,
        head_pod_spec_kwargs={"node_selector": None},
    )
    workload.add_user_workload(settings.image, ["true"], name=CONTAINER)
    jobset: dict[str, Any] = workload.to_dict()
    return jobset


def _with_function(theirs: Document, head: Document) -> Document:
    """Replace the builder's container by kinetic's. Keep its variables with the proxy's address."""
    (placeholder,) = theirs["spec"]["containers"]
    (container,) = head["spec"]["containers"]
    variables = [*placeholder["env"], *container["env"]]
    spec = head["spec"] | {"containers": [container | {"env": variables}]}
    return _merge_documents(theirs, head | {"spec": spec})


def _merge_documents(theirs: Document, ours: Document) -> Document:
    """Return `theirs`, updated with `ours`: JSON objects are merged, other values replaced."""
    merged = dict(theirs)
    for name, value in ours.items():
        before = merged.get(name)
        both = isinstance(before, dict) and isinstance(value, dict)
        merged[name] = _merge_documents(before, value) if both and before is not None else value
    return merged


def _add_flags(pod: Document, flags: Mapping[str, list[str]]) -> None:
    """Add the user's arguments after the builder's: of two equal flags, the last one counts."""
    by_container = {_CONTAINERS[component]: values for component, values in flags.items()}
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind, ()):
            if values := by_container.get(container["name"]):
                container["args"] = [*container.get("args", ()), *map(escape_text, values)]


def _simulate(job: Document, settings: PodSettings) -> None:
    """Replace Pathways' programs by idle processes that run on any node."""
    for holder in (job, job["spec"]["template"]):
        holder["metadata"].get("annotations", {}).pop(EXCLUSIVE, None)
    pod = job["spec"]["template"]["spec"]
    pod.pop("nodeSelector", None)
    if all(container["name"] != CONTAINER for container in pod["containers"]):
        pod.pop("volumes", None)
    for kind in ("initContainers", "containers"):
        pod[kind] = [
            container if container["name"] == CONTAINER else _idle_container(container, settings)
            for container in pod.get(kind, ())
        ]


def _idle_container(container: Document, settings: PodSettings) -> Document:
    fields = {name: container[name] for name in ("name", "restartPolicy") if name in container}
    return fields | {"image": settings.image, "command": [settings.python, "-c", _IDLE]}
