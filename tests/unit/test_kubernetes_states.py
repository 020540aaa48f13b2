"""The state of a job on a cluster, over recordings of a real control plane."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import recorded
from recorded import World

from kinetic._backends.base import HostStatus, Status
from kinetic._backends.kubernetes import states
from kinetic._backends.kubernetes.observed import shape_of
from kinetic._core.state import JobStatus

PENDING, RUNNING = JobStatus.PENDING, JobStatus.RUNNING
LETTERS = {
    "P": PENDING,
    "R": RUNNING,
    "S": JobStatus.SUCCEEDED,
    "F": JobStatus.FAILED,
    "-": JobStatus.NOT_FOUND,
}
PHASES = {
    "01-job-success": {"hello": "PRS"},
    "02-job-exit-1": {"boom": "PRF"},
    "03-job-sigkill-oom": {"oom": "PRF"},
    "04-job-unschedulable": {"nofit": "P"},
    "05-job-image-pull": {"img": "P"},
    "06-job-ttl": {"ttl": "PRS-"},
    "07a-job-deleted-foreground": {"run": "PR-"},
    "07b-job-deleted-background": {"run": "PR-"},
    "07c-job-deleted-no-policy-orphans": {"run": "PR-"},
    "08-jobset-4-hosts-success": {"train": "PRS-"},
    "09-jobset-host-2-fails": {"train": "PRF"},
    "09b-jobset-cascade-same-second": {"train": "PRF"},
    "10-jobset-restart": {"train": "PRPRS"},
    "10b-jobset-restarts-exhausted": {"train": "PRPRF"},
    "11-jobset-2-slices": {"train": "PRS"},
    "12-jobset-head-and-slices": {"run": "PRPRPRS"},
    "12b-jobset-restart-one-slice": {"run": "PRPRS"},
    "13-jobset-partial-unschedulable": {"big": "P"},
    "14a-jobset-deleted-default": {"train": "PR-"},
    "14b-jobset-deleted-foreground": {"train": "PR-"},
    "14c-jobset-deleted-and-resubmitted": {"train": "PR-PR"},
    "15-node-death": {"train": "PRPRS"},
    "15b-job-pod-evicted": {"run": "PRPRS"},
    "16a-jobset-created-suspended": {"train": "PRS"},
    "16b-job-suspended-while-running": {"run": "PRPRS"},
    "17b-job-over-quota": {"run": "PRS"},
    "19-kueue": {"a": "PRS", "b": "-PRS", "noqueue": "-P", "toobig": "-P"},
    "21-job-bad-command": {"nocmd": "PF"},
    "22-job-missing-secret": {"nosecret": "P"},
    "23-job-missing-configmap-volume": {"novolume": "P"},
    "24-job-deadline": {"slow": "PRF"},
    "25-job-retries": {"retry": "PRPRPRF"},
    "26-job-restart-on-failure": {"again": "PRF"},
}


def kind_of(scenario: str) -> str:
    """Return "jobsets" if a recording's workload is a JobSet, which creates Jobs; else "jobs"."""
    watched = {row.watch for row in recorded.rows(scenario)}
    return "jobsets" if "jobsets" in watched else "jobs"


def workload(world: World, scenario: str, name: str) -> dict[str, Any] | None:
    workloads = world.all(kind_of(scenario))
    return next((o for o in workloads if o["metadata"]["name"] == name), None)


def pods_of(world: World, name: str) -> list[dict[str, Any]]:
    owners = ("jobset.sigs.k8s.io/jobset-name", "job-name")
    return [
        p for p in world.all("pods") if name in [p["metadata"]["labels"].get(o) for o in owners]
    ]


def statuses(scenario: str, name: str) -> list[Status]:
    return [
        states.status_of(workload(world, scenario, name), pods_of(world, name))
        for row, world in recorded.worlds(scenario)
        if row.watch in ("pods", kind_of(scenario))
    ]


def status_at(scenario: str, name: str, t: float) -> Status:
    world = recorded.world_at(scenario, t)
    return states.status_of(workload(world, scenario, name), pods_of(world, name))


def test_every_recording_is_in_the_table() -> None:
    assert tuple(sorted(PHASES)) == recorded.scenarios()


