"""kill -9 at any moment of a save: what is restored afterwards is always whole.

In: a process that saves as fast as it can, killed again and again. Out: states in which all arrays
are of one step.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

SAVING = """
import sys
import jax, numpy as np
import kinetic
root, rounds = sys.argv[1], int(sys.argv[2])

def state(step):
    return {str(n): np.full((1000, 50), step * 10.0 + n, np.float32) for n in range(8)}

with kinetic.Checkpointer(
    root + "/run", every=3, local_every=1, keep=2, local_directory=root + "/memory"
) as ckpt:
    found, start = ckpt.restore(state(-1))
    for name, array in found.items():
        assert (array == (start - 1) * 10.0 + int(name)).all(), (name, start, array)
    tier = ckpt.restored.tier if ckpt.restored else "nothing"
    print("restored", start, tier, flush=True)
    for step in range(start, start + rounds):
        ckpt.save(step, state(step))
"""


def saver(root: Path, rounds: int) -> subprocess.Popen[str]:
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SAVING, str(root), str(rounds)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_what_is_restored_is_always_whole(tmp_path: Path) -> None:
    luck = random.Random(20)
    before, seen = 0, set()
    for turn in range(10):
        if turn % 3 == 2:
            shutil.rmtree(tmp_path / "memory")
        with saver(tmp_path, 1_000_000) as process:
            assert process.stdout is not None
            try:
                said = process.stdout.readline().split()
                assert said[:1] == ["restored"], said
                start, tier = int(said[1]), said[2]
                seen.add(tier)
                # Steps that only the memory had are lost with it, and no others.
                assert start >= before or tier == "persistent"
                before = start
                time.sleep(luck.uniform(0.0, 0.6))
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
    assert {"local", "persistent"} <= seen
    with saver(tmp_path, 3) as process:
        process.wait()
        assert process.returncode == 0
    run = {path.name for path in (tmp_path / "run").iterdir()}
    assert not [name for name in run if "tmp" in name], "what was cut off is removed"
    assert len([name for name in run if name.isdigit()]) <= 2
    memory = {path.name for path in (tmp_path / "memory").glob("checkpoints/*/*")}
    assert len([name for name in memory if name.isdigit()]) == 1
