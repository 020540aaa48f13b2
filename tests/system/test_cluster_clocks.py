"""Callers whose clock is wrong by an hour do not give up jobs that wait in a cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from gangs import PATIENCE_S

import kinetic

pytestmark = [pytest.mark.double, pytest.mark.settles_within(30)]


def elsewhere(ahead_s, script):
    """Run a script whose clock is `ahead_s` seconds ahead of the true time; return its output."""
    clock = f"""
        import time
        true = time.time
        time.time = lambda: true() + {ahead_s}
        import kinetic
    """
    code = textwrap.dedent(clock) + textwrap.dedent(script)
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return ran.stdout.strip()


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_who_looks_with_a_wrong_clock_ends_no_job(on_cluster, ahead_s):
    on_cluster.hold_back("kinetic")
    handle = kinetic.run(accelerator="cpu")(abs).run_async(-3)
    script = f"""
        handle = kinetic.attach({handle.job_id!r})
        try:
            print(handle.result(timeout=3))
        except TimeoutError:
            print(handle.status())
    """
    assert elsewhere(ahead_s, script) == "PENDING"
    assert handle.status() == "PENDING"
    on_cluster.let_go("kinetic")
    assert handle.result(timeout=PATIENCE_S) == 3


def test_a_job_that_was_submitted_with_a_wrong_clock_may_start(on_cluster):
    on_cluster.hold_back("kinetic")
    submit = 'print(kinetic.run(accelerator="cpu")(abs).run_async(-3).job_id)'
    handle = kinetic.attach(elsewhere(-3600, submit).splitlines()[-1])
    on_cluster.wait_for(lambda: on_cluster.objects("pods"))
    with pytest.raises(TimeoutError):
        handle.result(timeout=3)
    assert handle.status() == "PENDING"
    on_cluster.let_go("kinetic")
    assert handle.result(timeout=PATIENCE_S) == 3
