"""The moment since which hosts wait for their start: `start_timeout` counts from it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from kinetic._backends.kubernetes import states
from kinetic._backends.kubernetes.observed import current_pods

CREATED_AT = 1_000_000.0


def text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def workload(*, suspend: bool = False, resumed_at: float | None = None) -> dict[str, Any]:
    conditions = []
    if resumed_at is not None:
        at = text(resumed_at)
        conditions = [{"type": "Suspended", "status": "False", "lastTransitionTime": at}]
    return {
        "kind": "Job",
        "metadata": {"name": "kinetic-job-1", "uid": "u", "creationTimestamp": text(CREATED_AT)},
        "spec": {"suspend": suspend, "parallelism": 2, "completions": 2},
        "status": {"conditions": conditions},
    }


def pod(host: int, at: float, phase: str = "Pending", **more: Any) -> dict[str, Any]:
    labels = {"batch.kubernetes.io/job-completion-index": str(host)}
    meta = {"name": f"p{host}-{at}", "labels": labels, "creationTimestamp": text(at)} | more
    state = {"running": {}} if phase == "Running" else {}
    return {
        "metadata": meta,
        "spec": {"containers": [{"name": "kinetic"}]},
        "status": {"phase": phase, "containerStatuses": [{"name": "kinetic", "state": state}]},
    }


@pytest.mark.parametrize(
    ("jobset", "pods", "since_s"),
    [
        (workload(), [], 0),
        (workload(), [pod(0, CREATED_AT + 1), pod(1, CREATED_AT + 2)], 1),
        (workload(suspend=True), [], None),
        (workload(resumed_at=CREATED_AT + 5000), [], 5000),
        (workload(resumed_at=CREATED_AT + 5000), [pod(0, CREATED_AT + 5001)], 5001),
        # a later attempt, whose pods are new
        (workload(), [pod(0, CREATED_AT, "Failed"), pod(0, CREATED_AT + 900)], 900),
        # between two attempts, when nothing starts
        (workload(), [pod(0, CREATED_AT + 1, "Failed")], 0),
        (workload(), [pod(0, CREATED_AT + 1, deletionTimestamp=text(CREATED_AT + 9))], 0),
    ],
)
def test_the_time_from_which_start_timeout_counts(jobset, pods, since_s):
    current = current_pods(jobset, pods)
    since = states.waiting_since(jobset, current)
    assert since == (None if since_s is None else CREATED_AT + since_s)


def test_a_running_pod_0_is_the_leader_and_ended_pods_are_not_starting():
    both = current_pods(workload(), [pod(0, CREATED_AT, "Running"), pod(1, CREATED_AT)])
    assert states.has_leader(both)
    assert not states.has_leader(both[1:])
    assert [p.host for p in states.select_starting(both)] == [0, 1]
    ended = current_pods(workload(), [pod(0, CREATED_AT, "Failed")])
    assert states.select_starting(ended) == []
