"""Temporary reasons that keep a job from running: they are reported, and never end the job."""

from __future__ import annotations

import pytest
from recorded import by_name
from test_kubernetes_waiting import FIRST, NOW, event, jobset, of, waiting

from kinetic._backends.kubernetes.diagnosis import JobCause, Observed, diagnose


@pytest.mark.parametrize(
    "words",
    [
        'Operation cannot be fulfilled on resourcequotas "q": the object has been modified',
        'pods "x-" is forbidden: status unknown for quota: q, resources: pods',
        'pods "x-" is forbidden: not yet ready to handle request',
        "Internal error occurred: resource quota evaluation timed out",
        'Post "https://10.0.0.1/api/v1/namespaces/ml/pods": context deadline exceeded',
        "the server is currently unable to handle the request",
    ],
)
def test_a_cluster_that_could_not_check_pods_may_let_them_in_later(words: str) -> None:
    refused = event("FailedCreate", f"Error creating: {words}", "kinetic-job-1-host-0", kind="Job")
    finding = of(Observed(jobset(), events=by_name(refused)))
    assert (finding.kind, finding.hopeless) == (JobCause.REFUSED, False)


def test_pods_that_an_earlier_start_was_refused_do_not_count() -> None:
    words = 'Error creating: admission webhook "p" denied the request: no'
    refused = event("FailedCreate", words, "kinetic-job-1-host-0", kind="Job")
    refused["involvedObject"]["uid"] = "first"
    now = {"metadata": {"name": "kinetic-job-1-host-0", "uid": "second"}}
    assert diagnose(Observed(jobset(restarts=1), jobs=[now], events=by_name(refused))) is None
    now["metadata"]["uid"] = "first"
    assert of(Observed(jobset(), jobs=[now], events=by_name(refused)), now=NOW).hopeless


@pytest.mark.parametrize(
    ("words", "hopeless"),
    [
        ("services have not yet been read at least once, cannot construct envvars", False),
        ("failed to sync secret cache: timed out waiting for the condition", False),
        ("failed to sync configmap cache: timed out waiting for the condition", False),
        ("couldn't find key token in Secret ml/wandb", True),
        ("container has runAsNonRoot and image will run as root", True),
    ],
)
def test_a_node_that_has_not_read_everything_yet(words: str, hopeless: bool) -> None:
    finding = of(Observed(jobset(1), [waiting("CreateContainerConfigError", words)]))
    assert (finding.kind, finding.hopeless) == (JobCause.START_ERROR, hopeless)


@pytest.mark.parametrize(
    "words",
    [
        'failed to pull image "eu.pkg.dev/invalid-invoices/x:3": dial tcp 1.2.3.4:443: i/o timeout',
        'failed to do request: Head "https://eu.pkg.dev/v2/not-denied/x": 503 Service Unavailable',
        "failed to fetch docker.io/acme/forbidden-planet:1: connection reset by peer",
    ],
)
def test_the_name_of_an_image_is_no_reason(words: str) -> None:
    finding = of(Observed(jobset(1), [waiting("ErrImagePull", words)]))
    assert (finding.kind, finding.hopeless) == (JobCause.IMAGE_PULL, False)
    assert words in finding.sentence


@pytest.mark.parametrize(
    "words",
    [
        "1 in backoff after failed scale-up, 2 node(s) didn't match Pod's node affinity/selector",
        "1 not ready for scale-up",
        "1 max total nodes in cluster reached",
    ],
)
def test_an_autoscaler_that_cannot_add_nodes_now_may_do_so_later(words: str) -> None:
    why = event("NotTriggerScaleUp", f"pod didn't trigger scale-up: {words}", FIRST)
    finding = of(Observed(jobset(), [FIRST], events=by_name(why)), now=NOW)
    assert (finding.kind, finding.hopeless) == (JobCause.NO_SCALE_UP, False)
    assert words in finding.sentence


def test_a_queue_may_use_another_flavor_than_one_that_is_too_small() -> None:
    job = jobset()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "lq"}
    job["spec"]["suspend"] = True
    small = "insufficient quota for tpu in flavor a, current request (16) > maximum capacity (8)"
    busy = "insufficient unused quota for tpu in flavor b, 4 more needed"
    for words, hopeless in ((f"{small}, {busy}", False), (small, True)):
        waits = {
            "type": "QuotaReserved",
            "status": "False",
            "reason": "Pending",
            "message": words,
        }
        finding = of(Observed(job, queue_workload={"status": {"conditions": [waits]}}))
        assert finding.hopeless is hopeless
        assert words in finding.sentence
