"""What keeps a job from running and may pass: it is told, and never ends the job."""

from __future__ import annotations

import pytest
from test_kubernetes_waiting import event, jobset, of

from kinetic._backends.kubernetes.diagnosis import JobCause, Observed, diagnose


@pytest.mark.parametrize(
    "said",
    [
        'Operation cannot be fulfilled on resourcequotas "q": the object has been modified',
        'pods "x-" is forbidden: status unknown for quota: q, resources: pods',
        'pods "x-" is forbidden: not yet ready to handle request',
        "Internal error occurred: resource quota evaluation timed out",
        'Post "https://10.0.0.1/api/v1/namespaces/ml/pods": context deadline exceeded',
        "the server is currently unable to handle the request",
    ],
)
def test_a_cluster_that_could_not_check_pods_may_let_them_in_later(said: str) -> None:
    refused = event("FailedCreate", f"Error creating: {said}", "kinetic-job-1-host-0", kind="Job")
    found = of(Observed(jobset(), events=[refused]))
    assert (found.kind, found.hopeless) == (JobCause.REFUSED, False)


def test_pods_that_an_earlier_start_was_refused_do_not_count() -> None:
    said = 'Error creating: admission webhook "p" denied the request: no'
    refused = event("FailedCreate", said, "kinetic-job-1-host-0", kind="Job")
    refused["involvedObject"]["uid"] = "first"
    now = {"metadata": {"name": "kinetic-job-1-host-0", "uid": "second"}}
    assert diagnose(Observed(jobset(restarts=1), jobs=[now], events=[refused])) is None
    now["metadata"]["uid"] = "first"
    assert of(Observed(jobset(), jobs=[now], events=[refused])).hopeless
