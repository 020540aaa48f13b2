"""KINETIC_HOME is removed while a job runs: the job ends, and no process recreates the folder."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from deaths import sleep_long
from gangs import wait_until
from on_hosts import make_folders_anew, print_until_told

import kinetic
from kinetic._system import memory_folder
from kinetic.errors import KineticError


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
@pytest.mark.parametrize(
    ("function", "returns"),
    [
        (sleep_long, False),
        (make_folders_anew, False),
        (print_until_told, False),
        (print_until_told, True),
    ],
)
def test_nothing_comes_back(function, returns, accelerator, home, nothing_left):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator=accelerator, retries=1)(function).run_async(str(marker))
    wait_until(marker.exists, "the function has not begun")
    while home.exists():
        shutil.rmtree(home, ignore_errors=True)
    if returns:
        marker.unlink()
    with pytest.raises(KineticError):
        handle.result(timeout=60)
    subprocess.run(
        [sys.executable, "-m", "kinetic", "jobs", "list"], check=True, capture_output=True
    )
    nothing_left()
    assert not home.exists(), sorted(map(str, home.rglob("*")))
    assert not memory_folder.of_job(handle.job_id).exists()