@pytest.mark.parametrize(
    ("scenario", "name"), [(scenario, name) for scenario in PHASES for name in PHASES[scenario]]
)
def test_phases_follow_each_other_as_they_should(scenario: str, name: str) -> None:
    phases = [status.phase for status in statuses(scenario, name)]
    assert [phase for phase, _ in groupby(phases)] == [LETTERS[c] for c in PHASES[scenario][name]]


@pytest.mark.parametrize("scenario", PHASES)
def test_the_end_comes_with_the_condition_not_before(scenario: str) -> None:
    for name in PHASES[scenario]:
        for _, world in recorded.worlds(scenario):
            job = workload(world, scenario, name)
            held = {
                c["type"]
                for c in ((job or {}).get("status") or {}).get("conditions") or ()
                if c["status"] == "True"
            }
            phases = states.status_of(job, pods_of(world, name)).phase
            assert (phases is JobStatus.SUCCEEDED) == bool(held & {"Complete", "Completed"})
            assert (phases is JobStatus.FAILED) == ("Failed" in held)


@pytest.mark.parametrize("scenario", sorted(set(PHASES) - {"26-job-restart-on-failure"}))
def test_a_gang_runs_only_when_each_of_its_programs_has_begun(scenario: str) -> None:
    for name in PHASES[scenario]:
        for _, world in recorded.worlds(scenario):
            job = workload(world, scenario, name)
            if job is None or "deletionTimestamp" in job["metadata"]:
                continue
            phases = states.status_of(job, pods_of(world, name))
            if phases.phase is RUNNING:
                assert not [h for h in phases.hosts if h.phase is PENDING]


@pytest.mark.parametrize(
    ("scenario", "name", "t", "expected"),
    [
        ("13-jobset-partial-unschedulable", "big", 9, "4 of 5 hosts run"),
        ("04-job-unschedulable", "nofit", 9, "its hosts wait for nodes"),
        ("05-job-image-pull", "img", 9, "host 0 does not start: ImagePull"),
        ("05-job-image-pull", "img", 20, "host 0 does not start: ImagePull"),
        ("10-jobset-restart", "train", 7, "its hosts are starting again"),
        ("16a-jobset-created-suspended", "train", 1, "it is suspended"),
        ("19-kueue", "b", 5, "the job waits in the queue 'lq'"),
        ("07a-job-deleted-foreground", "run", 4, "it is being removed from the cluster"),
        ("09-jobset-host-2-fails", "train", 7, "host 2 has failed"),
        ("24-job-deadline", "slow", 9, "DeadlineExceeded: Job was active longer than"),
    ],
)
def test_the_reason_says_what_the_job_waits_for(
    scenario: str, name: str, t: float, expected: str
) -> None:
    assert status_at(scenario, name, t).reason.startswith(expected)


def test_hosts_of_which_there_is_more_to_say_than_of_the_job() -> None:
    partial = status_at("13-jobset-partial-unschedulable", "big", 9)
    assert [h.phase for h in partial.hosts] == [RUNNING] * 4 + [PENDING]
    assert partial.hosts[4].reason.startswith("it has no node: 0/5 nodes are available")
    failed = status_at("09-jobset-host-2-fails", "train", 5.9)
    assert HostStatus(2, JobStatus.FAILED, "its program ended with exit code 42") in failed.hosts
    lost = status_at("15-node-death", "train", 50)
    assert lost.hosts == (HostStatus(1, RUNNING, "its node does not answer"),)


def test_hosts_of_slices_are_numbered_through() -> None:
    jobset = recorded.document("11-jobset-2-slices", "request.json")
    shape = shape_of(jobset)
    pod = {
        "metadata": {
            "labels": {
                "jobset.sigs.k8s.io/replicatedjob-name": shape.sets[0].name,
                "jobset.sigs.k8s.io/job-index": "1",
                "batch.kubernetes.io/job-completion-index": "1",
            }
        }
    }
    assert shape.hosts == 4
    assert shape.host_of(pod) == 3
    assert shape.host_of({"metadata": {}}) == 0


def test_a_workload_that_was_just_created_is_pending() -> None:
    job = {"kind": "Job", "metadata": {"name": "x", "uid": "1"}, "spec": {}, "status": {}}
    assert states.status_of(job, ()).phase is PENDING
    assert states.status_of(None, ()).phase is JobStatus.NOT_FOUND
