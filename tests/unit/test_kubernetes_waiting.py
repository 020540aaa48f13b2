"""The diagnosis of waiting jobs in constructed cases: GKE, queues, long waits."""

from __future__ import annotations

from typing import Any

import pytest
import recorded
from recorded import by_name

from kinetic._backends.kubernetes import nodes, states
from kinetic._backends.kubernetes.diagnosis import JobCause, JobDiagnosis, Observed, diagnose
from kinetic._backends.kubernetes.resources import seconds_of
from kinetic._core.state import JobStatus

Document = dict[str, Any]
HOPELESS = True


TPU = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice"}
WANTED = {**TPU, "cloud.google.com/gke-tpu-topology": "4x4"}
REFUSED = (
    "0/5 nodes are available: 5 node(s) didn't match Pod's node affinity/selector. preemption: x"
)
SHORT = (
    "0/5 nodes are available: 4 Insufficient google.com/tpu. preemption: 0/5 nodes are available."
)


def jobset(hosts: int = 4, restarts: int = 0) -> Document:
    pod = {"spec": {"nodeSelector": WANTED, "containers": [{"name": "main", "image": "img"}]}}
    job = {"spec": {"parallelism": hosts, "completions": hosts, "template": pod}}
    return {
        "kind": "JobSet",
        "metadata": {"name": "kinetic-job-1", "namespace": "ml", "uid": "u"},
        "spec": {"replicatedJobs": [{"name": "host", "replicas": 1, "template": job}]},
        "status": {"restarts": restarts},
    }


def pod(host: int, refusal: str = "", *, node: str = "", **status: Any) -> Document:
    scheduled = {"type": "PodScheduled", "status": "False" if refusal else "True"}
    if refusal:
        scheduled |= {
            "reason": "Unschedulable",
            "message": refusal,
            "lastTransitionTime": "2026-11-21T01:00:00Z",
        }
    return {
        "metadata": {
            "name": f"kinetic-job-1-host-0-{host}-abcde",
            "uid": f"pod-{host}",
            "creationTimestamp": "2026-11-21T01:00:00Z",
            "labels": {
                "jobset.sigs.k8s.io/replicatedjob-name": "host",
                "batch.kubernetes.io/job-completion-index": str(host),
            },
        },
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "img"}],
            **({"nodeName": node} if node else {}),
        },
        "status": {
            "phase": "Pending",
            **status,
            "conditions": [scheduled, *status.get("conditions", ())],
        },
    }


def event(
    reason: str, message: str, about: Document | str, kind: str = "Pod", n: int = 0
) -> Document:
    name = about if isinstance(about, str) else about["metadata"]["name"]
    return {
        "type": "Normal" if reason == "TriggeredScaleUp" else "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": f"2026-11-21T01:00:{n:02d}Z",
    }


