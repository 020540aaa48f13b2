"""`kinetic jobs explain` and `JobHandle.explain`: one page about jobs that fail, hang, wait or were
taken away."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from gangs import wait_until
from on_differing_hosts import differ
from on_explained_hosts import differ_and_stand, fail_on_one_host, hold_the_others_up, return_early
from on_preempted_hosts import save_when_preempted
from places import Place

import kinetic
from kinetic._client import planning
from kinetic.cli.root import call

LIMIT_S = 240
pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]


def read_page(job, capsys):
    """Return the sections of the page by their titles, as the command prints them for programs."""
    assert call(["jobs", "explain", "--json", job.job_id]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["job_id"] == job.job_id
    return facts["sections"]


def test_a_failed_job_names_its_first_host_and_quotes_it(home, tmp_path, capsys):
    """Host 1 of two raises, and has logs of its chips: the page has the cause, the traceback, its
    last lines, the fate of the other host, and the logs."""
    logs = tmp_path / "chip logs"
    logs.mkdir()
    run = kinetic.run("tpu-v6e-8", env={"TPU_LOG_DIR": str(logs)})
    job = run(fail_on_one_host).run_async(str(logs))
    assert job.exception(timeout=LIMIT_S) is not None
    page = read_page(job, capsys)
    assert page["State"] == "FAILED"
    assert page["Cause"] == "host 1 of 2: ValueError: the data of this host is broken"
    assert page["Host"] == "host 1: raised"
    assert "in fail_on_one_host\n" in page["Traceback"]
    assert page["Output"].splitlines()[-1] == "line 29 of host 1"
    assert page["Others"] == "host 0: stopped"
    assert f"kinetic jobs logs {job.job_id} --host 1" in page["Next"]
    assert "tpu_driver.INFO of host 1, in " in page["Chips"]
    kept = Path(page["Chips"].partition(", in ")[2].removeprefix("file://"), "tpu_driver.INFO")
    assert kept.read_text() == "the link of chip 3 is down"
    assert call(["jobs", "explain", job.job_id]) == 0
    printed = capsys.readouterr().out
    assert printed == f"{job.explain()}\n"
    assert "Cause:     host 1 of 2: ValueError: the data of this host is broken\n" in printed


def test_a_job_that_stands_still_names_the_host_that_holds_it_up(
    home, tmp_path, monkeypatch, capsys
):
    """Host 1 of two never comes to a collective: the page names it while the job runs, and shows
    where both hosts stand."""
    monkeypatch.setattr(planning, "STILL_NOTICE_S", 3.0)
    job = kinetic.run("tpu-v6e-8")(hold_the_others_up).run_async()
    wait_until(lambda: "has stood still for" in job.logs(), "no host is named")
    page = read_page(job, capsys)
    job.cancel()
    assert page["State"] == "RUNNING"
    assert page["Cause"].startswith("host 1 of 2 has stood still for 3 s at on_explained_hosts.py:")
    assert page["Stacks"].startswith("host 1 is at ")
    assert f"kinetic jobs stacks {job.job_id}" in page["Next"]


def test_a_host_that_has_returned_is_on_the_page_before_any_notice(home, capsys):
    """Host 1 of two has returned and host 0 goes on: the page says so, with the stacks."""
    job = kinetic.run("tpu-v6e-8")(return_early).run_async()

    def read_complete():
        """Host 0 may still be about to call the function when host 1 has returned."""
        page = read_page(job, capsys)
        return page if "in return_early" in page.get("Stacks", "") and "Hosts" in page else None

    page = wait_until(read_complete, "no host returns")
    job.cancel()
    assert page["Hosts"] == "host 0: running\nhost 1: returned"
    assert page["Stacks"].startswith("host 1 has returned\n")
    assert f"kinetic jobs stacks {job.job_id}" in page["Next"]


def test_hosts_that_run_different_programs_are_on_the_page(home, capsys):
    """Host 1 of two traces another shape: the page quotes what the leader has said of it."""
    job = kinetic.run("tpu-v6e-8")(differ).run_async("shape")
    wait_until(lambda: "programs" in [event["kind"] for event in job.events()], "nothing is said")
    page = read_page(job, capsys)
    job.cancel()
    assert page["Programs"] in [event["detail"] for event in job.events()]


def test_a_difference_that_is_the_cause_is_on_the_page_once(home, capsys):
    """Host 1 of two traces another shape, and the job is stopped as hung: the cause quotes it."""
    job = kinetic.run("tpu-v6e-8", hang_timeout=3)(differ_and_stand).run_async()
    assert job.exception(timeout=LIMIT_S) is not None
    (event,) = (event for event in job.events() if event["kind"] == "programs")
    page = read_page(job, capsys)
    assert event["detail"][1:] in page["Cause"]
    assert "Programs" not in page


def test_a_preempted_job_says_in_which_attempt(home, tmp_path, monkeypatch, capsys):
    """Host 1 of two is taken away in the first attempt, and the job fails."""
    monkeypatch.setenv("KINETIC_GRACE_S", "100")
    place = Place("local", tmp_path)
    marker = place.marker()
    job = kinetic.run("tpu-v6e-8")(save_when_preempted).run_async(marker)
    marks = [Path(f"{marker}-1-{host}") for host in (0, 1)]
    wait_until(lambda: all(mark.exists() for mark in marks), "the job has not begun")
    os.kill(place.host(job, 1), signal.SIGTERM)
    job.wait(timeout=LIMIT_S)
    page = read_page(job, capsys)
    assert page["Evicted"] == "host 1 in attempt 1"
    assert page["Host"].startswith("host 1: evicted")
    assert "retries=" in page["Next"]
