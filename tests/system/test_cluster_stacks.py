"""Stacks and activity of running pods, which the caller cannot connect to: requests and answers go
through the store."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from gangs import PATIENCE_S, wait_until
from on_pods import stand_still

import kinetic
from kinetic import errors


def read_members(job_id):
    """Return what `top` shows of the hosts, once each has told its leader of its output."""
    printed = subprocess.run(
        [sys.executable, "-m", "kinetic", "jobs", "top", "--json", job_id],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    (job,) = json.loads(printed.stdout)
    return job["members"] if all(member["last_line"] for member in job["members"]) else None


def test_the_stacks_of_pods_are_shown(on_cluster):
    handle = kinetic.run(accelerator="tpu-v6e-8")(stand_still).run_async()
    wait_until(
        lambda: all("begun" in handle.logs(host=host) for host in (0, 1)), "they have not begun"
    )
    stacks = handle.stacks()
    assert set(stacks) == {0, 1}
    assert all("stand_still" in text for text in stacks.values())
    printed = subprocess.run(
        [sys.executable, "-m", "kinetic", "jobs", "stacks", handle.job_id],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "stand_still" in printed.stdout, printed.stderr
    members = wait_until(lambda: read_members(handle.job_id), "their output is not shown")
    assert [(m["host"], m["last_line"]) for m in members] == [(0, "begun"), (1, "begun")]
    assert all(m["log_bytes"] == len("begun\n") for m in members)
    handle.cancel()
    with pytest.raises(errors.NotFound, match="not running"):
        handle.stacks()
