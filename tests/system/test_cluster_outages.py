"""The cluster's API server goes down while a job runs. The job goes on, and its caller gets the
value when the server is back."""

from __future__ import annotations

import os
import signal
import time

import pytest
from deaths import PHASES
from gangs import PATIENCE_S, stop, wait_until
from places import Place

import kinetic


@pytest.mark.double
@pytest.mark.parametrize("phase", PHASES)
def test_the_api_server_is_gone(phase, on_cluster, home, monkeypatch):
    """The server goes down when the job is in this phase, and comes back after the job's end."""
    place, gate = Place("kubernetes", home.parent / "shared", on_cluster), home.parent / "gate"
    handle = kinetic.run(accelerator="tpu-v6e-8")(until_open).run_async(phase, str(gate))
    if phase == "starting":
        place.host(handle, 1)
    elif phase == "joining":
        stop(place.agent(handle, 0))
    elif phase == "running":
        wait_until(lambda: "running" in handle.logs(), "the function has not begun")
    else:
        reports = f"jobs/{handle.job_id}/attempts/1/hosts/0/report.json"
        wait_until((home / reports).exists, "the leader has not reported")
    on_cluster.stop_server()
    if phase == "joining":
        os.kill(place.agent(handle, 0), signal.SIGCONT)
    gate.touch()
    wait_until((home / "jobs" / handle.job_id / "outcome.json").exists, "the job goes on")
    assert handle.wait().ok
    on_cluster.start_server()
    assert handle.result(timeout=PATIENCE_S) == "value"


def until_open(phase, gate):
    print("running", flush=True)
    leads = os.environ["KINETIC_HOST_INDEX"] == "0"
    while not (os.path.exists(gate) or (leads and phase == "reporting")):
        time.sleep(0.01)
    return "value"
