"""The diagnosis of a job that does not run: from the cluster's objects to one finding.

In: `Observed`: the workload, its pods, Jobs and events, the nodes, Kueue's Workload, names of
secrets; and the time. Out: the most important `JobDiagnosis`, or None if nothing is wrong. Pure, so
any process gives the same diagnosis of the same objects.

A Job never says that it cannot run: it has one active pod and no condition, forever. The reason is
on the pod (no node, image, Secret), in events of the pod (volumes) or of the Job (quota,
admission), or on Kueue's Workload. Objects come before events, which only explain them: an event
remains for an hour after its cause has passed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from kinetic._backends.kubernetes import pod_failures, queueing, scheduling
from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import (
    IMAGE_REASONS,
    PATHWAYS_WORKERS,
    QUEUE_LABEL,
    Document,
    EventsOf,
    GangShape,
    Pod,
    PodSet,
    Stage,
    condition,
    current_pods,
    is_suspended,
    labels,
    metadata,
    shape_of,
)
from kinetic._backends.kubernetes.resources import seconds_of
from kinetic._core.quantities import amount_of
from kinetic._core.values import dataclass

__all__ = ["JobCause", "JobDiagnosis", "Observed", "diagnose"]

_HOPELESS_IMAGE = (
    "not found",
    "notfound",
    "denied",
    "unauthorized",
    "forbidden",
    "invalid",
    "couldn't parse",
    "no match for platform",
    "no matching manifest",
)
_NAMES = re.compile(r'"[^"]*"|\S*/\S*')
"""Names of images, repositories and servers in a message about an image."""
_HOPELESS_CONFIG = ("couldn't find key", "runAsNonRoot")
_ORDINARY = ("follower pod", "1 leader pod", "already exists", "object is being deleted")
"""Substrings of warnings that also appear when a gang starts normally."""
_REFUSED = ("is forbidden", "is invalid", "denied the request")
"""Substrings of the cluster's final refusals of a pod; other refusals are temporary."""
REFUSED_S = 30.0
"""A refusal of a pod counts as final after this many seconds. A Job retries its pods after 1, 2, 4,
8 and 16 s, and a webhook may not know a new Job at the first tries."""
_UNCHECKED = (
    "status unknown for quota",
    "not yet ready",
    "error looking up",
    "failed calling webhook",
)
"""Substrings of refusals which mean that the cluster was unable to check the pods."""
_MISSING = re.compile(r'(secret|configmap) "([^"]+)" not found')
_ACCOUNT = re.compile(r'service ?account "?([^"\s:]+)"? not found', re.IGNORECASE)
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<requested>.+?), used: (?P<used>.+?), "
    r"limited: (?P<limited>.+)$"
)


@dataclass(frozen=True)
class Observed:
    """The cluster's objects about a job. Everything but the workload is optional: without it the
    finding is less exact, but not wrong.

    Attributes:
        workload: the Job or JobSet.
        pods: its pods, and the last known version of those that were deleted.
        jobs: the Jobs that a JobSet created; needed once it has restarted them, or failed.
        events: the events of the workload, its Jobs and pods, by their names.
        nodes: the nodes of the cluster; None if the caller may not list them.
        queue_workload: Kueue's Workload of the job.
        earlier_jobs: the names of the jobs before this one in the queue, or None.
        own_secret: the name of the Secret that kinetic creates for the job.
    """

    workload: Document
    pods: Sequence[Document] = ()
    jobs: Sequence[Document] = ()
    events: EventsOf = lambda _: ()
    nodes: Sequence[Document] | None = None
    queue_workload: Document | None = None
    earlier_jobs: Sequence[str] | None = None
    own_secret: str = ""


def diagnose(
    observed: Observed, now: float | None = None, *, scale_up_s: float = scheduling.SCALE_UP_S
) -> JobDiagnosis | None:
    """Return what keeps a job from running, or why it ended; None if the job runs or has succeeded.

    Args:
        observed: the cluster's objects about the job.
        now: seconds since the epoch by the cluster's clock; if None, no finding is called hopeless
            for lasting too long.
        scale_up_s: how long an autoscaler may take to say whether it adds nodes.
    """
    if condition(observed.workload, "Complete") or condition(observed.workload, "Completed"):
        return None
    workload = observed.workload
    pods = current_pods(workload, observed.pods)
    if is_suspended(workload) or queueing.was_evicted(observed.queue_workload):
        refusal = _not_queued(observed, now) if observed.queue_workload is None else None
        return refusal or queueing.why_suspended(
            workload, observed.queue_workload, observed.earlier_jobs
        )
    jobs = [workload, *observed.jobs]
    lost = pod_failures.why_stopped(jobs) or pod_failures.why_lost(pods)
    if lost is None and condition(workload, "Failed"):
        ended = [workload, *(job for job in observed.jobs if condition(job, "Failed"))]
        events = [e for job in ended for e in observed.events(metadata(job).get("name", ""))]
        lost = pod_failures.why_gone(jobs, events, pods)
    if lost is not None:
        return _make_final(workload, lost)
    if condition(workload, "Failed"):
        return _quote_failure(workload)
    finding = _find_stuck(observed, pods) or _not_created(observed, pods, now)
    if finding is not None:
        return finding
    finding = scheduling.why_unscheduled(
        workload, pods, observed.events, observed.nodes, now=now, scale_up_s=scale_up_s
    )
    return finding or _find_preparing(observed, pods)


