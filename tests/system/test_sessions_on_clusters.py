"""Sessions whose slices are pods of a Kubernetes cluster, with records in a bucket."""

from __future__ import annotations

import os
import sys

import pytest
from doubles.cluster.roles import submitter
from gangs import PATIENCE_S, wait_until
from on_pods import wait_for_file
from on_sessions import sum_squares
from test_kubernetes_following import site  # noqa: F401 - a fixture

import kinetic
from kinetic._backends import attempt_logs
from kinetic._core import layout
from kinetic._store import index
from kinetic._store.open import open_store
from kinetic.errors import JobCancelled

pytest.importorskip("kubernetes")
pytest.importorskip("google.cloud.storage")


def name_process(number):
    """Return the number, this host's process, and how many kept calls it has seen."""
    seen = kinetic.kept.calls = getattr(kinetic.kept, "calls", 0) + 1
    return number, os.getpid(), seen


def name_after(path, number):
    """Wait for a file; return the number and this host's process."""
    wait_for_file(path)
    return number, os.getpid()


def check_calls(cluster):
    """Plain and kept calls run on the pods of a session, and no call makes a new pod."""
    run = kinetic.run("tpu-v6e-16")
    session = kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m")
    with session:
        first = run(name_process).run_async(1).result(timeout=PATIENCE_S)
        pods = {pod["metadata"]["name"] for pod in cluster.objects("pods")}
        second = run(name_process).run_async(2).result(timeout=PATIENCE_S)
        kept = run(name_process).with_options(keep=True)
        third, fourth = (kept.run_async(n).result(timeout=PATIENCE_S) for n in (3, 4))
    assert [first[0], second[0], third[0], fourth[0]] == [1, 2, 3, 4]
    assert first[1] != second[1], "a plain call has new processes"
    assert third[1] == fourth[1]
    assert (third[2], fourth[2]) == (1, 2)
    assert {pod["metadata"]["name"] for pod in cluster.objects("pods")} == pods
    session.stop()
    session.job.cleanup()


def count_port_forwards(site):  # noqa: F811
    return site.cluster.counts()["get pods/portforward"]


def test_calls_run_on_held_pods_of_any_cluster(on_cluster):
    """The promise holds on a real cluster, too: `make test-cluster` runs this test."""
    check_calls(on_cluster)


@pytest.mark.double
def test_calls_run_on_held_pods(site, caplog):  # noqa: F811
    """Records lie in a bucket. All calls of this process share one port-forward."""
    check_calls(site.cluster)
    site.cluster.wait_for(lambda: not site.cluster.left_over())
    store = open_store("gs://bucket/jobs")
    assert len(index.list_refs(store)) == 4
    assert count_port_forwards(site) == 1
    assert "port-forward" not in caplog.text


@pytest.mark.double
def test_the_end_of_a_call_needs_no_poll(site, monkeypatch):  # noqa: F811
    """The leader tells the caller of the end of a call: the value comes although the caller polls
    the store once an hour."""
    run = kinetic.run("tpu-v6e-16", keep=True)(name_process)
    with kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m") as session:
        for number in (1, 2, 3):  # The leader may not listen before the end of the first call.
            run.run_async(number).result(timeout=PATIENCE_S)
        wait_until(lambda: count_port_forwards(site), "no port-forward was opened")
        with monkeypatch.context() as patched:
            for name in ("POLL_SOON_S", "POLL_LATE_S"):
                patched.setattr(attempt_logs, name, 3600.0)
            assert run.run_async(4).result(timeout=PATIENCE_S)[::2] == (4, 4)
    session.stop()
    session.job.cleanup()


@pytest.mark.double
def test_a_port_forward_that_breaks_in_a_call_is_opened_again(site, tmp_path):  # noqa: F811
    """The API server restarts while a call runs: the call is followed through the store, and the
    next one opens a port-forward again."""
    run = kinetic.run("tpu-v6e-16")
    with kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m") as session:
        run(name_process).run_async(1).result(timeout=PATIENCE_S)
        handle = run(name_after).run_async(str(tmp_path / "go"), 2)
        wait_until(lambda: handle.status() == "RUNNING", "the call does not run")
        wait_until(lambda: count_port_forwards(site), "no port-forward was opened")
        before = count_port_forwards(site)
        site.cluster.restart_server()
        (tmp_path / "go").touch()
        assert handle.result(timeout=PATIENCE_S)[0] == 2
        assert run(name_process).run_async(3).result(timeout=PATIENCE_S)[0] == 3
        wait_until(lambda: count_port_forwards(site) > before, "no port-forward was opened again")
    session.stop()
    session.job.cleanup()


