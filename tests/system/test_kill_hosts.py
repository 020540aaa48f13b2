"""`kill_hosts` and `kinetic jobs kill`, in every place: hosts are lost like failed machines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import wait_until
from on_hosts import wait_at_first

import kinetic
from kinetic.errors import HostLost, NotFound

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = pytest.mark.settles_within(30)


def start_and_wait(place, **options):
    marker = place.marker()
    handle = kinetic.run("tpu-v6e-8", slices=2, **options)(wait_at_first).run_async(str(marker))
    marks = [Path(f"{marker}-{host}") for host in range(4)]
    wait_until(lambda: all(path.exists() for path in marks), "the function has not begun")
    return handle


def test_a_slice_is_lost_and_the_next_attempt_succeeds(place):
    handle = start_and_wait(place, retries=1)
    assert handle.kill_hosts(slice=1) == (2, 3)
    assert handle.result(timeout=120) == "attempt 2"


def test_without_retries_the_host_is_named(place):
    handle = start_and_wait(place)
    shell = subprocess.run(
        [*KINETIC, "jobs", "kill", "--yes", "--json", handle.job_id, "--slice", "1", "--host", "0"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert shell.returncode == 0, shell.stderr
    answer = {"job_id": handle.job_id, "signal": "SIGKILL", "hosts": [2]}
    assert json.loads(shell.stdout) == answer
    with pytest.raises(HostLost, match=r"hosts? 2(-3)? of 4 (died|was lost|were lost)"):
        handle.result(timeout=120)
    with pytest.raises(NotFound, match="has ended"):
        handle.kill_hosts(slice=0)


def test_an_agent_is_lost_with_its_worker(home):
    from places import Place

    handle = start_and_wait(Place("local", home.parent))
    assert handle.kill_hosts(host=3, agents=True) == (3,)
    with pytest.raises(HostLost, match="host 3 of 4 was lost"):
        handle.result(timeout=120)
