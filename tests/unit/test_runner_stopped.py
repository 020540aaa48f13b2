"""A worker that is stopped before or after the user's function: its exit code, and what it
prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

STOPPED = """
import sys
from kinetic._host.worker import process as worker

class Channel:
    def send(self, message):
        print(message.get("detail", ""), flush=True)
    def receive(self): return {"start": {}}

def stopped(*_):
    raise %s

worker._init_process = lambda *_, **__: None
worker._import_ahead = lambda: None
worker.Start.from_json = stopped
worker.main(Channel(), 1, 2, 3, 0)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        ("SystemExit(143)", 143, ""),
        ("SystemExit('text')", 70, ""),
        ("ValueError('mine')", 70, "ValueError: mine"),
    ],
)
def test_a_worker_that_ends_outside_the_function_prints_nothing_and_tells_its_own_faults(
    raised: str, code: int, message: str
) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED % raised], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == ""
    assert done.stdout.strip().endswith(message)
    assert ("not the function's fault" in done.stdout) == bool(message)
