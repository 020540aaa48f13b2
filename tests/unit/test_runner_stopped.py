"""What a worker leaves on its streams when it is stopped, and what a simulated slice does not show."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kinetic.runner.logs import GLOO_NOISE

STOPPED = """
import sys
from kinetic.runner import worker

class Channel:
    def send(self, message):
        print(message.get("detail", ""), flush=True)
    def receive(self): return {"start": {}}

def stopped(*_):
    raise %s

worker._settle = lambda *_: None
worker._import_ahead = lambda: None
worker.Start = lambda: None
worker._serve = stopped
worker.main(Channel(), 1, 2, 3, 0)
"""


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [("SystemExit(143)", 143, ""), ("SystemExit('text')", 70, ""), ("ValueError('mine')", 70, "ValueError: mine")],
)
def test_a_worker_that_ends_outside_the_function_prints_nothing_and_tells_its_own_faults(
    raised: str, code: int, told: str
) -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED % raised], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == ""
    assert done.stdout.strip().endswith(told)
    assert ("no fault of the function" in done.stdout) == bool(told)


LINE = b"[Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n"


@pytest.mark.parametrize(
    "noise",
    [
        LINE,
        LINE + LINE,
        b"[Gloo] Rank [Gloo] Rank 0 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n",
        b"1 is connected to 7 peer ranks. Expected number of connected peer ranks is : 7\n",
        b"[Gloo] Rank 01 is connected to  is connected to 77 peer ranks. Expected number of connected peer ranks is : 7\n",
    ],
)
def test_the_pieces_of_two_lines_that_gloo_wrote_at_once_are_noise(noise: bytes) -> None:
    assert GLOO_NOISE.sub(b"", b"a\n" + noise + b"b\n") == b"a\nb\n"


@pytest.mark.parametrize("mine", [b"42\n", b"\n", b"[Gloo] Rank 0 is mine\n", b"7 peer ranks. are too few\n", b"[Gloo]\n"])
def test_what_others_print_is_not(mine: bytes) -> None:
    assert GLOO_NOISE.sub(b"", mine) == mine
