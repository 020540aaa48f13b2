"""Sessions whose slices are pods of a Kubernetes cluster, with records in a bucket."""

from __future__ import annotations

import os
import sys

import pytest
from gangs import PATIENCE_S
from test_kubernetes_following import site  # noqa: F401 - a fixture

import kinetic
from kinetic._store import index
from kinetic._store.open import open_store
from kinetic.errors import JobCancelled

pytest.importorskip("kubernetes")
pytest.importorskip("google.cloud.storage")


def name_process(number):
    """Return the number, this host's process, and how many kept calls it has seen."""
    seen = kinetic.kept.calls = getattr(kinetic.kept, "calls", 0) + 1
    return number, os.getpid(), seen


@pytest.mark.long
@pytest.mark.double
def test_calls_run_on_held_pods(site):  # noqa: F811
    """Plain and kept calls run on the pods of the session, and no call makes a new pod."""
    run = kinetic.run("tpu-v6e-16")
    session = kinetic.session("tpu-v6e-16", name="dev", idle_timeout="10m")
    with session:
        first = run(name_process).run_async(1).result(timeout=PATIENCE_S)
        pods = {pod["metadata"]["name"] for pod in site.cluster.objects("pods")}
        second = run(name_process).run_async(2).result(timeout=PATIENCE_S)
        kept = run(name_process).with_options(keep=True)
        third, fourth = (kept.run_async(n).result(timeout=PATIENCE_S) for n in (3, 4))
    assert [first[0], second[0], third[0], fourth[0]] == [1, 2, 3, 4]
    assert first[1] != second[1], "a plain call has new processes"
    assert third[1] == fourth[1]
    assert (third[2], fourth[2]) == (1, 2)
    assert {pod["metadata"]["name"] for pod in site.cluster.objects("pods")} == pods
    session.stop()
    session.job.cleanup()
    site.cluster.wait_for(lambda: not site.cluster.left_over())
    store = open_store("gs://bucket/jobs")
    assert len(index.list_refs(store)) == 4


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
