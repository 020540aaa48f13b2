"""Each process of a job is killed in each phase, in every place: the caller gets the right error,
nothing is left, and the next job runs. `no_leftovers` and `on_cluster` check this after each
test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest
from deaths import CALLER, PHASES, assert_record_intact, hold_in, kill_in_each_phase
from gangs import PATIENCE_S, assert_next_job_runs, kill, start_script, stop, wait_until

import kinetic
from kinetic import errors

pytestmark = [pytest.mark.shares_files, pytest.mark.settles_within(30)]


def test_killing_what_leads_the_gang(place, nothing_left):
    lost = errors.SupervisorLost if place.name == "local" else errors.HostLost
    for phase, handle in kill_in_each_phase(place, place.leader).items():
        with pytest.raises(lost) as caught:
            handle.result(timeout=PATIENCE_S)
        if lost is errors.HostLost:
            assert caught.value.hosts[0] == 0, phase
        assert_record_intact(handle)
    nothing_left()
    assert_next_job_runs()


def has_reported(handle, host):
    return any((e["kind"], e.get("host")) == ("report", host) for e in handle.events())


def test_an_agent_ends_with_its_leader_after_its_report_has_arrived(place, nothing_left):
    handle = hold_in("reporting", place)
    wait_until(lambda: has_reported(handle, 0), "the leader does not have the report of host 0")
    kill(place.leader(handle))
    with pytest.raises(errors.KineticError):
        handle.result(timeout=PATIENCE_S)
    nothing_left()


@pytest.mark.parametrize("role", ["agent", "worker"])
def test_killing_an_agent_or_a_worker(role, place, nothing_left):
    named = getattr(place, role)
    for phase, handle in kill_in_each_phase(place, lambda job: named(job, 1)).items():
        with pytest.raises(errors.HostLost, match="host 1") as caught:
            handle.result(timeout=PATIENCE_S)
        assert caught.value.hosts[0] == 1, phase
        assert "silent" not in str(caught.value), (
            f"{phase}: the death itself is noticed, not the silence after it"
        )
        assert_record_intact(handle)
    nothing_left()
    assert_next_job_runs()


def test_killing_the_first_process_of_a_host(place, nothing_left):
    """In a pod, no process remains that could report the death: missing heartbeats tell of it."""
    for phase, handle in kill_in_each_phase(place, lambda job: place.host(job, 1)).items():
        with pytest.raises(errors.HostLost, match="host 1") as caught:
            handle.result(timeout=PATIENCE_S)
        assert caught.value.hosts[0] == 1, phase
        assert_record_intact(handle)
    nothing_left()
    assert_next_job_runs()


def wait_for_caller(phase, caller, home, place):
    """Wait until the job that the caller process has started is in the phase; return its handle."""
    (handle,) = wait_until(kinetic.list_jobs, "no job was submitted")
    if phase == "starting":
        place.leader(handle)
    elif phase == "joining":
        stop(place.agent(handle, 0))
    elif phase == "running":
        assert caller.stdout.readline() == b"running\n"
    elif phase == "reporting":
        reports = f"jobs/{handle.job_id}/attempts/1/hosts/0/report.json"
        wait_until((home / reports).exists, "the leader has not reported")
    return handle


@pytest.mark.parametrize("phase", PHASES)
def test_killing_the_caller(phase, place, home, monkeypatch, nothing_left):
    """The job goes on without its caller; a second process attaches to it and gets the value."""
    gate = place.marker("gate")
    monkeypatch.setenv("PHASE", phase)
    monkeypatch.setenv("GATE", str(gate))
    with start_script(home, CALLER) as caller:
        handle = wait_for_caller(phase, caller, home, place)
        caller.kill()
    gate.touch()
    if phase == "joining":
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.agent(handle, 0), signal.SIGCONT)
    attached = attach_elsewhere(handle.job_id)
    assert attached.stdout == "running\nvalue\n", attached.stderr
    assert handle.result() == "value"
    nothing_left()
    assert_next_job_runs()


def attach_elsewhere(job_id):
    """Attach to the job by its id, in another process that prints the job's output and value."""
    source = f"import kinetic; print(kinetic.attach({job_id!r}).result(stream_logs=True))"
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE_S
    )
