"""The status of a job from its cluster and from its records: which is read, and which decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kinetic._backends.base import HostStatus, Status
from kinetic._backends.kubernetes import states
from kinetic._backends.kubernetes.findings import JobCause, JobDiagnosis
from kinetic._backends.kubernetes.observed import current_pods
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic._core.place import Place
from kinetic._core.ref import JobRef
from kinetic._core.state import JobStatus

CREATED_AT = 1_000_000.0
JOB = {
    "kind": "Job",
    "metadata": {"name": "j", "uid": "u", "creationTimestamp": "1970-01-12T13:46:40Z"},
    "spec": {"parallelism": 2, "completions": 2},
}
WAITING = Status(JobStatus.PENDING, states.WAITING)
FULL = JobDiagnosis(JobCause.NO_ROOM, "no node has room", False, (1,))
NEVER = replace(FULL, hopeless=True)
CANCELLED = layout.JobKeys("job-1").cancellation
EVENTS = layout.JobKeys("job-1").events


def pod(host: int, phase: str = "Running") -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(host)}
    created_at = JOB["metadata"]["creationTimestamp"]  # type: ignore[index]
    state = {"running": {}} if phase == "Running" else {}
    return {
        "metadata": {"name": f"p{host}", "labels": labels, "creationTimestamp": created_at},
        "spec": {"containers": [{"name": "kinetic"}]},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": "True"}] * (phase == "Running"),
            "containerStatuses": [{"name": "kinetic", "state": state}],
        },
    }


def job(
    cluster: Status,
    *pods: dict[str, Any],
    workload: dict[str, Any] | None = JOB,
    head: bool = False,
    after_s: float = 1.0,
    **answers: Any,
) -> states.JobFacts:
    """Return a job's facts; reading a fact that is not in `answers` fails the test."""

    def answer(name: str) -> Any:
        return lambda *_: answers[name] if name in answers else pytest.fail(f"asks {name}")

    place = Place("pathways")
    ref = JobRef("job-1", place, "x", "f", "f", 0.0, "memory://", hosts=2, has_head=head)
    return states.JobFacts(
        ref,
        workload,
        () if workload is None else current_pods(workload, pods),
        cluster,
        CREATED_AT + after_s,
        explain=answer("explain"),
        has=lambda key: key in answers["has"] if "has" in answers else pytest.fail(f"asks {key}"),
        **{n: answer(n) for n in ("has_begun", "goes_on", "existed", "start_timeout_s")},
    )


@pytest.mark.parametrize(
    ("answers", "phase"),
    [
        ({"has": [CANCELLED]}, JobStatus.CANCELLED),
        ({"has": [], "existed": True}, JobStatus.FAILED),
        ({"has": [], "existed": False}, JobStatus.NOT_FOUND),
    ],
)
def test_a_job_without_a_workload(answers: dict[str, Any], phase: JobStatus) -> None:
    status, waits_for = states.judge(job(Status(JobStatus.NOT_FOUND), workload=None, **answers))
    assert (status.phase, waits_for) == (phase, None)
    assert all(host.phase is phase for host in status.hosts)


def test_nothing_is_asked_about_what_the_cluster_knows() -> None:
    for status in (Status(JobStatus.SUCCEEDED), Status(JobStatus.RUNNING, "x")):
        assert states.judge(job(status, pod(0), pod(1))) == (status, None)


def test_workers_of_pathways_are_no_hosts() -> None:
    hosts = tuple(HostStatus(host, JobStatus.FAILED) for host in range(4))
    status, _ = states.judge(job(Status(JobStatus.SUCCEEDED, "", hosts), pod(0), pod(1)))
    assert [host.host for host in status.hosts] == [0, 1]


@pytest.mark.parametrize(
    ("answers", "head", "phase"),
    [
        ({}, True, JobStatus.RUNNING),  # A cluster replaces a lost head.
        ({"goes_on": True}, False, JobStatus.RUNNING),
        ({"goes_on": False, "has": [CANCELLED]}, False, JobStatus.RUNNING),
        ({"goes_on": False, "has": []}, False, JobStatus.FAILED),
    ],
)
def test_a_job_that_has_lost_its_leader(
    answers: dict[str, Any], head: bool, phase: JobStatus
) -> None:
    running = Status(JobStatus.RUNNING)
    lost = job(running, pod(0, "Failed"), pod(1), head=head, **answers)
    status, _ = states.judge(lost)
    assert status.phase is phase
    failed = [host.host for host in status.hosts if host.phase is JobStatus.FAILED]
    assert failed == ([0] if phase is JobStatus.FAILED else [])


