"""Why a job is not running: from the cluster's objects to one finding.

In: `Observed`: the workload, its pods, Jobs and events, the nodes, Kueue's Workload, names of
secrets; and the time. Out: the most important `JobDiagnosis`, or None if there is nothing to say.
Pure, so any process says the same about the same objects.

A Job never says that it cannot run: it has one active pod and no condition, forever. Each reason is
somewhere else: on the pod (no node, image, Secret), in events of the pod (volumes) or of the Job
(quota, admission), or on Kueue's Workload. Objects are looked at first; events only explain them,
because they remain for an hour after their cause is gone.
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
"""Of images, repositories and servers, in what is said of an image."""
_HOPELESS_CONFIG = ("couldn't find key", "runAsNonRoot")
_ORDINARY = ("follower pod", "1 leader pod", "already exists", "object is being deleted")
"""Warnings during a normal start of a gang."""
_REFUSED = ("is forbidden", "is invalid", "denied the request")
"""In what a cluster says again each time; anything else passes."""
REFUSED_S = 30.0
"""A refusal is final once it has stood for this long: a Job's pods are tried again after 1, 2, 4, 8
and 16 s, and a webhook may not have heard of a new Job at the first of these."""
_UNSURE = (
    "status unknown for quota",
    "not yet ready",
    "error looking up",
    "failed calling webhook",
)
"""In refusals by a cluster that could not check."""
_MISSING = re.compile(r'(secret|configmap) "([^"]+)" not found')
_ACCOUNT = re.compile(r'service ?account "?([^"\s:]+)"? not found', re.IGNORECASE)
_QUOTA = re.compile(
    r"exceeded quota: (?P<name>[^,]+), requested: (?P<requested>.+?), used: (?P<used>.+?), "
    r"limited: (?P<limited>.+)$"
)


@dataclass(frozen=True)
class Observed:
    """What is known of a job. Only the workload is needed; what is unknown makes the finding less
    exact, never wrong.

    Attributes:
        workload: the Job or JobSet.
        pods: its pods, and the last version seen of those that are gone.
        jobs: the Jobs that a JobSet made; needed once it has started them again, or failed.
        events: of the workload, its Jobs and pods, by their names.
        nodes: of the cluster; None if they may not be listed.
        queue_workload: Kueue's Workload of the job.
        queue_position: how many jobs of the queue come before it, or None.
        own_secret: the name of the secret that kinetic makes for the job.
    """

    workload: Document
    pods: Sequence[Document] = ()
    jobs: Sequence[Document] = ()
    events: EventsOf = lambda _: ()
    nodes: Sequence[Document] | None = None
    queue_workload: Document | None = None
    queue_position: int | None = None
    own_secret: str = ""


def diagnose(
    observed: Observed, now: float | None = None, *, scale_up_s: float = scheduling.SCALE_UP_S
) -> JobDiagnosis | None:
    """Return what keeps a job from running, or ended it; None if it runs or has succeeded.

    Args:
        observed: what is known of the job.
        now: seconds since the epoch by the cluster's clock. Without it nothing is hopeless merely
            because it has taken long.
        scale_up_s: how long an autoscaler may take to say whether it adds nodes.
    """
    if condition(observed.workload, "Complete") or condition(observed.workload, "Completed"):
        return None
    workload = observed.workload
    pods = current_pods(workload, observed.pods)
    if is_suspended(workload) or queueing.was_evicted(observed.queue_workload):
        refusal = _not_queued(observed, now) if observed.queue_workload is None else None
        return refusal or queueing.why_suspended(
            workload, observed.queue_workload, observed.queue_position
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
    """A finding about a job that has failed for good is final."""
    if not condition(workload, "Failed") or finding.hopeless:
        return finding
    return JobDiagnosis(finding.kind, finding.sentence, True, finding.hosts)


def _quote_failure(workload: Document) -> JobDiagnosis:
    failed = condition(workload, "Failed") or {}
    message = failed.get("message") or failed.get("reason") or "no reason given"
    if PATHWAYS_WORKERS in message:
        text = f"Workers of Pathways ended too often. The cluster says: {message}."
        return JobDiagnosis(JobCause.HOST_FAILED, text, True)
    return JobDiagnosis(
        JobCause.HOST_FAILED, f"The cluster says that the job failed: {message}.", True
    )


def _sort_events(observed: Observed, *names: str) -> list[Document]:
    """Return the events about objects, newest last."""
    return sorted((e for name in names for e in observed.events(name)), key=event_time)


def event_time(event: Document) -> str:
    """Return when an event last happened; the field depends on which API wrote it."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or metadata(event).get("creationTimestamp")
        or ""
    )