@pytest.mark.double
def test_a_leader_whose_pod_is_replaced_is_reached_again(site):  # noqa: F811
    """The connection ends with the pod of the leader. The next call waits for the new pod, and a
    later one opens a port-forward to it."""
    run = kinetic.run("tpu-v6e-16")(name_process)
    with kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m") as session:
        for number in (1, 2):
            run.run_async(number).result(timeout=PATIENCE_S)
        wait_until(lambda: count_port_forwards(site), "no port-forward was opened")
        before = count_port_forwards(site)
        (head,) = [
            pod["metadata"]["name"]
            for pod in site.cluster.objects("pods")
            if "-head-" in pod["metadata"]["name"]
        ]
        site.cluster.delete_pod(head, force=True)
        for number in (3, 4):
            assert run.run_async(number).result(timeout=PATIENCE_S)[0] == number
        wait_until(lambda: count_port_forwards(site) > before, "no port-forward was opened again")
    session.stop()
    session.job.cleanup()


@pytest.mark.double
def test_without_the_right_calls_go_through_the_store(site, caplog):  # noqa: F811
    """A user who may not create pods/portforward gets the values all the same, and one line that
    names the right."""
    may = submitter(site.cluster.namespace)
    site.cluster.restrict(lambda verb, noun, of: noun != "pods/portforward" and may(verb, noun, of))
    run = kinetic.run("tpu-v6e-16", keep=True)(name_process)
    with kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m") as session:
        values = [run.run_async(n).result(timeout=PATIENCE_S) for n in (1, 2, 3)]
        wait_until(lambda: "port-forward" in caplog.text, "the user was not told")
    assert [value[::2] for value in values] == [(1, 1), (2, 2), (3, 3)]
    (line,) = [text for text in caplog.messages if "port-forward" in text]
    assert "calls on the session dev go through the store alone" in line
    assert "Ask for a role that allows the verb get on pods/portforward" in line
    assert set(site.cluster.refused()) == {"get pods/portforward"}
    session.stop()
    session.job.cleanup()


@pytest.mark.double
def test_a_job_compiles_nothing_that_an_earlier_one_compiled(site):  # noqa: F811
    """Two jobs run one after the other on pods of their own, with a bucket as their store: the
    second one takes every program from the bucket, on each host."""
    run = kinetic.run("tpu-v6e-16", all_hosts=True)(sum_squares)
    handles = []
    for _ in range(2):
        handles.append(run.run_async())
        results = handles[-1].results(timeout=PATIENCE_S)
        assert [value for value, _ in results] == [64.0] * 4
    hits = [[report.cache_hits for report in job.outcome().reports] for job in handles]
    assert hits[0] == [0] * 4
    assert min(hits[1]) > 0
    assert [compiled for _, compiled in results] == [0] * 4
    assert any(open_store("gs://bucket/jobs").list(layout.EXECUTABLES))


@pytest.mark.long
@pytest.mark.settles_within(90)
def test_calls_run_on_held_hosts_of_ray(ray_cluster, home, monkeypatch):
    """Plain and kept calls run on hosts that Ray has started once."""
    for name, value in {
        "KINETIC_ADDRESS": ray_cluster.address,
        "KINETIC_STORE": str(home),
        "KINETIC_POD_PYTHON": sys.executable,
        "KINETIC_POD_SIMULATED": "1",
    }.items():
        monkeypatch.setenv(name, value)
    run = kinetic.run("tpu-v6e-16")(name_process)
    session = kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m")
    with session:
        first = run.run_async(1).result(timeout=PATIENCE_S)
        kept = run.with_options(keep=True)
        second, third = (kept.run_async(n).result(timeout=PATIENCE_S) for n in (2, 3))
    session.stop()
    assert [first[0], second[0], third[0]] == [1, 2, 3]
    assert second[1] == third[1] != first[1]
    assert (second[2], third[2]) == (1, 2)
    with pytest.raises(JobCancelled):
        session.job.result(timeout=PATIENCE_S)