def node(name: str, pool: str, topology: str, **labels: str) -> Document:
    own = {"cloud.google.com/gke-nodepool": pool, **TPU, **labels}
    return {
        "metadata": {
            "name": name,
            "labels": {**own, "cloud.google.com/gke-tpu-topology": topology},
        },
        "spec": {},
        "status": {
            "allocatable": {"google.com/tpu": "4"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def running_pod(host: int, second: int) -> Document:
    """Return a running pod that was created this many seconds after the job."""
    created = pod(host, node=f"n{host}", phase="Running")
    created["metadata"]["creationTimestamp"] = f"2026-11-21T01:00:{second:02d}Z"
    running = {"name": "main", "state": {"running": {}}}
    ready = {"type": "Ready", "status": "True"}
    created["status"] |= {"containerStatuses": [running], "conditions": [ready]}
    return created


FIRST = pod(0, REFUSED)
START = seconds_of("2026-11-21T01:00:00Z") or 0.0
NOW = seconds_of("2026-11-21T01:02:00Z")
POOL = "https://www.googleapis.com/compute/v1/projects/p/zones/z/instanceGroups/gke-tpu-pool-grp"


def of(facts: Observed, **more: Any) -> JobDiagnosis:
    finding = diagnose(facts, **more)
    assert finding is not None
    return finding


def test_the_autoscaler_adds_nodes() -> None:
    words = f"pod triggered scale-up: [{{{POOL} 0->4 (max: 8)}}]"
    finding = of(
        Observed(jobset(), [FIRST], events=by_name(event("TriggeredScaleUp", words, FIRST))),
        now=NOW,
    )
    assert finding == JobDiagnosis(
        JobCause.PROVISIONING,
        "Nodes are being added for the job: gke-tpu-pool-grp from 0 to 4 nodes.",
        hosts=(0,),
    )


@pytest.mark.parametrize(
    ("words", "kind", "hopeless"),
    [
        ("3 node(s) didn't match Pod's node affinity/selector", JobCause.NO_NODE_POOL, True),
        ("1 max node group size reached, 2 node(s) didn't match", JobCause.NO_SCALE_UP, False),
    ],
)
def test_the_autoscaler_adds_none(words: str, kind: JobCause, hopeless: bool) -> None:
    why = event("NotTriggerScaleUp", f"pod didn't trigger scale-up: {words}", FIRST)
    finding = of(Observed(jobset(), [FIRST], events=by_name(why)))
    assert (finding.kind, finding.hopeless) == (kind, hopeless)
    assert words in finding.sentence


def test_the_newest_word_of_the_autoscaler_counts() -> None:
    first = event("TriggeredScaleUp", "pod triggered scale-up: []", FIRST, n=1)
    then = event(
        "FailedScaleUp", "Node scale up in zones z failed: GCE out of resources.", FIRST, n=9
    )
    finding = of(Observed(jobset(), [FIRST], events=by_name(then, first)))
    assert (finding.kind, finding.hopeless) == (JobCause.NO_SCALE_UP, False)
    assert "GCE out of resources" in finding.sentence


def test_no_such_node_is_hopeless_once_no_autoscaler_can_be_expected_any_more() -> None:
    existing = [node("n0", "small", "2x2")]
    facts = Observed(jobset(), [FIRST], nodes=existing)
    early = of(facts, now=seconds_of("2026-11-21T01:00:30Z"))
    assert (early.kind, early.hopeless) == (JobCause.NO_NODE_POOL, False)
    assert "Its node pools: small (tpu-v6e-slice 2x2, 1 node)." in early.sentence
    assert of(facts, now=NOW).hopeless
    assert not of(facts, now=NOW, scale_up_s=600).hopeless


def test_a_pool_that_lacks_a_node_of_the_slice() -> None:
    existing = [node(f"n{n}", "tpu", "4x4") for n in range(3)]
    finding = of(Observed(jobset(), [pod(0, SHORT)], nodes=existing), now=NOW)
    assert (finding.kind, finding.hopeless) == (JobCause.PARTIAL_SLICE, False)
    assert finding.sentence.startswith(
        "A slice with tpu-v6e-slice 4x4 needs 4 nodes, but no pool has over 3"
    )
    two_pools = [node(f"n{n}", f"tpu-{n % 2}", "4x4") for n in range(6)]
    assert of(Observed(jobset(), [pod(0, SHORT)], nodes=two_pools)).kind is JobCause.PARTIAL_SLICE


def test_all_nodes_are_taken() -> None:
    existing = [node(f"n{n}", "tpu", "4x4") for n in range(4)]
    finding = of(Observed(jobset(), [pod(0, SHORT)], nodes=existing), now=NOW)
    assert (finding.kind, finding.hopeless) == (JobCause.NO_ROOM, False)
    assert "The 4 nodes with tpu-v6e-slice 4x4 are in use" in finding.sentence


@pytest.mark.parametrize(
    ("message", "kind", "hopeless", "words"),
    [
        (
            'Error creating: pods "x-" is forbidden: error looking up service account ml/kinetic: '
            'serviceaccount "kinetic" not found',
            JobCause.SERVICE_ACCOUNT,
            True,
            "The service account 'kinetic' does not exist",
        ),
        (
            'Error creating: admission webhook "policy.example.com" denied the request: no',
            JobCause.REFUSED,
            True,
            "policy.example.com",
        ),
        (
            'Error creating: Internal error occurred: failed calling webhook "vpod.kb.io": refused',
            JobCause.REFUSED,
            False,
            "does not admit the pods at present",
        ),
        (
            'Error creating: pods "x-0" is forbidden: exceeded quota: tpu, requested: '
            "requests.google.com/tpu=8, used: requests.google.com/tpu=0, limited: "
            "requests.google.com/tpu=4",
            JobCause.QUOTA,
            True,
            "the quota allows requests.google.com/tpu=4",
        ),
    ],
)
def test_pods_that_are_not_let_in(message: str, kind: JobCause, hopeless: bool, words: str) -> None:
    refused = event("FailedCreate", message, "kinetic-job-1-host-0", kind="Job")
    finding = of(Observed(jobset(), events=by_name(refused)), now=NOW)
    assert (finding.kind, finding.hopeless, finding.hosts) == (kind, hopeless, (0, 1, 2, 3))
    assert words in finding.sentence


def refusal(first: int, last: int) -> Document:
    words = 'Error creating: admission webhook "mpod.kb.io" denied the request: Job ml/j not found'
    refused = event("FailedCreate", words, "kinetic-job-1-host-0", kind="Job", n=last)
    return refused | {"firstTimestamp": f"2026-11-21T01:00:{first:02d}Z"}


@pytest.mark.parametrize(
    ("first", "last", "after_s", "hopeless"),
    [
        (0, 0, 1, False),  # Kueue's webhook does not know the Job yet; a second try succeeds
        (0, 15, 29, False),
        (0, 15, 30, True),
        (20, 35, 45, False),
    ],
)
def test_a_refusal_is_final_once_it_stands(
    first: int, last: int, after_s: int, hopeless: bool
) -> None:
    finding = of(Observed(jobset(), events=by_name(refusal(first, last))), now=START + after_s)
    assert (finding.kind, finding.hopeless) == (JobCause.REFUSED, hopeless)
    assert not of(Observed(jobset(), events=by_name(refusal(first, last)))).hopeless


def test_a_refusal_is_over_once_a_pod_was_made_after_it() -> None:
    """A pod that is replaced later must not fail the job because of a refusal at the start."""
    created = [running_pod(host, 20) for host in (0, 1, 2)]
    assert (
        diagnose(Observed(jobset(), created, events=by_name(refusal(0, 15))), now=START + 59)
        is None
    )
    late = of(Observed(jobset(), created, events=by_name(refusal(0, 25))), now=START + 49)
    assert (late.kind, late.hopeless, late.hosts) == (JobCause.REFUSED, False, (3,))
    assert of(Observed(jobset(), created, events=by_name(refusal(0, 25))), now=START + 50).hopeless


def test_a_refusal_of_before_a_queue_admitted_the_job_does_not_count() -> None:
    workload = jobset()
    at = "2026-11-21T01:00:20Z"
    resumed = {"type": "Suspended", "status": "False", "lastTransitionTime": at}
    workload["status"]["conditions"] = [resumed]
    assert diagnose(Observed(workload, events=by_name(refusal(0, 15))), now=START + 59) is None
    assert not of(Observed(workload, events=by_name(refusal(0, 25))), now=START + 49).hopeless
    assert of(Observed(workload, events=by_name(refusal(0, 25))), now=START + 50).hopeless


def over(amount: str, limit: str, *, used: str = "0", noun: str = "pods") -> str:
    return (
        f'{noun} "x" is forbidden: exceeded quota: q, requested: {amount}, used: '
        f"{amount.partition('=')[0]}={used}, limited: {amount.partition('=')[0]}={limit}"
    )


@pytest.mark.parametrize(
    ("amount", "limit", "hopeless"),
    [
        ("requests.google.com/tpu=4", "16", False),
        ("requests.google.com/tpu=4", "12", True),
        ("requests.memory=60Gi", "200Gi", True),
        ("requests.cpu=500m", "2", False),
        ("requests.cpu=500m", "1900m", True),
        ("pods=1", "3", True),
    ],
)
def test_a_quota_smaller_than_the_gang_never_lets_it_in(
    amount: str, limit: str, hopeless: bool
) -> None:
    """The quota refuses three of four pods; the wait is hopeless if four never fit the quota."""
    refused = event("FailedCreate", over(amount, limit), "kinetic-job-1-host-0", kind="Job")
    finding = of(Observed(jobset(), [pod(0)], events=by_name(refused)))
    assert (finding.kind, finding.hopeless, finding.hosts) == (JobCause.QUOTA, hopeless, (1, 2, 3))
    text = f"each of its 4 pods needs {amount}" if hopeless else "refuses 3 pods of the job"
    assert text in finding.sentence


@pytest.mark.parametrize(("limit", "hopeless"), [("1", True), ("2", False)])
def test_a_quota_of_jobs_is_not_said_of_pods(limit: str, hopeless: bool) -> None:
    workload = jobset()
    workload["spec"]["replicatedJobs"][0]["replicas"] = 2
    words = over("count/jobs.batch=1", limit, used=limit, noun="jobs.batch")
    refused = event("JobCreationFailed", words, "kinetic-job-1", kind="JobSet")
    finding = of(Observed(workload, [pod(0)], events=by_name(refused)))
    assert (finding.kind, finding.hopeless) == (JobCause.QUOTA, hopeless)
    assert "pod" not in finding.sentence
    assert (
        "each of its 2 Jobs needs" if hopeless else "refuses some Jobs of the job"
    ) in finding.sentence


def test_a_quota_that_an_elastic_job_can_do_with_is_waited_for() -> None:
    workload = jobset()
    slices = workload["spec"]["replicatedJobs"]
    slices[0]["replicas"] = 2
    slices.append({"name": "head", "template": {"spec": {}}})
    for limit, hopeless in (("16", False), ("12", True)):
        words = over("requests.google.com/tpu=4", limit)
        refused = event("FailedCreate", words, "kinetic-job-1-host-1", kind="Job")
        existing = [pod(host) for host in range(4)]
        assert of(Observed(workload, existing, events=by_name(refused))).hopeless is hopeless


def test_a_gang_that_starts_as_usual_is_no_finding() -> None:
    words = 'admission webhook "vpod.kb.io" denied the request: follower pod node selector for x'
    usual = event("FailedCreate", f"Error creating: {words}", "kinetic-job-1-host-0", kind="Job")
    assert diagnose(Observed(jobset(), events=by_name(usual))) is None
    usual["message"] = usual["message"].replace("follower pod node", "expected 1 leader pod (p)")
    assert diagnose(Observed(jobset(), events=by_name(usual))) is None
    other = event("FailedCreate", "Error creating: no", "kinetic-job-2-host-0", kind="Job")
    assert diagnose(Observed(jobset(), events=by_name(other))) is None


def waiting(reason: str, message: str = "") -> Document:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(0, node="n0", containerStatuses=[{"name": "main", "state": state}])


@pytest.mark.parametrize(
    ("words", "hopeless"),
    [
        ("rpc error: code = NotFound desc = x: not found", True),
        ("failed to authorize: 403 Forbidden", True),
        ("dial tcp: i/o timeout", False),
        ("429 Too Many Requests", False),
    ],
)
def test_an_image_that_may_come_later(words: str, hopeless: bool) -> None:
    finding = of(Observed(jobset(1), [waiting("ErrImagePull", words)]))
    assert (finding.kind, finding.hopeless) == (JobCause.IMAGE_PULL, hopeless)


@pytest.mark.parametrize(
    ("reason", "message", "words"),
    [
        ("InvalidImageName", "invalid reference format", "'img' is not a valid image name: \"in"),
        ("ErrImageNeverPull", "it is not present", "does not have the image img and may not pull"),
    ],
)
def test_an_image_that_will_never_come(reason: str, message: str, words: str) -> None:
    finding = of(Observed(jobset(1), [waiting(reason, message)]))
    assert (finding.kind, finding.hopeless, finding.hosts) == (JobCause.IMAGE_PULL, True, (0,))
    assert words in finding.sentence
    assert message in finding.sentence


def test_the_jobs_own_secret_may_still_come() -> None:
    missing = waiting("CreateContainerConfigError", 'secret "kinetic-job-1" not found')
    finding = of(Observed(jobset(1), [missing], own_secret="kinetic-job-1"))
    assert (finding.kind, finding.hopeless) == (JobCause.MISSING_SECRET, False)
    assert "interrupted" in finding.sentence


def ended(
    host: int, code: int, message: str = "", reason: str = "Error", **status: Any
) -> Document:
    terminated = {"exitCode": code, "reason": reason, "message": message}
    terminated["finishedAt"] = "2026-11-21T01:00:09Z"
    own = [{"name": "main", "state": {"terminated": terminated}}]
    return pod(host, node=f"n{host}", **{"phase": "Failed", "containerStatuses": own, **status})


SHUT_DOWN = "Pod was terminated in response to imminent node shutdown."
TARGET = {"type": "DisruptionTarget", "status": "True"}


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (
            ended(3, 143, conditions=[{**TARGET, "reason": "PreemptionByScheduler"}]),
            JobCause.PREEMPTED,
        ),
        (
            ended(
                3,
                143,
                conditions=[{**TARGET, "reason": "TerminationByKubelet", "message": SHUT_DOWN}],
            ),
            JobCause.PREEMPTED,
        ),
        (ended(3, 0, **{"reason": "Terminated", "message": SHUT_DOWN}), JobCause.PREEMPTED),
        (ended(3, 137, reason="OOMKilled"), JobCause.OUT_OF_MEMORY),
        (
            pod(3, node="n3", phase="Failed", reason="Evicted", message="low on resource: memory."),
            JobCause.OUT_OF_MEMORY,
        ),
        (ended(3, 42, "ValueError: no"), JobCause.HOST_FAILED),
        (ended(3, 1, "no chips"), JobCause.HOST_FAILED),
        (ended(3, 127, "python: not found"), JobCause.BAD_COMMAND),
    ],
)
def test_a_cause_comes_before_its_consequences(first: Document, kind: JobCause) -> None:
    rest = [
        ended(0, 134, "the JAX distributed service detected fatal errors"),
        ended(1, 1, "RuntimeError: Gloo: connection reset by peer"),
        ended(2, 143),
    ]
    finding = of(Observed(jobset(), [*rest, first]))
    assert (finding.kind, finding.hosts[0]) == (kind, 3)
    assert finding.sentence.endswith("Hosts 0, 1, 2 ended after it.")


def test_a_pod_that_was_deleted_is_not_to_blame() -> None:
    deleted = ended(0, 137)
    deleted["metadata"]["deletionTimestamp"] = "2026-11-21T01:00:10Z"
    finding = of(Observed(jobset(2), [deleted, ended(1, 137)]))
    assert finding.hosts == (1,)


def test_what_a_program_printed_last_does_not_explain_that_it_was_killed() -> None:
    finding = of(Observed(jobset(2), [ended(0, 137, "step 7: loss 0.3")]))
    assert finding.sentence == "Host 0 failed: it was killed by SIGKILL (exit code 137)."
    finding = of(Observed(jobset(2), [ended(0, 134, "Check failed: ok")]))
    assert "Check failed: ok" in finding.sentence


def test_pods_that_are_gone_are_known_by_the_message_of_their_job() -> None:
    failed = {
        "type": "Failed",
        "status": "True",
        "reason": "PodFailurePolicy",
        "message": "Container main for pod ml/kinetic-job-1-host-0-2-abcde failed with exit code "
        "42 matching FailJob rule at index 0",
    }
    child = {"metadata": {"name": "kinetic-job-1-host-0"}, "status": {"conditions": [failed]}}
    over = jobset()
    over["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    finding = of(Observed(over, jobs=[child]))
    assert (finding.kind, finding.hosts) == (JobCause.HOST_FAILED, (2,))
    assert finding.sentence == "Host 2 failed: its function raised an exception."


@pytest.mark.parametrize(
    ("earlier", "words"),
    [
        ([], "This job is the next to start."),
        (["a"], "One other job comes first: a."),
        (["a", "b", "c", "d"], "4 other jobs come first: a, b, c and 1 more."),
    ],
)
def test_the_jobs_that_come_first_in_the_queue_are_named(earlier, words) -> None:
    job = jobset()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "lq"}
    job["spec"]["suspend"] = True
    assert of(Observed(job, earlier_jobs=earlier)).sentence.startswith(
        "The job waits for the queue 'lq'"
    )
    queued = {"spec": {"active": True}, "status": {"conditions": []}}
    finding = of(Observed(job, queue_workload=queued, earlier_jobs=earlier))
    assert finding.sentence == f"The job waits in the queue 'lq'. {words}"


@pytest.mark.parametrize(
    ("state", "kind", "hopeless"),
    [
        ("Pending", JobCause.PROVISIONING, False),
        ("Rejected", JobCause.QUEUE_REFUSED, True),
    ],
)
def test_a_check_of_the_queue(state: str, kind: JobCause, hopeless: bool) -> None:
    job = jobset()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "lq"}
    job["spec"]["suspend"] = True
    queued = {
        "status": {
            "conditions": [{"type": "QuotaReserved", "status": "True"}],
            "admissionChecks": [
                {"name": "dws", "state": state, "message": "waiting for capacity."}
            ],
        }
    }
    finding = of(Observed(job, queue_workload=queued))
    assert (finding.kind, finding.hopeless) == (kind, hopeless)
    assert "waiting for capacity." in finding.sentence


