"""Machines that allow few processes or threads, by pids.max of a container or `ulimit -u`: an error
names the limit within seconds."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gangs import PATIENCE_S

CALLER = """
import kinetic
from kinetic.errors import KineticError

try:
    print("value", kinetic.run("tpu-v6e-8")(abs)(-3))
except KineticError as error:
    print(error)
"""


@pytest.fixture
def group():
    """A control group in which a test can limit processes. It must be empty at the end."""
    for mount in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        folder = Path(mount, f"kinetic-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            folder.mkdir()
            if (folder / "pids.max").exists():
                break
            folder.rmdir()
    else:
        pytest.skip("needs a control group that limits processes")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("most", [1, 6, 14])
def test_a_limit_of_processes_and_threads_is_named(most, group):
    """The caller's control group allows few processes and threads: the error names the limit and
    the file that sets it."""
    (group / "pids.max").write_text(str(most))
    code = f"open('{group}/cgroup.procs', 'w').write('0')\n{CALLER}"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    limit = f"the limit of processes and threads ({group}/pids.max) is {most}"
    assert limit in ran.stdout, ran.stderr
