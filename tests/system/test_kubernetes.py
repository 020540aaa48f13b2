"""Functions on a cluster, in Jobs and JobSets with faults. Pods are processes of this machine and
real hosts of a job; the cluster is clean afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doubles.cluster.fixtures import SHARES_FILES
from gangs import PATIENCE_S, read_files, wait_until
from on_pods import answer, fail_on_host_2, nap, token_size, wait_at_first, wait_for_ever, world

import kinetic
from kinetic.errors import BackendUnavailable, HostLost, JobCancelled, JobFailed, PreflightError

GANG = "tpu-v6e-16"


def pods_of(cluster, handle):
    return sorted(
        (
            pod["metadata"]["name"]
            for pod in cluster.objects("pods")
            if handle.job_id in pod["metadata"]["name"]
            and "deletionTimestamp" not in pod["metadata"]
        ),
    )


def run_until(cluster, function, marker, hosts=4, **options):
    if not SHARES_FILES:
        pytest.skip("needs pods that share files with this machine, as its own processes do")
    handle = kinetic.run(accelerator=GANG, **options)(function).run_async(str(marker))
    wait_until(
        lambda: all(Path(f"{marker}-{host}").exists() for host in range(hosts)),
        f"the function has not begun\n{cluster.describe()}",
    )
    return handle


def test_one_host_is_a_job(on_cluster, capfd):
    assert kinetic.run(accelerator="cpu")(answer)() == 42
    assert "from a pod" in capfd.readouterr().out


def test_several_hosts_are_not_a_job_nor_planned_as_one(on_cluster):
    gang = kinetic.run(accelerator=GANG, backend="gke")(world)
    for refused in (gang, gang.plan):
        with pytest.raises(PreflightError, match="runs jobs of one host"):
            refused()


def test_several_hosts_are_a_jobset(on_cluster):
    handle = kinetic.run(accelerator=GANG)(world).run_async()
    assert handle.result() == (4, 16)
    assert handle.backend == "pathways"


def test_the_exception_of_a_host_is_raised_here(on_cluster):
    with pytest.raises(ValueError, match="on purpose") as caught:
        kinetic.run(accelerator=GANG)(fail_on_host_2)()
    assert any("host 2" in note for note in caught.value.__notes__)


EACH = pytest.mark.parametrize("host", [pytest.param(0, id="leader"), pytest.param(2, id="other")])


def lose(cluster, handle, host):
    (lost,) = [pod for pod in pods_of(cluster, handle) if f"-0-{host}-" in pod]
    cluster.delete_pod(lost, force=True)


@EACH
@pytest.mark.settles_within(30)
def test_a_pod_that_is_lost_ends_the_gang_and_is_named(on_cluster, home, host):
    handle = run_until(on_cluster, wait_for_ever, home.parent / "m")
    lose(on_cluster, handle, host)
    with pytest.raises(HostLost, match=f"host {host}"):
        handle.result(timeout=60)


@EACH
@pytest.mark.settles_within(30)
def test_a_lost_pod_is_retried_with_the_whole_gang(on_cluster, home, host):
    handle = run_until(on_cluster, wait_at_first, home.parent / "m", retries=1)
    lose(on_cluster, handle, host)
    assert handle.result(timeout=90) == "again"
    assert handle.outcome().attempt == 2
    # A pod that is deleted may count as taken away, which uses up no retry; hosts agree on it.
    logs = [handle.logs(host=each).splitlines() for each in (0, 1)]
    begins = {line for lines in logs for line in lines if line.endswith(" begins.")}
    assert begins in ({"kinetic: attempt 2 of 2 begins."}, {"kinetic: attempt 2 of 3 begins."})


@pytest.mark.double
def test_an_api_server_that_restarts_is_not_noticed(on_cluster, home):
    handle = run_until(on_cluster, wait_at_first, home.parent / "m")
    on_cluster.restart_server(0.5)
    assert not handle.status().ended
    handle.cancel()
    with pytest.raises(JobCancelled):
        handle.result()


def test_a_cancelled_job_leaves_nothing(on_cluster, home):
    handle = run_until(on_cluster, wait_for_ever, home.parent / "m")
    handle.cancel()
    with pytest.raises(JobCancelled):
        handle.result()


@pytest.mark.double
def test_a_job_that_waits_can_be_cancelled(on_cluster):
    on_cluster.hold_back("kinetic-")
    handle = kinetic.run(accelerator=GANG)(world).run_async()
    assert handle.status() == "PENDING"
    handle.cancel()
    with pytest.raises(JobCancelled):
        handle.result()


def test_a_job_that_can_never_run_fails_and_says_why(on_cluster, monkeypatch, capfd):
    monkeypatch.setenv("KINETIC_POD_SIMULATED", "0")
    with pytest.raises(JobFailed, match="tpu-v5p-slice"):
        kinetic.run(accelerator="tpu-v5p-16", start_timeout=5)(world)()


@pytest.mark.double
def test_the_command_line_says_what_it_waits_for_though_it_is_piped(on_cluster):
    on_cluster.hold_back("kinetic-")
    command = [sys.executable, "-m", "kinetic", "run", "-a", "cpu", "--", "echo", "done"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = next(each for each in run.stderr if each.startswith("kinetic: job-"))
    job_id = re.fullmatch(r"kinetic: (job-\w{8}): \S.*\n", line)[1]
    on_cluster.let_go("kinetic-")
    assert run.communicate(timeout=100)[0] == "done\n"
    assert run.returncode == 0
    kinetic.attach(job_id).cleanup()


@pytest.mark.double
def test_what_a_job_waits_for_is_said_until_it_gives_up(on_cluster, monkeypatch, capfd):
    on_cluster.hold_back("kinetic-")
    with pytest.raises(JobFailed, match="did not start within"):
        kinetic.run(accelerator=GANG, start_timeout=4)(world)()


@pytest.mark.double
def test_a_webhook_that_has_not_heard_of_the_job_yet_refuses_nothing(on_cluster):
    message = 'admission webhook "mpod.kb.io" denied the request: Job.batch "x" not found'
    for accelerator, hosts in (("cpu", 1), (GANG, 4)):
        on_cluster.admission.refusals += [message] * 3
        assert kinetic.run(accelerator=accelerator)(world)()[0] == hosts
        assert on_cluster.admission.refusals == []


@pytest.mark.double
def test_a_leader_that_gives_up_ends_its_workload(on_cluster, home):
    """No node takes the third slice's pods, and the leader gives up after start_timeout: the JobSet
    ends as failed, so that the cluster can remove it."""
    on_cluster.hold_back("*-host-2-*")
    handle = kinetic.run(accelerator="tpu-v6e-8", slices=3, start_timeout=8)(world).run_async()

    def state():
        (jobset,) = on_cluster.objects("jobsets")
        return (jobset.get("status") or {}).get("terminalState", "")

    on_cluster.wait_for(state, 100, "an end of the JobSet")
    assert state() == "Failed"
    on_cluster.let_go("*-host-2-*")
    with pytest.raises(JobFailed, match="hosts 4-5 of 6"):
        handle.result(timeout=60)


def test_secrets_travel_in_the_secret_only(on_cluster, monkeypatch, home):
    secret = os.urandom(9).hex()
    monkeypatch.setenv("MY_TOKEN", secret)
    assert kinetic.run(accelerator="cpu", secrets=["MY_TOKEN"])(token_size)() == len(secret)
    assert secret.encode() not in b"".join(read_files(home).values())
    assert not any(secret in str(request) for request in on_cluster.objects("jobs"))


@pytest.mark.double
def test_a_submission_that_is_killed_leaves_a_job_that_can_be_found(on_cluster, home):
    on_cluster.faults.slow(60, verb="create", resource="secrets")
    code = "import kinetic; kinetic.run(accelerator='cpu')(int).run_async()"
    caller = subprocess.Popen([sys.executable, "-c", code])
    on_cluster.wait_for(lambda: on_cluster.objects("jobs"))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    on_cluster.faults.clear()
    (handle,) = kinetic.list_jobs()
    handle.cancel()
    with pytest.raises(JobCancelled):
        handle.result()


def test_many_jobs_are_asked_for_with_few_calls(on_cluster):
    batch = kinetic.run(accelerator="cpu")(abs).run_async_map(range(-20, 0), max_concurrent=8)
    assert batch.results(progress=False) == list(range(20, 0, -1))


ONLY_SUBMITS = """
import threading
import kinetic

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