def test_the_queue_takes_a_place_away() -> None:
    job = jobset()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "lq"}
    evicted = {
        "type": "Evicted",
        "status": "True",
        "reason": "Preempted",
        "message": "Preempted by x",
    }
    finding = of(Observed(job, queue_workload={"status": {"conditions": [evicted]}}))
    assert (finding.kind, finding.hopeless) == (JobCause.PREEMPTED, False)


def test_node_pools_are_read_from_nodes() -> None:
    world = recorded.world_at("15-node-death", 50)
    (pool,) = nodes.pools_of(world.all("nodes"))
    assert str(pool) == "tpu-v6e-4x4 (tpu-v6e-slice 4x4, 1 node)"
    assert (pool.chips_each, pool.ready, pool.machine) == (4, 0, "ct6e-standard-4t")
    cpu = {"metadata": {"name": "c", "labels": {}}, "status": {"conditions": []}}
    spot = node("s", "spot", "2x2", **{"cloud.google.com/gke-spot": "true"})
    assert [p.spot for p in nodes.pools_of([cpu, spot])] == [True, False]


NO_MEMORY = "0/1 nodes are available: 1 Insufficient memory. preemption: none"


@pytest.mark.parametrize(
    ("amount", "has", "hopeless"),
    [("60Gi", "50Gi", True), ("60Gi", "61440Mi", False), ("60Gi", "720Gi", False)],
)
def test_memory_that_no_node_has_is_not_waited_for(amount: str, has: str, hopeless: bool) -> None:
    wanted, existing = jobset(1), node("n0", "tpus", "4x4")
    template = wanted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"]["containers"][0]["resources"] = {"requests": {"memory": amount}}
    existing["status"]["allocatable"]["memory"] = has
    finding = of(Observed(wanted, [pod(0, NO_MEMORY)], nodes=[existing]), now=NOW)
    assert finding.hopeless == hopeless
    if hopeless:
        assert finding.kind is JobCause.NO_NODE_POOL
        assert (
            "has the 60Gi of memory that a pod requests; the largest has 50Gi" in finding.sentence
        )
    else:
        assert finding.kind is JobCause.NO_ROOM