def _make_final(workload: Document, finding: JobDiagnosis) -> JobDiagnosis:
    """Mark a finding as hopeless if the workload says that the job has failed for good."""
    if not condition(workload, "Failed") or finding.hopeless:
        return finding
    return JobDiagnosis(finding.kind, finding.sentence, True, finding.hosts)


def _quote_failure(workload: Document) -> JobDiagnosis:
    failed = condition(workload, "Failed") or {}
    message = failed.get("message") or failed.get("reason") or "no reason given"
    if PATHWAYS_WORKERS in message:
        text = f"Pathways' workers ended too often. The cluster says: {message}."
        return JobDiagnosis(JobCause.HOST_FAILED, text, True)
    return JobDiagnosis(
        JobCause.HOST_FAILED,
        f"The cluster says that the job failed: {message}. `kinetic jobs logs` may show why.",
        True,
    )


def _sort_events(observed: Observed, *names: str) -> list[Document]:
    """Return the events about objects, newest last."""
    return sorted((e for name in names for e in observed.events(name)), key=event_time)


def event_time(event: Document) -> str:
    """Return when an event last happened, as text; the field depends on the API that wrote it."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or metadata(event).get("creationTimestamp")
        or ""
    )


def first_event_time(event: Document) -> str:
    """Return when an event first happened, as text."""
    return str(event.get("firstTimestamp") or event.get("eventTime") or event_time(event))


# --- a pod has a node, but its program does not start


def _find_stuck(observed: Observed, pods: tuple[Pod, ...]) -> JobDiagnosis | None:
    starting = [pod for pod in pods if pod.stage is Stage.STARTING]
    # Only one pod's volume is checked: the check reads events, with a request for each pod.
    checks: tuple[tuple[Callable[[Observed, Pod], JobDiagnosis | None], list[Pod]], ...]
    checks = (_check_image, starting), (_check_config, starting), (_check_volume, starting[:1])
    for check, checked in checks:
        findings = [(pod.host, f) for pod in checked if (f := check(observed, pod)) is not None]
        if findings:
            first = findings[0][1]
            hosts = tuple(host for host, f in findings if f.kind is first.kind)
            return JobDiagnosis(first.kind, first.sentence, first.hopeless, hosts)
    return None


def _check_image(_observed: Observed, pod: Pod) -> JobDiagnosis | None:
    if pod.waiting_reason not in IMAGE_REASONS:
        return None
    message = (
        _shorten_text(pod.waiting_message.rpartition("ErrImagePull: ")[2]) or pod.waiting_reason
    )
    if pod.waiting_reason == "InvalidImageName":
        text = f'{pod.image!r} is not a valid image name: "{message}". Correct container_image=.'
        return JobDiagnosis(JobCause.IMAGE_PULL, text, hopeless=True)
    if pod.waiting_reason == "ErrImageNeverPull":
        advice = "Load the image onto the nodes, or let the cluster's policy allow pulls."
        text = f"The node {pod.node} does not have the image {pod.image} and may not pull it: "
        return JobDiagnosis(JobCause.IMAGE_PULL, f'{text}"{message}". {advice}', hopeless=True)
    text_without_names = _NAMES.sub("", message).lower()
    hopeless = any(words in text_without_names for words in _HOPELESS_IMAGE)
    advice = "Check container_image=, and that the nodes may read the repository."
    if "too many requests" in text_without_names:
        advice = "The cluster tries again; if it stays so, use a registry of your own."
    text = f'The image {pod.image} cannot be pulled: "{message}".'
    return JobDiagnosis(JobCause.IMAGE_PULL, f"{text} {advice}", hopeless)


def _check_config(observed: Observed, pod: Pod) -> JobDiagnosis | None:
    reason, message = pod.waiting_reason, pod.waiting_message
    if reason == "CreateContainerConfigError":
        return _find_missing(observed, message) or JobDiagnosis(
            JobCause.START_ERROR,
            f"{pod.called.capitalize()} cannot be set up: {_shorten_text(message)}. Correct the "
            "pod's settings, or the secrets and config maps that they name.",
            any(words in message for words in _HOPELESS_CONFIG),
        )
    if reason in ("CreateContainerError", "RunContainerError", "CrashLoopBackOff"):
        text = f"{pod.called.capitalize()} does not start ({reason}): {_shorten_text(message)}."
        return JobDiagnosis(JobCause.START_ERROR, text)
    return None


def _find_missing(observed: Observed, message: str) -> JobDiagnosis | None:
    """Return the finding that a Secret or ConfigMap is missing, if `message` names one."""
    named = _MISSING.search(message)
    if named is None:
        return None
    kind, name = named[1], named[2]
    if kind == "secret" and name == observed.own_secret:
        return _explain_own_secret(name)
    if kind == "secret":
        advice = "Create it, or remove it from the pod's settings."
        text = f"The secret {name} does not exist in the namespace of the job. {advice}"
        return JobDiagnosis(JobCause.MISSING_SECRET, text, hopeless=True)
    text = f"The config map {name} does not exist in the namespace of the job. Create it."
    return JobDiagnosis(JobCause.MISSING_VOLUME, text, hopeless=True)


def _explain_own_secret(name: str) -> JobDiagnosis:
    return JobDiagnosis(
        JobCause.MISSING_SECRET,
        f"The secret {name}, which the job's submission creates, does not exist yet. If the "
        "submission was interrupted, cancel the job and run it again.",
    )


def _check_volume(observed: Observed, pod: Pod) -> JobDiagnosis | None:
    """Return the finding about a pod's volume or node, from the pod's events: the pod's own status
    is ContainerCreating, as in every start."""
    if pod.waiting_reason not in ("", "ContainerCreating", "PodInitializing"):
        return None
    for event in reversed(_sort_events(observed, pod.name)):
        if event.get("reason") in ("Pulling", "Pulled", "Created", "Started"):
            return None  # Volumes are mounted before images are pulled.
        message = event.get("message") or ""
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            text = f"A volume of {pod.called} cannot be mounted: {_shorten_text(message)}."
            return _find_missing(observed, message) or JobDiagnosis(JobCause.MISSING_VOLUME, text)
        if event.get("reason") == "FailedCreatePodSandBox":
            text = f"The node {pod.node} cannot start pods: {_shorten_text(message)}."
            return JobDiagnosis(JobCause.START_ERROR, text)
    return None


# --- pods are missing


def _not_created(
    observed: Observed, pods: tuple[Pod, ...], now: float | None
) -> JobDiagnosis | None:
    shape, workload = shape_of(observed.workload), metadata(observed.workload)
    existing = {pod.host for pod in pods}
    missing = tuple(host for host in range(shape.hosts) if host not in existing)
    if not missing:
        return None
    status = observed.workload.get("status") or {}
    resumed = next(
        (
            str(entry.get("lastTransitionTime"))
            for entry in status.get("conditions") or ()
            if entry.get("type") == "Suspended" and entry.get("status") == "False"
        ),
        "",
    )
    uids = {metadata(job).get("uid") for job in (observed.workload, *observed.jobs)}

    def admitted_at(event: Document) -> str:
        """Return when the event's Job was last resumed by a queue, or its last pod was created."""
        about = f"{(event.get('involvedObject') or {}).get('name', '')}-"
        return max([resumed, *(p.created_at for p in pods if p.name.startswith(about))])

    name, of = str(workload.get("name", "")), shape.set_at(missing[0])
    job = f"{name}-{of.name}-{(missing[0] - of.first_host) // of.pods_each}" if of.name else name
    refused = [
        event
        for event in _sort_events(observed, *dict.fromkeys((name, job)))
        if event.get("reason") in ("FailedCreate", "JobCreationFailed")
        and (not status.get("restarts") or (event.get("involvedObject") or {}).get("uid") in uids)
        and not any(words in (event.get("message") or "") for words in _ORDINARY)
        and event_time(event) >= admitted_at(event)
    ]
    if not refused:
        return None
    last = refused[-1]
    message = (last.get("message") or "").removeprefix("Error creating: ")
    quota = _QUOTA.search(message)
    if quota is not None:
        return _over_quota(quota, shape.set_of_event(last), shape, missing)
    since = max(first_event_time(last), admitted_at(last))
    return _refusal(message, missing, is_lasting=_has_lasted(since, now))