def first_event_time(event: Document) -> str:
    """Return when an event first happened."""
    return str(event.get("firstTimestamp") or event.get("eventTime") or event_time(event))


# --- the pod has a node, and its program does not start


def _find_stuck(observed: Observed, pods: tuple[Pod, ...]) -> JobDiagnosis | None:
    starting = [pod for pod in pods if pod.stage is Stage.STARTING]
    # What events say of one pod goes for all: each costs a request.
    looks: tuple[tuple[Callable[[Observed, Pod], JobDiagnosis | None], list[Pod]], ...]
    looks = (_image, starting), (_config, starting), (_volume, starting[:1])
    for look, alike in looks:
        findings = [(pod.host, f) for pod in alike if (f := look(observed, pod)) is not None]
        if findings:
            first = findings[0][1]
            hosts = tuple(host for host, f in findings if f.kind is first.kind)
            return JobDiagnosis(first.kind, first.sentence, first.hopeless, hosts)
    return None


def _image(_observed: Observed, pod: Pod) -> JobDiagnosis | None:
    if pod.waiting_reason not in IMAGE_REASONS:
        return None
    message = (
        _shorten_text(pod.waiting_message.rpartition("ErrImagePull: ")[2]) or pod.waiting_reason
    )
    if pod.waiting_reason == "InvalidImageName":
        text = f"{pod.image} is not the name of an image: {message}. Correct container_image=."
        return JobDiagnosis(JobCause.IMAGE_PULL, text, hopeless=True)
    if pod.waiting_reason == "ErrImageNeverPull":
        advice = "Load it onto the nodes, or let the cluster's policy allow pulls."
        text = f"The node {pod.node} does not have the image {pod.image}, and may not pull it: "
        return JobDiagnosis(JobCause.IMAGE_PULL, f"{text}{message}. {advice}", hopeless=True)
    text_without_names = _NAMES.sub("", message).lower()
    hopeless = any(words in text_without_names for words in _HOPELESS_IMAGE)
    advice = "Check container_image=, and that the nodes may read the repository."
    text = f"The image {pod.image} cannot be pulled: {message}."
    return JobDiagnosis(JobCause.IMAGE_PULL, f"{text} {advice}", hopeless)


def _config(observed: Observed, pod: Pod) -> JobDiagnosis | None:
    reason, message = pod.waiting_reason, pod.waiting_message
    if reason == "CreateContainerConfigError":
        return _find_missing(observed, message) or JobDiagnosis(
            JobCause.START_ERROR,
            f"{pod.called.capitalize()} cannot be set up: {_shorten_text(message)}.",
            any(words in message for words in _HOPELESS_CONFIG),
        )
    if reason in ("CreateContainerError", "RunContainerError", "CrashLoopBackOff"):
        text = f"{pod.called.capitalize()} does not start: {reason}: {_shorten_text(message)}."
        return JobDiagnosis(JobCause.START_ERROR, text)
    return None


def _find_missing(observed: Observed, message: str) -> JobDiagnosis | None:
    """A Secret or ConfigMap that a pod needs and that does not exist."""
    named = _MISSING.search(message)
    if named is None:
        return None
    kind, name = named[1], named[2]
    if kind == "secret" and name == observed.own_secret:
        return _explain_own_secret(name)
    if kind == "secret":
        advice = "Create it, or take it out of the pod's settings."
        text = f"The secret {name} does not exist in the namespace of the job. {advice}"
        return JobDiagnosis(JobCause.MISSING_SECRET, text, hopeless=True)
    text = f"The config map {name} does not exist in the namespace of the job. Create it."
    return JobDiagnosis(JobCause.MISSING_VOLUME, text, hopeless=True)


def _explain_own_secret(name: str) -> JobDiagnosis:
    return JobDiagnosis(
        JobCause.MISSING_SECRET,
        f"The job's own secret {name} is not there: its submission is going on, or was "
        "interrupted. If nothing submits it any more, cancel the job and run it again.",
    )


def _volume(observed: Observed, pod: Pod) -> JobDiagnosis | None:
    """The status says ContainerCreating, as for every starting pod: only events say more."""
    if pod.waiting_reason not in ("", "ContainerCreating", "PodInitializing"):
        return None
    for event in reversed(_sort_events(observed, pod.name)):
        if event.get("reason") in ("Pulling", "Pulled", "Created", "Started"):
            return None  # volumes come before images
        message = event.get("message") or ""
        if event.get("reason") in ("FailedMount", "FailedAttachVolume"):
            text = f"A volume of {pod.called} cannot be mounted: {_shorten_text(message)}."
            return _find_missing(observed, message) or JobDiagnosis(JobCause.MISSING_VOLUME, text)
        if event.get("reason") == "FailedCreatePodSandBox":
            text = f"The node {pod.node} cannot start pods: {_shorten_text(message)}."
            return JobDiagnosis(JobCause.START_ERROR, text)
    return None