def test_pods_that_their_job_removes_afterwards_did_not_go_first() -> None:
    """Host 2 alone is named: it was deleted by force, and its Job then removed the other pods."""
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    child = {"metadata": {"name": "j", "uid": "j"}, "status": {"conditions": [failed]}}
    over = jobset()
    over["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    leaving = [pod(host) for host in (0, 1)]
    for leaving_pod in leaving:
        leaving_pod["metadata"]["deletionTimestamp"] = "2026-11-21T01:00:40Z"
    of_job = {"kind": "Job", "name": "j", "uid": "j"}
    messages = [f"Created pod: kinetic-job-1-host-0-{host}-abcde" for host in range(4)]
    messages += [f"Deleted pod: kinetic-job-1-host-0-{host}-abcde" for host in (0, 3)]
    events = [
        {"type": "Normal", "message": message, "involvedObject": of_job} for message in messages
    ]
    finding = of(Observed(over, pods=leaving, jobs=[child], events=by_name(*events)))
    assert finding.hosts == (2,)
    assert finding.sentence.startswith("The pod of host 2 was deleted, or ended without a recorded")


@pytest.mark.parametrize(("after_s", "hopeless"), [(10, False), (31, True)])
def test_a_class_of_the_queue_that_does_not_exist_is_named(after_s: int, hopeless: bool) -> None:
    job = jobset()
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "lq"}
    job["spec"]["suspend"] = True
    missing = event("WorkloadPriorityClassNotFound", "", "kinetic-job-1", kind="JobSet", n=20)
    missing |= {"message": 'WorkloadPriorityClass "urgent" not found', "lastTimestamp": None}
    missing |= {"eventTime": "2026-11-21T01:00:00.123456Z"}
    finding = of(Observed(job, events=by_name(missing)), now=START + after_s)
    assert (finding.kind, finding.hopeless) == (JobCause.QUEUE_REFUSED, hopeless)
    assert finding.sentence.startswith(
        "The queue 'lq' cannot take the job: \"WorkloadPriorityClass "
    )


