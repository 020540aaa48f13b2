"""A job that has used up its budget is stopped with time to save, and is not retried."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import kinetic
from kinetic.cli import root
from kinetic.errors import BudgetUsedUp


def save_when_told(folder):
    import jax

    while not kinetic.preempted():
        time.sleep(0.05)
    Path(folder, f"{kinetic.attempt()}-{jax.process_index()}").touch()
    return "saved"


@pytest.mark.timeout(300)
def test_a_budget_ends_the_job_with_time_to_save(home, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KINETIC_PRICES", "cpu=3600")
    # $16 last 8 s: by then the function has begun, even on a busy machine.
    run = kinetic.run("cpu", slices=2, retries=3, budget="$16", joins_jax=True)
    job = run(save_when_told).run_async(str(tmp_path))
    with pytest.raises(BudgetUsedUp, match=r"used up its budget of \$16\.00 \(\$7,200\.00 an hour"):
        job.result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1-0", "1-1"]
    assert "s to save" in job.logs()
    capsys.readouterr()
    assert root.call(["jobs", "status", job.job_id, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost["usd_per_hour"] == 7200
    assert cost["so_far_usd"] >= 16