# --- there is no pod


def _not_created(
    observed: Observed, pods: tuple[Pod, ...], now: float | None
) -> JobDiagnosis | None:
    shape, workload = shape_of(observed.workload), metadata(observed.workload)
    have = {pod.host for pod in pods}
    missing = tuple(host for host in range(shape.hosts) if host not in have)
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
        """When the cluster last let a pod of the refused Job in, or a queue resumed the job."""
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
    return _refusal(message, missing, stands=_has_stood(since, now))


def _has_stood(since: str, now: float | None) -> bool:
    """Whether what has been said since this time was said for long enough to be final."""
    seconds = seconds_of(since)
    return now is not None and seconds is not None and now - seconds >= REFUSED_S


def _not_queued(observed: Observed, now: float | None) -> JobDiagnosis | None:
    """Return why a queue makes no Workload for a job, as far as it says so."""
    name, queue = metadata(observed.workload).get("name", ""), labels(observed.workload)
    warnings = [e for e in _sort_events(observed, name) if e.get("type") == "Warning"]
    if not warnings or QUEUE_LABEL not in queue:
        return None
    message = _shorten_text(warnings[-1].get("message") or "")
    final = "not found" in message and _has_stood(first_event_time(warnings[-1]), now)
    text = f"The queue {queue[QUEUE_LABEL]} cannot take the job: {message}."
    if "PriorityClass" in message:
        text = f"{text} Name another class, or none: priority=."
    return JobDiagnosis(JobCause.QUEUE_REFUSED, text, final)


def _over_quota(
    quota: re.Match[str], of: PodSet, shape: GangShape, missing: tuple[int, ...]
) -> JobDiagnosis:
    """A quota refuses the pods of a Job, or the Jobs of a JobSet. One that all of them together
    exceed lets some in, which then wait for the others."""
    counts_jobs = "jobs.batch" in quota["requested"]
    total = sum(s.replicas for s in shape.sets) if counts_jobs else of.pods
    least = total if not shape.is_elastic else 2 if counts_jobs else of.pods_each
    noun = "Job" if counts_jobs else "pod"
    allows = f"it allows {quota['limited']}"
    if _exceeds(quota, least):
        need = f"and each of its {least} {noun}s needs" if least > 1 else f"and a {noun} needs"
        text = f"The quota {quota['name']} of the namespace is too small for the job: {allows}, "
        advice = "Ask for less, or have an administrator raise it."
        return JobDiagnosis(
            JobCause.QUOTA, f"{text}{need} {quota['requested']}. {advice}", True, missing
        )
    whose = "some of its Jobs" if counts_jobs else f"{len(missing)} of its pods"
    text = f"The quota {quota['name']} of the namespace does not let {whose} in: {allows}, "
    need = f"{quota['used']} is taken, and a {noun} needs {quota['requested']}"
    advice = "Other jobs must end first, or an administrator must raise it."
    return JobDiagnosis(JobCause.QUOTA, f"{text}{need}. {advice}", False, missing)


def _exceeds(quota: re.Match[str], number: int) -> bool:
    """Whether so many of what was refused need more than the quota will ever give."""
    limits = dict(p.split("=", 1) for p in quota["limited"].split(",") if "=" in p)
    needs = dict(p.split("=", 1) for p in quota["requested"].split(",") if "=" in p)
    return any(number * amount_of(needs[k]) > amount_of(limits[k]) for k in needs.keys() & limits)


def _refusal(message: str, hosts: tuple[int, ...], *, stands: bool) -> JobDiagnosis:
    account = _ACCOUNT.search(message)
    if account is not None:
        name = account[1].rpartition("/")[2]
        text = f"The service account {name} does not exist in the namespace of the job."
        return JobDiagnosis(
            JobCause.SERVICE_ACCOUNT, f"{text} Create it, or name another one.", stands, hosts
        )
    unsure = any(words in message for words in _UNSURE)
    final = stands and not unsure and any(words in message for words in _REFUSED)
    what = "refuses the pods of the job" if final else "does not admit the pods at present"
    text = f"The cluster {what}: {_shorten_text(message)}."
    return JobDiagnosis(JobCause.REFUSED, text, final, hosts)


# --- nothing is wrong


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
