"""A KINETIC_HOME that is removed while a job runs stays removed: the job ends, and brings nothing
back.

In: running jobs whose store goes. Out: a folder that is not there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gangs import wait_until

import kinetic
from kinetic.errors import KineticError

VALUE_BYTES = 300_000


def sleep(marker):
    Path(marker).touch()
    time.sleep(1000)


def return_when_told(marker):
    Path(marker).touch()
    while Path(marker).exists():
        print("still here")
        time.sleep(0.01)
    return b"x" * VALUE_BYTES


@pytest.mark.parametrize("accelerator", ["cpu", "tpu-v6e-8"])
@pytest.mark.parametrize(
    ("function", "returns"), [(sleep, False), (return_when_told, False), (return_when_told, True)]
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
    assert not home.exists()