def _has_lasted(since: str, now: float | None) -> bool:
    """True if a refusal that began at the time `since` has lasted long enough to be final."""
    seconds = seconds_of(since)
    return now is not None and seconds is not None and now - seconds >= REFUSED_S


def _not_queued(observed: Observed, now: float | None) -> JobDiagnosis | None:
    """Return why a queue has not created a Workload, from the job's events; None if unknown."""
    name, queue = metadata(observed.workload).get("name", ""), labels(observed.workload)
    warnings = [e for e in _sort_events(observed, name) if e.get("type") == "Warning"]
    if not warnings or QUEUE_LABEL not in queue:
        return None
    message = _shorten_text(warnings[-1].get("message") or "")
    final = "not found" in message and _has_lasted(first_event_time(warnings[-1]), now)
    text = f'The queue {queue[QUEUE_LABEL]!r} cannot take the job: "{message}".'
    if "PriorityClass" in message:
        text = f"{text} Change or remove priority=."
    return JobDiagnosis(JobCause.QUEUE_REFUSED, text, final)


def _over_quota(
    quota: re.Match[str], of: PodSet, shape: GangShape, missing: tuple[int, ...]
) -> JobDiagnosis:
    """Return the finding about a quota that refuses pods of a Job, or Jobs of a JobSet. If the
    quota is too small only for all of them together, some were admitted and wait for the rest."""
    counts_jobs = "jobs.batch" in quota["requested"]
    total = sum(s.replicas for s in shape.sets) if counts_jobs else of.pods
    least = total if not shape.is_elastic else 2 if counts_jobs else of.pods_each
    noun = "Job" if counts_jobs else "pod"
    allows = f"the quota allows {quota['limited']}"
    if _exceeds(quota, least):
        need = f"and each of its {least} {noun}s needs" if least > 1 else f"and a {noun} needs"
        text = f"The namespace's quota {quota['name']!r} is too small for the job: {allows}, "
        advice = "Ask for less, or have an administrator raise the quota."
        return JobDiagnosis(
            JobCause.QUOTA, f"{text}{need} {quota['requested']}. {advice}", True, missing
        )
    refused = "some Jobs" if counts_jobs else f"{len(missing)} pods"
    text = f"The namespace's quota {quota['name']!r} refuses {refused} of the job: {allows}, "
    need = f"{quota['used']} is used, and a {noun} needs {quota['requested']}"
    advice = "Other jobs must end first, or an administrator must raise the quota."
    return JobDiagnosis(JobCause.QUOTA, f"{text}{need}. {advice}", False, missing)


