"""The diagnosis of a job that a queue has suspended. The reason is only in Kueue's Workload.

In: the Job or JobSet, its Workload, the jobs before it in the queue. Out: a `JobDiagnosis`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import (
    QUEUE_LABEL,
    Document,
    condition,
    labels,
    metadata,
)
from kinetic.errors import name_some

_NEVER = ("ExceedsMaxQuota", "Misconfigured")
_OTHER_FLAVOR_FITS = "unused quota"
"""Substring of a message about alternative flavors, of which another one may still fit."""
_IS_NEXT = "This job is the next to start"
_MOST_NAMES = 3
_NEVER_WORDS = ("doesn't exist", "maximum capacity", "insufficient quota")


def was_evicted(queue_workload: Document | None) -> bool:
    """True if the queue has evicted a job and not admitted it again."""
    if queue_workload is None or condition(queue_workload, "Finished"):
        return False
    evicted = condition(queue_workload, "Evicted") or condition(queue_workload, "Preempted")
    return evicted is not None and condition(queue_workload, "Admitted") is None


def why_suspended(
    workload: Document, queue_workload: Document | None, earlier: Sequence[str] | None = None
) -> JobDiagnosis:
    """Return what a suspended job waits for.

    Args:
        workload: the Job or JobSet.
        queue_workload: Kueue's Workload, or None if it does not exist (yet).
        earlier: the names of the jobs before this one in its queue.
    """
    queue = labels(workload).get(QUEUE_LABEL, "")
    name = metadata(workload).get("name", "")
    if not queue:
        text = "The job is suspended, and has no queue that would resume it."
        namespace = metadata(workload).get("namespace", "default")
        command = f"kubectl -n {namespace} patch {_resource(workload)} {name} --type merge -p"
        return JobDiagnosis(
            JobCause.SUSPENDED,
            f'{text} Resume it: `{command} \'{{"spec":{{"suspend":false}}}}\'`.',
        )
    if queue_workload is None:
        text = f"The job waits for the queue {queue!r}, which has not registered the job yet."
        return JobDiagnosis(
            JobCause.QUEUED, f"{text} If this does not change, check that Kueue is installed."
        )
    for find in (_find_deactivation, _find_preemption, _find_check, _find_reservation):
        finding = find(queue, queue_workload)
        if finding is not None:
            return _name_earlier(finding, earlier)
    return _name_earlier(
        JobDiagnosis(JobCause.QUEUED, f"The job waits in the queue {queue!r}."), earlier
    )


def _name_earlier(finding: JobDiagnosis, earlier: Sequence[str] | None) -> JobDiagnosis:
    if earlier is None or finding.hopeless:
        return finding
    opening = f"{len(earlier)} other jobs come" if len(earlier) > 1 else "One other job comes"
    text = f"{opening} first: {name_some(earlier, _MOST_NAMES)}"
    return replace(finding, sentence=f"{finding.sentence} {text if earlier else _IS_NEXT}.")


def _find_deactivation(queue: str, workload: Document) -> JobDiagnosis | None:
    if (workload.get("spec") or {}).get("active", True):
        return None
    evicted = condition(workload, "Evicted") or {}
    reason = f': "{_clean(evicted.get("message"))}"' if evicted.get("message") else ""
    return JobDiagnosis(
        JobCause.QUEUE_REFUSED,
        f"The queue {queue!r} has removed the job for good{reason}. Submit the job again.",
        hopeless=True,
    )


def _find_preemption(queue: str, workload: Document) -> JobDiagnosis | None:
    eviction = condition(workload, "Preempted") or condition(workload, "Evicted")
    if eviction is None or condition(workload, "Admitted"):
        return None
    message = _clean(eviction.get("message") or eviction.get("reason"))
    text = f'The queue {queue!r} evicted the job: "{message}".'
    return JobDiagnosis(JobCause.PREEMPTED, text)


def _find_check(queue: str, workload: Document) -> JobDiagnosis | None:
    """Return the admission check that a job with reserved quota waits for, or None."""
    if condition(workload, "QuotaReserved") is None:
        return None
    for check in (workload.get("status") or {}).get("admissionChecks") or ():
        message = _clean(check.get("message")) or "no reason given"
        if check.get("state") == "Rejected":
            text = f"The check {check.get('name')} of the queue {queue} rejects the job: {message}."
            return JobDiagnosis(JobCause.QUEUE_REFUSED, text, hopeless=True)
        if check.get("state") in ("Pending", "Retry"):
            text = f"Nodes are being provisioned for the job ({check.get('name')}): {message}."
            return JobDiagnosis(JobCause.PROVISIONING, text)
    return None


def _find_reservation(queue: str, workload: Document) -> JobDiagnosis | None:
    conditions = (workload.get("status") or {}).get("conditions") or ()
    reservation = next((c for c in conditions if c.get("type") == "QuotaReserved"), None)
    if reservation is None or reservation.get("status") == "True":
        return None
    message = _clean(reservation.get("message"))
    never = reservation.get("reason") in _NEVER or any(words in message for words in _NEVER_WORDS)
    if never and _OTHER_FLAVOR_FITS not in message:
        text = f'The queue {queue!r} can never admit the job: "{message}".'
        other = "set queue= to another queue (`kubectl get localqueues` lists them)"
        missing = "doesn't exist" in message
        advice = f"{other[0].upper()}{other[1:]}." if missing else f"Ask for less, or {other}."
        return JobDiagnosis(JobCause.QUEUE_REFUSED, f"{text} {advice}", hopeless=True)
    return JobDiagnosis(JobCause.QUEUED, f'The job waits in the queue {queue!r}: "{message}".')


def _clean(text: object) -> str:
    return " ".join(str(text or "").split()).rstrip(". ")


def _resource(workload: Document) -> str:
    return "jobset" if "replicatedJobs" in (workload.get("spec") or {}) else "job"
