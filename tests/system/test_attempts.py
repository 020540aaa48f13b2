"""Each attempt of a job keeps its output, reports and exceptions when the next one begins."""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from pathlib import Path

import pytest
from gangs import kill, processes, stop, wait_until
from on_hosts import fails_twice, prints_lines
from places import find_process

import kinetic
from kinetic import errors
from kinetic._backends.base import LogRequest
from kinetic._core.outcome import Exit, HostReport, Outcome
from kinetic._pickling import results
from kinetic.cli.root import call


def attempt_folder(home: Path, handle, number: int) -> Path:
    return home / "jobs" / handle.job_id / "attempts" / str(number)


def test_a_retry_leaves_everything_of_the_attempts_before(home):
    handle = kinetic.run(accelerator="tpu-v6e-8", retries=2)(fails_twice).run_async()
    assert handle.result() == 3
    for number in (1, 2):
        folder = attempt_folder(home, handle, number)
        outcome = Outcome.from_json(json.loads((folder / "outcome.json").read_text()))
        assert (str(outcome.verdict), outcome.attempt) == ("failed", number)
        for host in outcome.blamed:
            own = folder / "hosts" / str(host)
            report = HostReport.from_json(json.loads((own / "report.json").read_text()))
            assert report.exit is Exit.RAISED
            error = results.unpack_exception((own / "error.pkl").read_bytes())
            assert repr(error) == f"LookupError('not in attempt {number}')"
            assert f"this is attempt {number}\n" in (own / "log").read_text()
            assert f"this is attempt {number + 1}" not in (own / "log").read_text()
    last = attempt_folder(home, handle, 3)
    assert not (last / "outcome.json").exists(), "the verdict over the last attempt is the job's"
    assert (last / "hosts/0/result.pkl").exists()
    assert handle.outcome().attempt == 3


def fail_once_and_leave_much():
    """Fail in attempt 1 with a scratch folder that takes long to remove, so that the leader learns
    of the failure while the agent still cleans up."""
    if os.environ["KINETIC_ATTEMPT"] == "1":
        for number in range(20_000):
            Path(str(number)).touch()
        time.sleep(3)
        raise LookupError("attempt 1")
    return os.environ["KINETIC_ATTEMPT"]


def test_an_agent_that_takes_long_to_leave_does_not_end_the_next_attempt():
    assert kinetic.run(accelerator="cpu", retries=1)(fail_once_and_leave_much)() == "2"


def test_the_exception_is_that_of_the_last_attempt():
    def always():
        raise LookupError(f"attempt {os.environ['KINETIC_ATTEMPT']}")

    handle = kinetic.run(accelerator="cpu", retries=1)(always).run_async()
    with pytest.raises(LookupError, match="attempt 2"):
        handle.result()


def test_a_supervisor_killed_in_attempt_2_is_judged_by_attempt_2_alone(home):
    marker = home.parent / "running"

    def function(path):
        if os.environ["KINETIC_ATTEMPT"] == "1":
            raise LookupError("attempt 1")
        Path(path).touch()
        signal.pause()

    handle = kinetic.run(accelerator="tpu-v6e-8", retries=1)(function).run_async(str(marker))
    wait_until(marker.exists, "attempt 2 has not begun")
    supervisor, agents = processes(handle)
    stop(supervisor)  # A stopped supervisor does not judge the killed agents.
    for pid in (*agents.values(), supervisor):
        kill(pid)
    with pytest.raises(errors.JobFailed):
        handle.result()
    outcome = handle.outcome()
    assert (outcome.attempt, outcome.supervisor_lost) == (2, True)
    assert {report.exit for report in outcome.reports} == {Exit.AGENT_LOST}
    assert outcome.reason == "the job's supervisor was killed"
    assert list(attempt_folder(home, handle, 1).glob("hosts/*/report.json")), "they are kept"


def list_printed(log: str) -> list[str]:
    return [line for line in log.splitlines() if line[1:2] == ":"]


