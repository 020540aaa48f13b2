"""Preemption: one host of a job is asked to end, all hosts have time to save, and the attempt ends
as preempted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import wait_until
from on_preempted_hosts import (
    fail_when_preempted,
    keep_others_waiting,
    look_once,
    return_when_preempted,
    save_when_jax_says_so,
    save_when_preempted,
    wait_at_first,
)
from places import Place
from test_cluster_evictions import pod_of

import kinetic
from kinetic._core import layout
from kinetic._core.exits import Exit
from kinetic.errors import HostLost, UserCodeFailed

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = pytest.mark.settles_within(30)


@pytest.fixture
def local_place(home):
    return Place("local", home.parent)


def wait_until_begun(handle, marker, attempt=1):
    marks = [Path(f"{marker}-{attempt}-{host}") for host in range(handle.hosts)]
    wait_until(lambda: all(path.exists() for path in marks), f"attempt {attempt} has not begun")


def start(function, place, accelerator="tpu-v6e-8", **options):
    marker = place.marker()
    handle = kinetic.run(accelerator, **options)(function).run_async(marker)
    wait_until_begun(handle, marker)
    return handle, marker


def take_away(place, handle, host):
    if place.cluster is not None:
        place.cluster.evict_pod(pod_of(place.cluster, handle, host))
    else:
        os.kill(place.host(handle, host), signal.SIGTERM)


@pytest.mark.evicts
def test_all_hosts_save_and_another_attempt_follows_that_does_not_count(place, monkeypatch):
    monkeypatch.setenv("KINETIC_GRACE_S", "15")
    handle, marker = start(save_when_preempted, place, retries=1)
    take_away(place, handle, 1)
    wait_until_begun(handle, marker, 2)
    take_away(place, handle, 0)
    saved = [f"marker-{attempt}-{host}-saved" for attempt in (1, 2) for host in (0, 1)]
    assert handle.result(timeout=180) == saved
    assert handle.outcome().attempt == 3
    assert "kinetic: attempt 3 of 4 begins." in handle.logs()


def test_the_attempt_ends_as_preempted_when_all_have_saved(local_place, monkeypatch):
    monkeypatch.setenv("KINETIC_GRACE_S", "100")
    handle, marker = start(save_when_preempted, local_place)
    take_away(local_place, handle, 1)
    with pytest.raises(HostLost, match=r"host 1 of 2 was lost\. It was asked to end"):
        handle.result(timeout=90)  # well before KINETIC_GRACE_S
    assert [report.exit for report in handle.outcome().reports] == [Exit.STOPPED, Exit.EVICTED]
    assert all(Path(f"{marker}-1-{host}-saved").exists() for host in (0, 1))
    assert "the function has 100 s to save" in handle.logs()
    assert "Traceback" not in handle.logs(all_hosts=True)


@pytest.mark.parametrize(("accelerator", "host"), [("tpu-v6e-8", 0), ("tpu-v6e-8", 1), ("cpu", 0)])
def test_a_value_that_is_returned_because_of_it_is_none(local_place, accelerator, host):
    handle, _ = start(return_when_preempted, local_place, accelerator)
    take_away(local_place, handle, host)
    with pytest.raises(HostLost, match="asked to end"):
        handle.result(timeout=90)
    assert handle.outcome().first.exit is Exit.EVICTED


def test_what_fails_meanwhile_is_told_and_is_not_the_cause(local_place):
    handle, _ = start(fail_when_preempted, local_place)
    take_away(local_place, handle, 1)
    with pytest.raises(HostLost, match="asked to end") as caught:
        handle.result(timeout=90)
    assert not isinstance(caught.value, UserCodeFailed)
    for host in (0, 1):
        assert "OSError: the disk is full" in handle.logs(host=host)


@pytest.mark.parametrize(("accelerator", "host"), [("tpu-v6e-8", 1), ("cpu", 0)])
def test_who_looks_and_does_not_end_is_ended(local_place, accelerator, host):
    handle, _ = start(look_once, local_place, accelerator)
    take_away(local_place, handle, host)
    with pytest.raises(HostLost, match="asked to end"):
        handle.result(timeout=90)


def test_a_job_that_is_cancelled_while_it_saves_is_cancelled(local_place, monkeypatch):
    monkeypatch.setenv("KINETIC_GRACE_S", "3")
    handle, _ = start(look_once, local_place, retries=1)
    take_away(local_place, handle, 1)
    wait_until(lambda: "to save" in handle.logs(), "host 0 was not told")
    handle.cancel()
    assert handle.status() in ("CANCELLED", "FAILED")
    assert handle.outcome().attempt == 1, "a cancelled job is not tried again"


@pytest.mark.parametrize("accelerator", ["tpu-v6e-8", "cpu"])
def test_a_host_taken_away_before_its_function_begins_has_another_attempt(local_place, accelerator):
    marker = local_place.marker()
    handle = kinetic.run(accelerator, retries=1)(wait_at_first).run_async(marker)
    take_away(local_place, handle, handle.hosts - 1)  # once the agent exists
    assert handle.result(timeout=180) == "2"


def test_a_host_taken_away_between_two_attempts_ends_the_next_one(local_place, home, monkeypatch):
    monkeypatch.setenv("KINETIC_GRACE_S", "100")
    handle, marker = start(keep_others_waiting, local_place, retries=1)
    folder = home / layout.JobKeys(handle.job_id).prefix / "local/work/host-1"
    wait_until(lambda: not folder.exists(), "host 1 does not wait for its place")
    take_away(local_place, handle, 1)
    Path(f"{marker}-enough").touch()
    assert handle.result(timeout=180) == "3"
    assert "asked to end" in handle.logs(attempt=3)


PROGRAM = """
import sys, time
import kinetic
print("begun", flush=True)
while not kinetic.preempted():
    time.sleep(0.02)
print("saved", flush=True)
sys.exit(143)
"""


def test_programs_that_the_job_starts_see_it(local_place, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    command = [*KINETIC, "run", "-a", "tpu-v6e-8", "--detach", "--", sys.executable, "train.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=True
    )
    handle = kinetic.attach(done.stdout.split()[-1])
    wait_until(
        lambda: all("begun" in handle.logs(host=host) for host in (0, 1)), "it has not begun"
    )
    take_away(local_place, handle, 1)
    with pytest.raises(HostLost, match="host 1 of 2 was lost"):
        handle.result(timeout=90)
    assert handle.logs(all_hosts=True).count("saved") == 2


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.long)])
def test_the_preemption_service_of_jax_saves_on_all_hosts(local_place, host, monkeypatch):
    monkeypatch.setenv("KINETIC_GRACE_S", "60")
    service = {"JAX_ENABLE_PREEMPTION_SERVICE": "1"}
    handle, marker = start(save_when_jax_says_so, local_place, env=service)
    take_away(local_place, handle, host)
    with pytest.raises(HostLost, match=f"host {host} of 2 was lost"):
        handle.result(timeout=120)
    saved = [path.name.rpartition("-")[2] for path in marker.parent.glob("*-saved-*")]
    assert len(saved) == 2, "a host was ended before all had saved"
    assert len(set(saved)) == 1
