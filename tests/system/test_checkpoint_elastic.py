"""Checkpoints of elastic jobs that lose a slice by preemption. After SIGTERM for one host's agent,
all hosts save the same step, and the next attempt continues from it."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from gangs import processes, wait_until
from on_cut_off_hosts import step_without_end
from on_saving_hosts import read_one

import kinetic
from kinetic._system import memory_folder

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(60)]


@pytest.mark.parametrize(("on_loss", "host"), [("shrink", 1), ("wait", 0)])
def test_a_slice_that_is_taken_away_lets_all_save_and_the_job_goes_on(
    home, tmp_path, monkeypatch, on_loss, host
):
    monkeypatch.setenv("KINETIC_GRACE_S", "100")
    run = kinetic.run("cpu:2", slices=(1, 2), on_slice_loss=on_loss, max_failures=3)
    job = run(step_without_end).run_async(str(tmp_path))
    mark = tmp_path / f"step-1-{host}"
    wait_until(lambda: mark.exists() and int(mark.read_text() or 0) >= 3, "step 3 was not reached")
    os.kill(processes(job)[1][host], signal.SIGTERM)
    step, weight = job.result(timeout=400)
    logs = job.logs(attempt=1)
    (saved,) = re.findall(r"step (\d+) is saved on all hosts, which end now\.", logs)
    notes = [json.loads(path.read_text()) for path in tmp_path.glob("2-*")]
    assert len(notes) == 2 or on_loss == "shrink"  # With "shrink", the slice may be back.
    assert {tuple(each) for each in notes} == {(int(saved) + 1, int(saved) + 1.0)}
    assert step == weight, "no step was lost, and none was done twice"
    assert "Traceback" not in job.logs(all_hosts=True)
    job.cleanup()
    assert not memory_folder.of_job(job.job_id).exists()


@pytest.mark.parametrize(("least", "differ"), [(1, True), (1, False), (2, True)])
def test_positions_that_fewer_hosts_could_not_share_are_told_before_a_loss(home, least, differ):
    job = kinetic.run("cpu", slices=(least, 2))(read_one).run_async(differ)
    job.result(timeout=400)
    is_refused = "cannot be restored on fewer hosts" in job.logs()
    assert is_refused == (least == 1 and differ)