def test_the_output_of_one_attempt_and_of_all(home, capfd):
    handle = kinetic.run(accelerator="cpu", retries=2)(prints_lines).run_async()
    handle.wait()
    of = {n: [f"{n}:{number}" for number in range(3)] for n in (1, 2, 3)}
    assert list_printed(handle.logs()) == of[1] + of[2] + of[3]
    for number, lines in of.items():
        assert list_printed(handle.logs(attempt=number)) == lines
        capfd.readouterr()
        assert call(["jobs", "logs", "--attempt", str(number), handle.job_id]) == 0
        assert list_printed(capfd.readouterr().out) == lines
        handle.logs(follow=True, attempt=number)
        assert list_printed(capfd.readouterr().out) == lines
    assert handle.logs(attempt=3).startswith("kinetic: attempt 2 of 3 failed")
    whole = handle.logs().splitlines()
    for lines in (1, 3, 4, 8, 12, len(whole), len(whole) + 1):
        assert handle.tail(lines).splitlines() == whole[-lines:], "a tail reaches over attempts"
    for words in (["--attempt", "4"], ["-f", "--attempt", "4"]):
        assert call(["jobs", "logs", *words, handle.job_id]) == 2
        err = capfd.readouterr().err
        assert "has no attempt 4" in err
        assert "attempts 1 to 3" in err
    for wrong in (0, 4, -1, True, "1"):
        with pytest.raises(errors.UsageError, match="no attempt"):
            handle.logs(attempt=wrong)


def test_following_one_attempt_ends_with_it(home):
    marker = home.parent / "marker"

    def function(path):
        print("attempt", os.environ["KINETIC_ATTEMPT"], flush=True)
        if os.environ["KINETIC_ATTEMPT"] == "1":
            raise LookupError("at first")
        Path(path).touch()
        signal.pause()

    handle = kinetic.run(accelerator="cpu", retries=1)(function).run_async(str(marker))
    wait_until(marker.exists, "attempt 2 has not begun")
    request = LogRequest(attempt=1)
    chunks = [chunk for chunk in handle._backend.logs(handle.ref, request) if chunk is not None]
    text = b"".join(chunk.data for chunk in chunks)
    assert text.startswith(b"attempt 1\n")
    assert b"attempt 2\n" not in text
    assert not handle.done()
    handle.cancel()


def test_a_job_of_version_0_1_is_refused_with_a_sentence_and_can_be_removed(home, capfd):
    """Version 0.1 had hosts directly in the job's folder, and no attempts in plan and reference.
    Lists and `prune` work on such a job; reading its output is refused."""
    handle = kinetic.run(accelerator="cpu")(lambda: 1).run_async()
    handle.wait()
    ref_file = home / "refs" / f"{handle.job_id}.json"
    written = json.loads(ref_file.read_text())
    flat = {k: v for k, v in written.items() if k not in ("place", "schema_version")}
    ref_file.write_text(json.dumps(flat | {"backend": "local", "requested_backend": "local"}))
    job = home / "jobs" / handle.job_id
    plan = json.loads((job / "plan.json").read_text())
    (job / "plan.json").write_text(json.dumps(plan | {"schema_version": 1}))
    (job / "attempts/1/hosts").rename(job / "hosts")
    (job / "hosts/0/result.pkl").rename(job / "result.pkl")

    old = kinetic.attach(handle.job_id)
    assert old.status() == "SUCCEEDED"
    assert old.outcome().ok
    for read in (old.logs, old.result, lambda: old.logs(follow=True)):
        with pytest.raises(errors.UnsupportedVersion, match="submitted with an older version"):
            read()
    capfd.readouterr()
    assert call(["jobs", "logs", handle.job_id]) not in (0, 1)
    assert "an older version of kinetic" in capfd.readouterr().err
    for words in (["list"], ["status", handle.job_id], ["wait", handle.job_id]):
        assert call(["jobs", *words]) == 0
    assert handle.job_id in capfd.readouterr().out
    before = time.time()
    assert call(["jobs", "prune", "--older-than", "0.01s", "--yes"]) == 0
    if job.exists():  # This has failed once, for an unknown reason.
        call(["jobs", "status", handle.job_id, "--json"])
        print(before, time.time(), old.status(), old.outcome())
    assert not job.exists()
    assert not ref_file.exists()


def test_a_retry_that_nobody_can_fork_is_said_to(home, tmp_path):

    def fails(path):
        if os.environ["KINETIC_ATTEMPT"] == "2":
            return "again"
        Path(path, "running").touch()
        while not Path(path, "go").exists():
            time.sleep(0.01)
        raise LookupError("attempt 1")

    for accelerator in ("cpu", "tpu-v6e-8"):
        remote = kinetic.run(accelerator=accelerator, retries=1)(fails)
        folder = tmp_path / accelerator
        folder.mkdir()
        handle = remote.run_async(str(folder))
        wait_until((folder / "running").exists, "attempt 1 has not begun")
        find = functools.partial(find_process, f"kinetic-forks {handle.job_id}")
        kill(wait_until(find, "nothing forks"))
        (folder / "go").touch()
        if accelerator != "cpu":
            assert handle.result() == "again"
            continue
        with pytest.raises(errors.HostLost, match="the fork server "):
            handle.result()
        assert handle.outcome().attempt == 2
