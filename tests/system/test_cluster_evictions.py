"""Hosts that the cluster evicts: within seconds an error names them, and their functions have time
to save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from doubles.cluster import problems
from doubles.cluster.fixtures import SHARES_FILES
from doubles.cluster.kinds import JOB_SETS
from gangs import wait_until
from on_pods import finish, save, wait_at_first, wait_at_second, wait_at_third, wait_for_ever

import kinetic
from kinetic._core import events, layout
from kinetic._core.exits import Exit
from kinetic.errors import HostLost, JobFailed, PreflightError

pytestmark = [pytest.mark.double, pytest.mark.settles_within(30)]
GANG = "tpu-v6e-16"


def refuse_patterns(resource, thing):
    """Refuse the JobSet with the error of servers before 0.10, which lack a field."""
    field = "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"
    if "onJobFailureMessagePatterns" in str(thing):
        raise problems.bad_request(f'strict decoding error: unknown field "{field}"')


def start_and_wait(cluster, function, marker, accelerator=GANG, **options):
    assert SHARES_FILES
    handle = kinetic.run(accelerator=accelerator, **options)(function).run_async(str(marker))
    marks = [Path(f"{marker}-{host}") for host in range(handle.hosts)]
    wait_until(
        lambda: all(path.exists() for path in marks),
        f"the function has not begun\n{cluster.describe()}",
    )
    return handle


def events_of(home, handle):
    return events.parse((home / layout.JobKeys(handle.job_id).events).read_bytes())


def pod_of(cluster, handle, host):
    (name,) = (
        pod["metadata"]["name"]
        for pod in cluster.objects("pods")
        if handle.job_id in pod["metadata"]["name"]
        and pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(host)
        and "deletionTimestamp" not in pod["metadata"]
    )
    return name


@pytest.mark.parametrize(
    ("preempted", "why"), [(False, "its node was drained"), (True, "higher priority")]
)
@pytest.mark.parametrize("host", [0, 2])
def test_a_host_that_is_taken_away_is_named_with_the_reason(on_cluster, home, host, preempted, why):
    handle = start_and_wait(on_cluster, wait_for_ever, home.parent / "m")
    on_cluster.evict_pod(pod_of(on_cluster, handle, host), preempted=preempted)
    assert handle.status() == "RUNNING"  # The pod still exists.
    with pytest.raises(HostLost, match=rf"(?s)host {host} of 4 was lost\. .*evicted.*{why}"):
        handle.result(timeout=60, cleanup=False)
    assert handle.outcome().first.exit is Exit.EVICTED
    on_cluster.delete("jobsets", f"kinetic-{handle.job_id}")
    on_cluster.wait_for(lambda: not on_cluster.left_over())
    assert re.search(why, kinetic.attach(handle.job_id).outcome().reason)


def test_the_function_of_a_single_host_gets_its_grace(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, save, marker, "cpu")
    on_cluster.evict_pod(pod_of(on_cluster, handle, 0))
    with pytest.raises(HostLost, match="evicted or preempted"):
        handle.result(timeout=60)
    assert Path(f"{marker}-0-saved").exists()


def test_the_function_of_the_host_in_a_gang_gets_its_grace(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, save, marker)
    on_cluster.evict_pod(pod_of(on_cluster, handle, 2))
    with pytest.raises(HostLost, match="host 2 of 4 was lost"):
        handle.result(timeout=60)
    wait_until(Path(f"{marker}-2-saved").exists, "the function was killed before it had saved")


def test_a_function_that_ends_within_its_grace_has_succeeded(on_cluster, home):
    handle = start_and_wait(on_cluster, finish, home.parent / "m", "cpu")
    on_cluster.evict_pod(pod_of(on_cluster, handle, 0))
    assert handle.result(timeout=60) == "finished"


@pytest.mark.parametrize(
    ("accelerator", "host"), [("cpu", 0), pytest.param(GANG, 0, marks=pytest.mark.long), (GANG, 2)]
)
def test_another_attempt_is_made_in_new_pods(on_cluster, home, accelerator, host):
    handle = start_and_wait(on_cluster, wait_at_first, home.parent / "m", accelerator, retries=1)
    on_cluster.evict_pod(pod_of(on_cluster, handle, host))
    assert handle.result(timeout=120) == "again"
    assert handle.outcome().attempt == 2
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_a_later_attempt_does_not_wait_for_nodes_for_ever(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, wait_for_ever, marker, "cpu", retries=1, start_timeout=20)
    on_cluster.hold_back("kinetic-")
    on_cluster.evict_pod(pod_of(on_cluster, handle, 0))
    with pytest.raises(JobFailed, match="did not start within 20 s"):
        handle.result(timeout=120)
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_a_pod_that_is_killed_at_once_has_had_its_attempt(on_cluster, home):
    handle = start_and_wait(on_cluster, wait_at_first, home.parent / "m", "cpu", retries=1)
    on_cluster.kill_pod_process(pod_of(on_cluster, handle, 0), oom=True)
    assert handle.result(timeout=120) == "again"
    assert handle.outcome().attempt == 2
    attempts = [event.attempt for event in events_of(home, handle) if event.kind == "begun"]
    assert attempts == [1, 2]


def test_a_pod_that_is_killed_at_once_has_had_each_of_its_attempts(on_cluster, home):
    handle = start_and_wait(on_cluster, wait_at_second, home.parent / "m", "cpu", retries=1)
    on_cluster.kill_pod_process(pod_of(on_cluster, handle, 0), oom=True)
    with pytest.raises(HostLost, match="host 0 of 1"):
        handle.result(timeout=120)
    assert handle.outcome().attempt == 2
    attempts = [event.attempt for event in events_of(home, handle) if event.kind == "begun"]
    assert attempts == [1, 2]


def test_what_is_taken_away_does_not_count(on_cluster, home):
    marker = home.parent / "m"
    handle = start_and_wait(on_cluster, wait_at_third, marker, "cpu", retries=1)
    for attempt in (1, 2):
        wait_until(lambda n=attempt: Path(f"{marker}-0-{n}").exists(), "no further attempt")
        on_cluster.evict_pod(pod_of(on_cluster, handle, 0))
    assert handle.result(timeout=120) == "third"
    assert handle.outcome().attempt == 3


def test_an_older_jobset_is_named_before_anything_is_sent(on_cluster):
    on_cluster.admit_with(refuse_patterns)
    with pytest.raises(PreflightError, match=r"JobSet is too old: .* 0\.10"):
        kinetic.run(accelerator=GANG)(wait_at_third)("m")
    assert not on_cluster.left_over()


def set_suspended(cluster, handle, is_suspended):
    """Suspend or resume a job's JobSet as a queue does; the JobSet counts no restart for it."""

    def change(jobset):
        jobset["spec"]["suspend"] = is_suspended

    cluster.store.update(JOB_SETS, cluster.namespace, f"kinetic-{handle.job_id}", change)


def test_a_job_that_its_queue_stops_and_resumes_begins_its_next_attempt_once(on_cluster, home):
    handle = start_and_wait(
        on_cluster, wait_at_first, home.parent / "m", "tpu-v6e-8", slices=2, retries=1
    )
    set_suspended(on_cluster, handle, True)
    on_cluster.wait_for(lambda: not on_cluster.objects("pods"))
    set_suspended(on_cluster, handle, False)
    assert handle.result(timeout=120, cleanup=False) == "again"
    assert handle.outcome().attempt == 2
    (jobset,) = on_cluster.objects("jobsets")
    assert jobset["status"]["restarts"] == 0, "a restart was wasted"
    handle.cleanup()
