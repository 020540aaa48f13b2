"""Every attempt at a job keeps what it left: output, reports, exceptions.

In: jobs with retries. Out: what an attempt printed and how it ended, also after the next one.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from gangs import kill, processes, stop, wait_until

import kinetic
from kinetic import errors
from kinetic._core.outcome import Exit, HostReport, Outcome
from kinetic._pickling import results


def fails_twice():
    """On every host: raises in attempts 1 and 2, returns in the third."""
    attempt = int(os.environ["KINETIC_ATTEMPT"])
    print("this is attempt", attempt)
    if attempt < 3:
        raise LookupError(f"not in attempt {attempt}")
    return attempt


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


def test_the_exception_is_that_of_the_last_attempt():
    def always():
        raise LookupError(f"attempt {os.environ['KINETIC_ATTEMPT']}")

    handle = kinetic.run(accelerator="cpu", retries=1)(always).run_async()
    with pytest.raises(LookupError, match="attempt 2"):
        handle.result()


def test_a_supervisor_killed_in_attempt_2_is_judged_by_attempt_2_alone(home):
    """Attempt 1 left a report of each host; what is missing of attempt 2 is not taken from it."""
    marker = home.parent / "running"

    def function(path):
        if os.environ["KINETIC_ATTEMPT"] == "1":
            raise LookupError("attempt 1")
        Path(path).touch()
        signal.pause()

    handle = kinetic.run(accelerator="tpu-v6e-8", retries=1)(function).run_async(str(marker))
    wait_until(marker.exists, "attempt 2 has not begun")
    supervisor, agents = processes(handle)
    stop(supervisor)  # so that it judges nothing when its agents are killed
    for pid in (*agents.values(), supervisor):
        kill(pid)
    with pytest.raises(errors.JobFailed):
        handle.result()
    outcome = handle.outcome()
    assert (outcome.attempt, outcome.supervisor_lost) == (2, True)
    assert {report.exit for report in outcome.reports} == {Exit.AGENT_LOST}
    assert outcome.reason == "the job's supervisor was killed"
    assert list(attempt_folder(home, handle, 1).glob("hosts/*/report.json")), "they are kept"