NO_CPU = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu."


def asking(**requests: str) -> Document:
    wanted = jobset(1)
    template = wanted["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    template["spec"]["containers"][0]["resources"] = {"requests": requests}
    template["spec"]["nodeSelector"] = {}
    return wanted


def machine(cpu: str, *taints: str) -> Document:
    created = node(f"n{cpu}", "pool", "4x4")
    created["status"]["allocatable"] = {"cpu": cpu, "memory": "320Gi"}
    created["spec"]["taints"] = [{"key": key, "effect": "NoSchedule"} for key in taints]
    return created


def test_processors_that_no_node_has_are_not_waited_for() -> None:
    """A larger machine does not count if the pods do not tolerate its taint."""
    existing = [machine("80"), machine("79500m"), machine("900", "google.com/tpu")]
    finding = of(Observed(asking(cpu="500"), [pod(0, NO_CPU)], nodes=existing), now=NOW)
    assert (finding.kind, finding.hopeless) == (JobCause.NO_NODE_POOL, True)
    assert finding.sentence.startswith(
        "No node has the 500 CPUs that a pod requests; the largest has 80. Ask for less with cpu="
    )
    finding = of(Observed(asking(cpu="60"), [pod(0, NO_CPU)], nodes=existing), now=NOW)
    assert finding.kind is JobCause.NO_ROOM
    assert finding.sentence.startswith("The 2 nodes are in use or not ready.")


def test_taints_that_come_and_go_are_waited_for() -> None:
    nodes = [machine("80", "node.kubernetes.io/unreachable"), machine("80", "google.com/tpu")]
    facts = Observed(asking(cpu="60"), [pod(0, NO_CPU)], nodes=nodes)
    assert of(facts, now=NOW).kind is JobCause.NO_ROOM
    finding = of(Observed(asking(cpu="60"), [pod(0, NO_CPU)], nodes=nodes[1:]), now=NOW)
    assert (finding.kind, finding.hopeless) == (JobCause.NO_NODE_POOL, True)
    assert finding.sentence.startswith("No node of the cluster has what the pods request.")


def test_a_head_that_went_first_is_named_as_one() -> None:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    over = jobset()
    over["spec"]["replicatedJobs"].append({"name": "head", "template": {"spec": {}}})
    over["status"] = {"conditions": [failed]}
    child = {"metadata": {"name": "kinetic-job-1-head-0", "uid": "j"}, "status": over["status"]}
    created = event("Created", "Created pod: kinetic-job-1-head-0-0-abcde", "kinetic-job-1-head-0")
    created |= {"type": "Normal", "involvedObject": {"name": "kinetic-job-1-head-0", "uid": "j"}}
    existing = [pod(host) for host in range(4)]
    finding = of(Observed(over, pods=existing, jobs=[child], events=by_name(created)))
    assert finding.sentence.startswith("The pod of head 0 was deleted, or ended without a recorded")
    assert finding.hosts == (4,)


def test_a_leader_that_has_all_hosts_started_again_is_not_lost() -> None:
    """A leader ends with exit code 3 to restart all hosts: no finding may call it lost."""
    leader, evicted = ended(0, 3), ended(0, 43)
    for document in (leader, evicted):
        document["metadata"]["labels"]["kinetic.dev/job-id"] = "job-1"
    assert diagnose(Observed(jobset(2), [leader, running_pod(1, 0)])) is None
    finding = of(Observed(jobset(2), [evicted, ended(1, 137, reason="OOMKilled")]))
    assert (finding.kind, finding.hosts) == (JobCause.OUT_OF_MEMORY, (1,))


def test_a_leader_that_its_hosts_have_lost_is_named_before_the_cluster_gives_it_up() -> None:
    """The status names a leader whose machine is lost; the cluster says for 40 s that it runs."""
    leader, lost = running_pod(0, 0), [ended(host, 1) for host in (1, 2)]
    for document in (leader, *lost):
        document["metadata"]["labels"]["kinetic.dev/job-id"] = "job-1"
    status = states.status_of(jobset(3), [leader, *lost])
    words = "hosts 1, 2 lost the connection to host 0, which leads: its node n0 may be lost"
    assert (status.phase, status.reason) == (JobStatus.RUNNING, words)
    leader["status"]["conditions"] = []
    finding = of(Observed(jobset(3), [leader, *lost]))
    assert (finding.kind, finding.hosts) == (JobCause.NODE_LOST, (0, 1, 2))
    assert "Host 0 was lost: its node n0 does not answer" in finding.sentence


def test_pods_that_do_not_end_are_named_while_all_hosts_are_to_start_again() -> None:
    """During a restart, the status names pods that do not end, because their node is dead."""
    leader, rest = ended(0, 3), [running_pod(host, 0) for host in (1, 2)]
    for document in (leader, *rest):
        document["metadata"]["labels"]["kinetic.dev/job-id"] = "job-1"
    for document in rest:
        document["metadata"]["deletionTimestamp"] = "2026-11-21T01:00:10Z"
    status = states.status_of(jobset(3), [leader, *rest])
    words = "its hosts restart once these have ended: hosts 1, 2 on n1, n2"
    assert (status.phase, status.reason) == (JobStatus.RUNNING, words)
    assert status.hosts[0].reason == "it had all hosts restarted"
