"""Secrets are in no file, no environment and no open descriptor of ours, at any time of a job.

In: a job with a secret and retries. Out: where the secret can be read while each attempt runs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

from gangs import processes, wait_until, zygotes

import kinetic


def holding(secret, home, handle):
    """Files, environments and open descriptors (also of files that have no name any more) in which
    the secret can be read."""
    supervisor, agents = processes(handle)
    found = [
        p for place in (home, Path(os.environ["TMPDIR"])) for p in place.rglob("*") if p.is_file()
    ]
    for pid in (supervisor, *agents.values(), *zygotes()):
        found += [
            Path(f"/proc/{pid}/environ"),
            Path(f"/proc/{pid}/cmdline"),
            *Path(f"/proc/{pid}/fd").iterdir(),
        ]
    told = []
    for path in found:
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.stat().st_mode) and secret.encode() in path.read_bytes():
                told.append(str(path))
    return told


def test_secrets_rest_nowhere_while_attempts_run(monkeypatch, home):
    secret = "-".join(["s3cret", "canary", "of", "the", "test"])
    names = ["MY_TOKEN", "LD_SDK_KEY"]  # The loader reads variables that begin so at a start.
    for name in names:
        monkeypatch.setenv(name, secret)

    @kinetic.run(accelerator="cpu", secrets=names, retries=2)
    def hold(folder):
        here = Path(folder) / os.environ["KINETIC_ATTEMPT"]
        here.touch()
        while here.exists():
            time.sleep(0.01)
        if here.name != "3":
            raise OSError("again")
        return len(os.environ["MY_TOKEN"])

    handle = hold.run_async(str(home.parent))
    for attempt in "123":
        marker = home.parent / attempt
        wait_until(marker.exists, f"attempt {attempt} has not begun")
        assert holding(secret, home, handle) == []
        marker.unlink()
    assert handle.result() == len(secret)
