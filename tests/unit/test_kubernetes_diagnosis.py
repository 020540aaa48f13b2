"""The diagnosis of jobs, over recordings of a real control plane."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import recorded
from recorded import World, by_name
from test_kubernetes_states import kind_of, pods_of, workload

from kinetic._backends.kubernetes.diagnosis import JobCause, JobDiagnosis, Observed, diagnose

HOPELESS = True


def observed(world: World, scenario: str, name: str) -> Observed | None:
    job = workload(world, scenario, name)
    if job is None:
        return None
    owned = [j for j in world.all("jobs") if j["metadata"]["name"].startswith(f"{name}-")]
    queued = [
        q
        for q in world.all("workloads")
        if q["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    ]
    return Observed(
        job,
        pods_of(world, name),
        jobs=owned if kind_of(scenario) == "jobsets" else (),
        events=by_name(*world.all("events")),
        queue_workload=queued[0] if queued else None,
    )


def findings(scenario: str, name: str) -> list[JobDiagnosis | None]:
    facts = (observed(world, scenario, name) for _, world in recorded.worlds(scenario))
    return [diagnose(s) for s in facts if s is not None]


EXPECTED: dict[tuple[str, str], list[tuple[JobCause | None, bool, tuple[int, ...]]]] = {
    ("01-job-success", "hello"): [(JobCause.PREPARING, False, (0,)), (None, False, ())],
    ("02-job-exit-1", "boom"): [(JobCause.HOST_FAILED, HOPELESS, (0,))],
    ("03-job-sigkill-oom", "oom"): [(JobCause.OUT_OF_MEMORY, HOPELESS, (0,))],
    ("04-job-unschedulable", "nofit"): [(JobCause.NO_NODE_POOL, False, (0,))],
    ("05-job-image-pull", "img"): [(JobCause.IMAGE_PULL, HOPELESS, (0,))],
    ("06-job-ttl", "ttl"): [(None, False, ())],
    ("07a-job-deleted-foreground", "run"): [(None, False, ())],
    ("07b-job-deleted-background", "run"): [(None, False, ())],
    ("07c-job-deleted-no-policy-orphans", "run"): [(None, False, ())],
    ("08-jobset-4-hosts-success", "train"): [(None, False, ())],
    ("09-jobset-host-2-fails", "train"): [(JobCause.HOST_FAILED, HOPELESS, (2,))],
    ("09b-jobset-cascade-same-second", "train"): [(JobCause.HOST_FAILED, HOPELESS, (2, 0, 1, 3))],
    ("10-jobset-restart", "train"): [(JobCause.HOST_FAILED, False, (1,)), (None, False, ())],
    ("10b-jobset-restarts-exhausted", "train"): [(JobCause.HOST_FAILED, HOPELESS, (0,))],
    ("11-jobset-2-slices", "train"): [(None, False, ())],
    ("12-jobset-head-and-slices", "run"): [
        (JobCause.HOST_FAILED, False, (2,)),
        (None, False, ()),
    ],
    ("12b-jobset-restart-one-slice", "run"): [
        (JobCause.HOST_FAILED, False, (2,)),
        (None, False, ()),
    ],
    ("13-jobset-partial-unschedulable", "big"): [(JobCause.PARTIAL_SLICE, False, (4,))],
    ("14a-jobset-deleted-default", "train"): [(None, False, ())],
    ("14b-jobset-deleted-foreground", "train"): [(None, False, ())],
    ("14c-jobset-deleted-and-resubmitted", "train"): [
        (JobCause.NO_ROOM, False, (0, 1, 2, 3)),
        (None, False, ()),
    ],
    ("15-node-death", "train"): [(JobCause.NODE_LOST, False, (1,)), (None, False, ())],
    ("15b-job-pod-evicted", "run"): [(JobCause.EVICTED, False, (0,)), (None, False, ())],
    ("16a-jobset-created-suspended", "train"): [
        (JobCause.SUSPENDED, False, ()),
        (None, False, ()),
    ],
    ("16b-job-suspended-while-running", "run"): [
        (JobCause.SUSPENDED, False, ()),
        (None, False, ()),
    ],
    ("17b-job-over-quota", "run"): [(JobCause.QUOTA, HOPELESS, (1,)), (None, False, ())],
    ("19-kueue", "a"): [(JobCause.QUEUED, False, ()), (None, False, ())],
    ("19-kueue", "b"): [(JobCause.QUEUED, False, ()), (None, False, ())],
    ("19-kueue", "noqueue"): [
        (JobCause.QUEUED, False, ()),
        (JobCause.QUEUE_REFUSED, HOPELESS, ()),
    ],
    ("19-kueue", "toobig"): [
        (JobCause.QUEUED, False, ()),
        (JobCause.QUEUE_REFUSED, HOPELESS, ()),
    ],
    ("21-job-bad-command", "nocmd"): [(JobCause.BAD_COMMAND, HOPELESS, (0,))],
    ("22-job-missing-secret", "nosecret"): [(JobCause.MISSING_SECRET, HOPELESS, (0,))],
    ("23-job-missing-configmap-volume", "novolume"): [(JobCause.MISSING_VOLUME, HOPELESS, (0,))],
    ("24-job-deadline", "slow"): [(JobCause.DEADLINE, HOPELESS, ())],
    ("25-job-retries", "retry"): [(JobCause.HOST_FAILED, HOPELESS, (0,))],
    ("26-job-restart-on-failure", "again"): [(JobCause.HOST_FAILED, HOPELESS, ())],
}
"""The findings (cause, hopeless, hosts) that each recording must show. If the last one is not None,
it must still hold at the end of the recording."""


def test_every_recording_is_in_the_table() -> None:
    assert tuple(sorted({scenario for scenario, _ in EXPECTED})) == recorded.scenarios()


@pytest.mark.parametrize(("scenario", "name"), EXPECTED)
def test_what_is_found_in_the_order_in_which_it_is(scenario: str, name: str) -> None:
    sentences = [
        (f.kind, f.hopeless, f.hosts) if f else (None, False, ()) for f in findings(scenario, name)
    ]
    finding = [key for key, _ in groupby(sentences)]
    expected = EXPECTED[scenario, name]
    at = [max(n for n, f in enumerate(finding) if f == e) if e in finding else -1 for e in expected]
    assert -1 not in at, finding
    if expected[-1][0] is not None:
        assert finding[-1] == expected[-1]
    if expected == [(None, False, ())]:
        assert {f[0] for f in finding} <= {None, JobCause.PREPARING}


@pytest.mark.parametrize(("scenario", "name"), EXPECTED)
def test_sentences_are_for_people_and_do_not_flutter(scenario: str, name: str) -> None:
    sentences = [f.sentence for f in findings(scenario, name) if f]
    for sentence in sentences:
        assert sentence[0].isupper() or sentence[0].isdigit()
        assert sentence.endswith(".")
        assert ".." not in sentence
        assert "None" not in sentence
        assert "  " not in sentence
    assert len([key for key, _ in groupby(sentences)]) <= 10


@pytest.mark.parametrize(
    ("scenario", "name", "t", "words"),
    [
        ("03-job-sigkill-oom", "oom", 9, "its limit of 64Mi"),
        ("04-job-unschedulable", "nofit", 9, "No node of the cluster has tpu-v6e-slice 8x8."),
        ("05-job-image-pull", "img", 20, "The image us-docker.pkg.dev/example/train/does-not-exi"),
        (
            "09-jobset-host-2-fails",
            "train",
            9,
            "Host 2 failed: its function raised an exception: ho",
        ),
        ("09b-jobset-cascade-same-second", "train", 9, "Host 2 failed: it ended with exit code 1"),
        ("13-jobset-partial-unschedulable", "big", 9, "4 of 5 hosts have nodes; host 4 waits"),
        ("15-node-death", "train", 60, "Host 1 was lost: its node gke-tpu-v6e-4x4-1 stopped answ"),
        ("17b-job-over-quota", "run", 2, "The namespace's quota 'tpu'"),
        ("19-kueue", "b", 5, "The job waits in the queue 'lq': \"couldn't assign fla"),
        ("19-kueue", "noqueue", 5, "LocalQueue nosuch doesn't exist\". Set queue= to"),
        ("19-kueue", "toobig", 5, "Ask for less, or set queue= to another queue"),
        ("21-job-bad-command", "nocmd", 9, '"no-such-program": executable file not found'),
        ("22-job-missing-secret", "nosecret", 9, "The secret wandb does not exist"),
        ("23-job-missing-configmap-volume", "novolume", 9, "The config map run-code does not"),
    ],
)
def test_what_the_sentence_names(scenario: str, name: str, t: float, words: str) -> None:
    facts = observed(recorded.world_at(scenario, t), scenario, name)
    assert facts is not None
    finding = diagnose(facts)
    assert finding is not None
    assert words in finding.sentence


def test_who_went_first_where_only_the_jobs_deletions_tell_it() -> None:
    facts = observed(
        recorded.world_at("09-jobset-host-2-fails", 9), "09-jobset-host-2-fails", "train"
    )
    assert facts is not None
    world = recorded.world_at("09-jobset-host-2-fails", 9)
    deletions = [e for e in world.all("events") if e.get("type") != "Warning"]
    jobs = [job | {"status": failed_silently(job)} for job in facts.jobs]
    workload = facts.workload | {"status": failed_silently(facts.workload)}
    finding = diagnose(
        replace(facts, workload=workload, pods=(), jobs=jobs, events=by_name(*deletions))
    )
    assert finding is not None
    assert (finding.kind, finding.hopeless, finding.hosts) == (JobCause.HOST_FAILED, True, (2,))
    assert finding.sentence.startswith("The pod of host 2 was deleted, or ended")
    nobody = replace(facts, workload=workload, pods=(), jobs=jobs, events=by_name())
    assert (diagnose(nobody) or finding).hosts == ()


def failed_silently(thing: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a workload whose pods were deleted: it failed, without details."""
    sentences = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    return thing["status"] | {"conditions": [sentences]}