def test_a_leader_that_still_runs_judges_a_failed_job() -> None:
    failed = Status(JobStatus.FAILED, "BackoffLimitExceeded")
    assert states.judge(job(failed, pod(0), pod(1, "Failed")))[0].phase is JobStatus.RUNNING
    status, waits_for = states.judge(job(failed, pod(0, "Failed"), explain=FULL))
    assert (status.phase, status.reason, waits_for) == (JobStatus.FAILED, FULL.sentence, None)


def test_an_elastic_job_that_has_begun_goes_on_without_a_slice() -> None:
    status, _ = states.judge(job(WAITING, pod(1, "Pending"), head=True, has_begun=True))
    assert (status.phase, status.reason) == (JobStatus.RUNNING, WAITING.reason)


@pytest.mark.parametrize(
    ("finding", "after_s", "phase"),
    [
        (
            NEVER,
            1000.0,
            JobStatus.PENDING,
        ),  # An elastic job can do without a slice.
        (replace(NEVER, hosts=(0,)), 1000.0, JobStatus.FAILED),
        (None, 1000.0, JobStatus.PENDING),  # The new pod of the head is 10 s old.
        (None, 1060.0, JobStatus.FAILED),
    ],
)
def test_an_elastic_job_whose_replaced_head_cannot_start_fails(
    finding: JobDiagnosis | None, after_s: float, phase: JobStatus
) -> None:
    head = pod(0, "Pending")
    head["metadata"]["creationTimestamp"] = "1970-01-12T14:03:10Z"
    facts = {"has_begun": True, "explain": finding, "start_timeout_s": 60.0}
    waits = job(WAITING, head, pod(1), head=True, after_s=after_s, **facts)
    assert states.judge(waits)[0].phase is phase


def test_what_a_job_waits_for_is_told_of_its_hosts() -> None:
    status, waits_for = states.judge(job(WAITING, pod(0), pod(1, "Pending"), explain=FULL))
    assert (status.phase, status.reason, waits_for) == (JobStatus.PENDING, FULL.sentence, FULL)
    assert status.hosts == (HostStatus(1, JobStatus.PENDING, FULL.sentence),)
    status, _ = states.judge(job(WAITING, pod(1, "Pending"), explain=NEVER))
    assert status.phase is JobStatus.FAILED
    assert [host.exit for host in status.hosts] == [Exit.SETUP_FAILED]


def test_a_secret_may_be_on_its_way_for_a_while() -> None:
    missing = JobDiagnosis(JobCause.MISSING_SECRET, "its Secret is missing", True, (0, 1))
    early, waits_for = states.judge(job(WAITING, pod(0, "Pending"), explain=missing))
    assert (early.phase, early.reason, waits_for) == (JobStatus.PENDING, states.STARTING, None)
    late = job(WAITING, pod(0, "Pending"), explain=missing, after_s=states.SUBMISSION_S)
    assert states.judge(late)[0].phase is JobStatus.FAILED


@pytest.mark.parametrize(
    ("after_s", "pods", "answers", "phase"),
    [
        (1.0, [pod(0, "Pending")], {}, JobStatus.PENDING),  # too early to read the plan
        (50.0, [pod(0, "Pending")], {"start_timeout_s": 60.0}, JobStatus.PENDING),
        (70.0, [pod(0, "Pending")], {"start_timeout_s": 60.0}, JobStatus.FAILED),
        # Host 0 watches the start, once it has written events.
        (70.0, [pod(0)], {"start_timeout_s": 60.0, "has": [EVENTS]}, JobStatus.PENDING),
        (70.0, [pod(0)], {"start_timeout_s": 60.0, "has": []}, JobStatus.FAILED),
    ],
)
def test_a_job_that_does_not_start_in_time(
    after_s: float, pods: list[dict[str, Any]], answers: dict[str, Any], phase: JobStatus
) -> None:
    late = job(WAITING, *pods, after_s=after_s, explain=None, **answers)
    status, _ = states.judge(late)
    assert status.phase is phase
    if phase is JobStatus.FAILED:
        assert status.reason == f"the job did not start within 60 s: {states.WAITING}"
        assert [host.host for host in status.hosts] == [0, 1]
