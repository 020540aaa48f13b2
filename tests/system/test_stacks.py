"""Stacks of a running job: hosts at the same line are grouped, the host that differs comes first,
and no frame of kinetic is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

import kinetic

PATIENCE_S = 200.0
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]

pytestmark = pytest.mark.timeout(600)


def all_say(handle, words):
    deadline = time.monotonic() + PATIENCE_S
    for host in range(handle.hosts):
        while words not in handle.logs(host=host):
            assert time.monotonic() < deadline, handle.logs(all_hosts=True)
            time.sleep(0.02)


def read_stacks(handle):
    done = subprocess.run(
        [*KINETIC, "jobs", "stacks", handle.job_id],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_for_stacks(handle, words):
    """Read the stacks until they contain the words; return them."""
    deadline = time.monotonic() + PATIENCE_S
    while words not in (text := read_stacks(handle)):
        assert time.monotonic() < deadline, text
    return text


def end(handle):
    handle.cancel()
    assert not handle.wait().ok


def test_the_host_that_holds_a_collective_up_stands_alone():
    def load_data():
        time.sleep(1000)

    @kinetic.run(accelerator="tpu-v6e-16")
    def train():
        import jax
        import numpy as np
        from jax.experimental import multihost_utils

        host = jax.process_index()
        print("begun", flush=True)
        if host == 2:
            load_data()
        while True:
            multihost_utils.process_allgather(np.ones(1))

    handle = train.run_async()
    all_say(handle, "begun")
    text = wait_for_stacks(handle, "hosts 0-1, 3 wait at ")
    end(handle)
    groups = text.split("\n\n")
    assert groups[0].startswith("host 2 is at test_stacks.py:")
    assert "load_data" in groups[0]
    assert len(groups) == 2
    assert "load_data" not in groups[1]
    assert "kinetic/_host" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")


def test_a_plain_loop_shows_the_functions_lines_only():
    @kinetic.run(accelerator="tpu-v6e-16")
    def train():
        print("begun", flush=True)
        while True:
            time.sleep(0.001)

    handle = train.run_async()
    all_say(handle, "begun")
    text = wait_for_stacks(handle, "hosts 0-3 are at test_stacks.py:")
    end(handle)
    assert re.fullmatch(
        r"hosts 0-3 are at test_stacks\.py:\d+ in train:\n(  \S*test_stacks\.py:\d+ in train\n)",
        text,
    ), text


def test_modules_that_each_host_loads_from_its_own_tree_are_the_same_place(tmp_path):
    # Make the folder a project, so that its files are sent. A module that holds a lock is not
    # pickled by value: every host imports its own copy.
    (tmp_path / "requirements.txt").touch()
    (tmp_path / "waiting.py").write_text(
        "import threading\nimport time\nLOCK = threading.Lock()\n\ndef wait():\n"
        "    time.sleep(1000)\n"
    )
    (tmp_path / "main.py").write_text(
        textwrap.dedent(
            """
            import kinetic
            import waiting

            @kinetic.run(accelerator="tpu-v6e-16")
            def train():
                print("begun", flush=True)
                waiting.wait()

            print(train.run_async().job_id)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    handle = kinetic.attach(done.stdout.strip())
    all_say(handle, "begun")
    text = wait_for_stacks(handle, "in wait\n")
    end(handle)
    assert text.startswith("hosts 0-3 are at waiting.py:")
    assert f"  {tmp_path}/waiting.py:6 in wait\n" in text


def test_a_host_that_has_returned_is_shown_to_have(tmp_path):
    @kinetic.run(accelerator="tpu-v6e-8")
    def early(go_on):
        import jax

        print("begun", flush=True)
        while jax.process_index() == 0 and not os.path.exists(go_on):
            time.sleep(0.01)

    handle = early.run_async(str(tmp_path / "go-on"))
    all_say(handle, "begun")
    text = wait_for_stacks(handle, "host 1 has returned")
    assert text.startswith("host 1 has returned\n\nhost 0 is at test_stacks.py:")
    (tmp_path / "go-on").touch()
    assert handle.wait().ok


def test_a_collective_that_one_host_never_enters_is_told_with_the_users_line():
    @kinetic.run(accelerator="tpu-v6e-16", hang_timeout=2)
    def early():
        import jax
        from jax.experimental import multihost_utils

        if jax.process_index() == 2:
            return
        multihost_utils.sync_global_devices("the others")

    with pytest.raises(kinetic.errors.HostHung) as caught:
        early()
    message = str(caught.value)
    assert re.search(
        r": host 2 has returned; hosts 0-1, 3 wait for it in sync_global_devices at "
        r"test_stacks\.py:\d+ in early\. Hosts? [0-9, -]+ of 4 stood still",
        message,
    )
    assert re.search(
        r"\n  hosts 0-1, 3 wait at test_stacks\.py:\d+ in early:\n"
        r"    \S+/test_stacks\.py:\d+ in early\n"
        r"    \S+multihost_utils\.py:\d+ in sync_global_devices\n    … ",
        message,
    )
    assert caught.value.hosts == (0, 1, 3)
    assert read_stacks(kinetic.list_jobs()[0]).startswith(
        "host 2 has returned\n\nhosts 0-1, 3 wait at test_stacks.py:"
    )
