"""Secrets are in no file, environment or open descriptor of kinetic's processes, in any attempt of
a job."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from gangs import processes, wait_until, zygotes

import kinetic


def holding(secret, home, handle):
    """Return the paths of files, environments, command lines and open descriptors of kinetic's
    processes that contain the secret."""
    supervisor, agents = processes(handle)
    paths = [
        Path(folder, name)
        for place in (home, os.environ["TMPDIR"])
        for folder, _, names in os.walk(place)  # Folders may vanish meanwhile.
        for name in names
    ]
    for pid in (supervisor, *agents.values(), *zygotes()):
        paths += [Path(f"/proc/{pid}/environ"), Path(f"/proc/{pid}/cmdline")]
        with contextlib.suppress(OSError):  # It has ended.
            paths += Path(f"/proc/{pid}/fd").iterdir()
    names = []
    for path in paths:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.stat().st_mode) and secret.encode() in path.read_bytes():
                names.append(str(path))
    return names


def test_secrets_rest_nowhere_while_attempts_run(monkeypatch, home):
    secret = "-".join(["s3cret", "canary", "of", "the", "test"])
    # LD_ is also the prefix of variables that the dynamic loader reads.
    names = ["MY_TOKEN", "LD_SDK_KEY"]
    for name in names:
        monkeypatch.setenv(name, secret)

    @kinetic.run(accelerator="cpu", secrets=names, retries=2)
    def hold(folder):
        folder_of_attempt = Path(folder) / os.environ["KINETIC_ATTEMPT"]
        folder_of_attempt.touch()
        while folder_of_attempt.exists():
            time.sleep(0.01)
        if folder_of_attempt.name != "3":
            raise OSError("again")
        return len(os.environ["MY_TOKEN"])

    handle = hold.run_async(str(home.parent))
    for attempt in "123":
        marker = home.parent / attempt
        wait_until(marker.exists, f"attempt {attempt} has not begun")
        assert holding(secret, home, handle) == []
        marker.unlink()
    assert handle.result() == len(secret)
