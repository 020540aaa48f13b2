"""An elastic job whose processes are killed at random: it ends with the right value, and nothing is
left behind.

In: a job that saves each step; workers, agents and slices that are killed in any phase. Out: its
value, the number of attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

import kinetic
from kinetic._core import layout
from kinetic._system import processes

pytestmark = [pytest.mark.timeout(900), pytest.mark.settles_within(60)]
STEPS = 120
KILLS = 8
PATIENCE_S = 700.0


def count(folder):
    """Add up the numbers of all steps, from where the last attempt has saved."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    saved = Path(folder, "saved")
    step, total = json.loads(saved.read_text()) if saved.exists() else (0, 0)
    while step < STEPS:
        everyone = multihost_utils.process_allgather(np.array([step])).reshape(-1)
        step, total = step + 1, total + int(everyone.sum()) // everyone.size
        if jax.process_index() == 0:
            saved.with_suffix(".new").write_text(json.dumps([step, total]))
            saved.with_suffix(".new").rename(saved)
        multihost_utils.sync_global_devices("saved")
        if kinetic.should_reform():
            kinetic.reform()
        time.sleep(0.02)
    return total


def victims(supervisor, choose):
    """A worker, an agent, or all agents of a slice; () if they cannot be found just now."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        agents = {
            int(host): pid for host, pid in json.loads(supervisor.read_text())["agents"].items()
        }
        what, host = choose.choice(["worker", "agent", "slice"]), choose.choice(sorted(agents))
        if what == "slice":
            return [pid for each, pid in agents.items() if each // 2 == host // 2]
        if what == "agent":
            return [agents[host]]
        below = processes.children(agents[host])
        return [pid for pid in below if processes.command_line(pid).startswith(b"kinetic-worker")]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_kills(home, tmp_path, seed):
    choose = random.Random(seed)
    remote = kinetic.run("tpu-v6e-8", slices=(1, 2), on_slice_loss="shrink", max_failures=50)(count)
    handle = remote.run_async(str(tmp_path))
    supervisor = home / layout.job(handle.job_id) / "local/supervisor.json"
    deadline, killed = time.monotonic() + PATIENCE_S, 0
    while killed < KILLS and not handle.status().ended:
        assert time.monotonic() < deadline, f"{killed} kills in {PATIENCE_S:g} s"
        time.sleep(choose.uniform(0.0, 4.0))
        for pid in victims(supervisor, choose):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    assert handle.result(timeout=PATIENCE_S) == STEPS * (STEPS - 1) // 2