def _exceeds(quota: re.Match[str], number: int) -> bool:
    """True if `number` objects, each as large as the refused one, exceed the quota."""
    limits = dict(p.split("=", 1) for p in quota["limited"].split(",") if "=" in p)
    needs = dict(p.split("=", 1) for p in quota["requested"].split(",") if "=" in p)
    return any(number * amount_of(needs[k]) > amount_of(limits[k]) for k in needs.keys() & limits)


def _refusal(message: str, hosts: tuple[int, ...], *, is_lasting: bool) -> JobDiagnosis:
    account = _ACCOUNT.search(message)
    if account is not None:
        name = account[1].rpartition("/")[2]
        text = f"The service account {name!r} does not exist in the job's namespace."
        return JobDiagnosis(
            JobCause.SERVICE_ACCOUNT,
            f"{text} Create it, or set service_account=.",
            is_lasting,
            hosts,
        )
    is_unchecked = any(words in message for words in _UNCHECKED)
    final = is_lasting and not is_unchecked and any(words in message for words in _REFUSED)
    verb = "refuses the pods of the job" if final else "does not admit the pods at present"
    text = f"The cluster {verb}: {_shorten_text(message)}."
    return JobDiagnosis(JobCause.REFUSED, text, final, hosts)


# --- nothing is wrong, but the start takes time


def _find_preparing(observed: Observed, pods: tuple[Pod, ...]) -> JobDiagnosis | None:
    starting = [pod for pod in pods if pod.stage is Stage.STARTING]
    events = _sort_events(observed, starting[0].name) if starting else []
    if not events or events[-1].get("reason") != "Pulling":
        return None
    hosts = tuple(pod.host for pod in starting)
    text = f"The image {starting[0].image} is being pulled."
    return JobDiagnosis(JobCause.PREPARING, text, False, hosts)


def _shorten_text(text: str) -> str:
    one_line = " ".join(text.split()).rstrip(". ")
    return one_line if len(one_line) <= 400 else f"{one_line[:400]} …"
