"""A job runs out of memory, or its worker is killed while it holds much: the caller learns the
cause and the peak memory. A control group sets the limit if this user may create one; otherwise the
test kills the worker."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from gangs import PATIENCE_S, processes, wait_until, worker_of

import kinetic
from kinetic import errors
from kinetic._core.exits import Exit
from kinetic._rpc.client import ControlClient

LIMIT_BYTES = 400 << 20
HELD_BYTES = 220 << 20
V2 = Path("/sys/fs/cgroup")

TAKES_ALL = """
import kinetic

@kinetic.run(accelerator="cpu")
def take_all():
    held = []
    while True:
        held.append(b"x" * (8 << 20))

try:
    take_all()
except kinetic.errors.HostLost as error:
    print(error)
"""


def hold_much(marker):
    held = b"x" * HELD_BYTES
    Path(marker).touch()
    time.sleep(1000)
    return len(held)


def test_a_worker_that_is_killed_is_told_with_its_peak_memory_and_not_as_out_of_memory(home):
    marker = home.parent / "marker"
    handle = kinetic.run(accelerator="cpu")(hold_much).run_async(str(marker))
    wait_until(marker.exists, "not started")
    os.kill(worker_of(processes(handle)[1][0]), signal.SIGKILL)
    with pytest.raises(
        errors.HostLost, match=r"killed by SIGKILL \(peak memory (2\d\d|3\d\d) MiB\)"
    ) as caught:
        handle.result()
    assert "out of memory" not in str(caught.value)
    (report,) = handle.outcome().reports
    assert report.exit is Exit.SIGNAL
    assert HELD_BYTES < report.peak_rss_bytes < 2 * HELD_BYTES


def snapshot(handle):
    address = handle._backend.control(handle.ref)
    if address is None:
        return {"members": [{"log_bytes": 0}]}
    with ControlClient(address) as client:
        return client.snapshot(20.0)


def start_a_program_that_holds_much(let_go):
    code = f"held = b'x' * {HELD_BYTES}; print('held', flush=True); input()"
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    while not Path(let_go).exists():
        time.sleep(0.02)
    program.communicate(b"\n")


def test_the_memory_of_a_program_that_the_function_started_counts(home):
    let_go = home.parent / "let-go"
    handle = kinetic.run(accelerator="cpu")(start_a_program_that_holds_much).run_async(str(let_go))
    wait_until(
        lambda: snapshot(handle)["members"][0]["log_bytes"] > 0,
        "no heartbeat since the program held it",
    )
    let_go.touch()
    handle.result()
    (report,) = handle.outcome().reports
    assert HELD_BYTES < report.peak_rss_bytes < 2 * HELD_BYTES


def in_a_scope():
    """Return a command prefix that limits memory by a systemd scope; None if impossible."""
    command = [
        "systemd-run",
        "--user",
        "--scope",
        "--quiet",
        "-p",
        f"MemoryMax={LIMIT_BYTES}",
        "-p",
        "MemorySwapMax=0",
    ]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*command, "true"], capture_output=True, timeout=20).returncode == 0:
            return command
    return None


def in_a_group():
    """Return (command prefix, folder) for a control group that limits memory; the prefix is None if
    this user may not create one."""
    folder = V2 / f"kinetic-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.max").write_text(str(LIMIT_BYTES))
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None, folder
    with contextlib.suppress(OSError):
        (folder / "memory.swap.max").write_text("0")
    return ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"], folder


def test_a_worker_that_the_kernel_kills_is_out_of_memory(home):
    if not (V2 / "cgroup.controllers").exists():
        pytest.skip("memory is not limited by control groups of version 2 here")
    command, folder = in_a_scope(), None
    if command is None:
        command, folder = in_a_group()
    if command is None:
        pytest.skip("this user may not limit the memory of a control group")
    script = home.parent / "caller.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(textwrap.dedent(TAKES_ALL))
    try:
        done = subprocess.run(
            [*command, sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    finally:
        if folder is not None:
            wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the group is not empty")
            folder.rmdir()
    assert re.search(
        r"ran out of memory\. The kernel's out-of-memory killer ended the worker process",
        done.stdout,
    ), done.stderr
    assert re.search(r"peak memory \d+ MiB, limit 400 MiB", done.stdout), done.stdout