threading._register_atexit(setattr, threading.Thread, "start", refuse)  # as in Python 3.12
batch = kinetic.run(accelerator="cpu")(abs).run_async_map(range(-5, 0), max_concurrent=2)
print(batch.group_id)
"""


def test_a_script_that_only_submits_submits_everything(on_cluster):
    done = subprocess.run(
        [sys.executable, "-c", ONLY_SUBMITS], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    batch = kinetic.attach_batch(done.stdout.strip())
    assert batch.results(timeout=PATIENCE_S, progress=False) == [5, 4, 3, 2, 1]


@pytest.mark.double
def test_a_secret_that_is_refused_for_seconds_comes_in_the_end(on_cluster):
    on_cluster.faults.fail(503, times=7, verb="create", resource="secrets")
    on_cluster.faults.fail(429, times=2, verb="create", resource="jobs", retry_after=0)
    assert kinetic.run(accelerator="cpu")(answer)() == 42
    assert on_cluster.counts()["create jobs"] == 3


@pytest.mark.double
def test_a_submission_that_cannot_be_taken_back_can_be_found(on_cluster):
    on_cluster.faults.fail(503, times=100, verb="create", resource="jobs", after=True)
    on_cluster.faults.fail(503, times=100, verb="get", resource="jobs")
    on_cluster.faults.fail(503, times=100, verb="delete", resource="jobs")
    with pytest.raises(BackendUnavailable, match="kinetic jobs cleanup job-"):
        kinetic.run(accelerator="cpu")(answer).run_async()
    assert on_cluster.left_over()
    on_cluster.faults.clear()
    (handle,) = kinetic.list_jobs()
    handle.cleanup()
    assert kinetic.list_jobs() == []


@pytest.mark.double
def test_a_cluster_that_does_not_answer_leads_to_the_callers_line(on_cluster, home, monkeypatch):
    unreachable = home / "kubeconfig"
    unreachable.write_text(
        on_cluster.kubeconfig.read_text().replace(on_cluster.url, "http://127.0.0.1:1")
    )
    monkeypatch.setenv("KUBECONFIG", str(unreachable))
    with pytest.raises(BackendUnavailable, match="are not affected") as caught:
        kinetic.run(accelerator="cpu")(answer)()
    assert [frame.path for frame in caught.traceback] == [Path(__file__)]
    assert kinetic.list_jobs() == []


@pytest.mark.double
@pytest.mark.parametrize("asked_before", [True, False])
def test_credentials_that_expire_do_not_end_the_wait(asked_before, on_cluster, home):
    marker = home.parent / "m"
    handle = kinetic.run(accelerator="cpu")(nap).run_async(str(marker))
    if asked_before:
        on_cluster.wait_for(lambda: handle.status() == "RUNNING")
    wait_until(Path(f"{marker}-0").exists, "the function has not begun")
    on_cluster.expire_token()
    marker.touch()
    assert handle.result(timeout=60) == "slept"
    on_cluster.renew_token()
    kinetic.attach(handle.job_id).cleanup()


@pytest.mark.double
@pytest.mark.settles_within(30)
def test_a_host_that_ran_out_of_memory_is_explained_by_the_cluster(on_cluster, home):
    handle = run_until(on_cluster, wait_for_ever, home.parent / "m")
    (lost,) = [pod for pod in pods_of(on_cluster, handle) if "-0-2-" in pod]
    on_cluster.kill_pod_process(lost, oom=True)
    with pytest.raises(HostLost, match=r"host 2 of 4 was lost.*more memory than"):
        handle.result(timeout=60)


@pytest.mark.double
def test_a_lost_node_ends_the_job_of_its_leader(on_cluster, home):
    handle = run_until(on_cluster, wait_for_ever, home.parent / "m")
    (leader,) = [pod for pod in pods_of(on_cluster, handle) if "-0-0-" in pod]
    node = on_cluster.object("pods", leader)["spec"]["nodeName"]
    on_cluster.lose_node(node)
    with pytest.raises(HostLost, match=f"its node {node} stopped answering"):
        handle.result(timeout=60)
    on_cluster.delete_node(node)  # Only now does the cluster know that the pods have ended.


@pytest.mark.double
def test_a_workload_that_somebody_deletes_is_said(on_cluster, home):
    marker = home.parent / "m"
    handle = kinetic.run(accelerator="cpu")(wait_for_ever).run_async(str(marker))
    wait_until(Path(f"{marker}-0").exists, "the function has not begun")
    on_cluster.delete("jobs", f"kinetic-{handle.job_id}")
    with pytest.raises(HostLost, match="removed from the cluster"):
        handle.result(timeout=60)


@pytest.mark.double
def test_a_job_in_a_queue_says_its_place(on_cluster, monkeypatch, capfd):
    on_cluster.install_kueue({"lq": {"google.com/tpu": "16"}}).paused = True
    monkeypatch.setenv("KINETIC_QUEUE", "lq")
    monkeypatch.setenv("KINETIC_POD_SIMULATED", "0")
    first = kinetic.run(accelerator=GANG)(world).run_async()
    time.sleep(1)  # The cluster's timestamps have whole seconds.
    second = kinetic.run(accelerator=GANG, start_timeout=1)(world).run_async()

    place = rf"waits in the queue 'lq': .* One other job comes first: kinetic-{first.job_id}"

    def its_place():
        return re.search(place, second._backend.why_waiting(second.ref) or "")

    wait_until(its_place, "nobody says which place the job has in its queue")
    time.sleep(2)  # start_timeout begins when the queue admits the job.
    assert second.status() == "PENDING"
    page = second.explain().sections
    assert re.search(place, page["Waits"])
    assert page["Next"] == f"Stop waiting: kinetic jobs cancel {second.job_id}"
    second.cancel()
    first.cancel()


@pytest.mark.double
def test_jobs_that_wait_are_asked_for_together(on_cluster):
    on_cluster.hold_back("kinetic-")
    batch = kinetic.run(accelerator="cpu")(abs).run_async_map(range(-30, 0))
    wait_until(lambda: all(batch.jobs), "not all jobs were submitted")
    on_cluster.forget_requests()
    handle = batch.jobs[0]
    outcomes = handle.settle([job.ref for job in batch.jobs])
    assert set(outcomes.values()) == {None}
    counts = on_cluster.counts()
    assert all(counts[f"list {kind}"] <= 3 for kind in ("jobs", "pods", "events", "nodes")), counts
    batch.cancel()
