"""Somebody deletes a job's workload with `kubectl delete`: every caller gets the same error within
seconds, and the job has one verdict."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from doubles.cluster.fixtures import SHARES_FILES
from gangs import wait_until

import kinetic
from kinetic._core import layout
from kinetic.errors import HostLost

pytestmark = pytest.mark.double
GANG = "tpu-v6e-16"


def wait_for_ever(marker):
    Path(f"{marker}-{os.environ['KINETIC_HOST_INDEX']}").touch()
    while True:
        time.sleep(0.1)


def waiting(cluster, accelerator):
    """Start a job whose pods no node takes; return its handle and the kind of its workload."""
    cluster.hold_back("kinetic-")
    handle = kinetic.run(accelerator=accelerator)(wait_for_ever).run_async("nowhere")
    cluster.wait_for(lambda: cluster.objects("pods"))
    return handle, "jobs" if handle.hosts == 1 else "jobsets"


@pytest.mark.parametrize("accelerator", ["cpu", GANG])
def test_a_workload_that_is_deleted_while_it_waits_is_said(on_cluster, accelerator):
    handle, kind = waiting(on_cluster, accelerator)
    on_cluster.delete(kind, f"kinetic-{handle.job_id}")
    with pytest.raises(HostLost, match="workload was removed from the cluster"):
        handle.result(timeout=60)
    on_cluster.wait_for(lambda: not on_cluster.left_over())


@pytest.mark.parametrize("accelerator", ["cpu", GANG])
def test_who_comes_later_says_the_same(on_cluster, accelerator):
    handle, kind = waiting(on_cluster, accelerator)
    on_cluster.delete(kind, f"kinetic-{handle.job_id}")
    with pytest.raises(HostLost, match="workload was removed from the cluster"):
        kinetic.attach(handle.job_id).result(timeout=60)
    on_cluster.wait_for(lambda: not on_cluster.left_over())


def test_one_verdict_stands(on_cluster, home):
    assert SHARES_FILES
    marker = home.parent / "m"
    handle = kinetic.run(accelerator="cpu", retries=1)(wait_for_ever).run_async(str(marker))
    wait_until(Path(f"{marker}-0").exists, "the function has not begun")
    on_cluster.delete("jobs", f"kinetic-{handle.job_id}")
    with pytest.raises(HostLost, match="workload was removed from the cluster"):
        handle.result(timeout=60, cleanup=False)
    file = home / layout.JobKeys(handle.job_id).outcome
    verdict = json.loads(file.read_bytes())
    # By then, the leader in host 0's pod has written its own verdict, if any.
    on_cluster.wait_for(lambda: not on_cluster.objects("pods"))
    assert json.loads(file.read_bytes()) == verdict
    on_cluster.wait_for(lambda: not on_cluster.left_over())
