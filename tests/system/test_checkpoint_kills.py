"""A process is killed at random moments of its saves. Each restored state is complete, with all
arrays of one step."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from forks import Forks
from gangs import wait_until

pytestmark = pytest.mark.timeout(600)

IMPORTS = """
import jax, numpy as np
import orbax.checkpoint
import kinetic
"""
SAVING = """
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


@pytest.mark.long
def test_what_is_restored_is_always_whole(tmp_path: Path) -> None:
    pytest.importorskip("orbax.checkpoint")
    with Forks(IMPORTS, JAX_PLATFORMS="cpu") as forks:
        be_killed(forks, tmp_path)
        forks.start(SAVING, tmp_path, str(tmp_path), "3")
        assert forks.wait() == 0, (tmp_path / "err").read_text()
    run = {path.name for path in (tmp_path / "run").iterdir()}
    assert not [name for name in run if "tmp" in name], "what was cut off is removed"
    assert len([name for name in run if name.isdigit()]) <= 2
    memory = {path.name for path in (tmp_path / "memory").glob("checkpoints/*/*")}
    assert len([name for name in memory if name.isdigit()]) == 1


def be_killed(forks: Forks, root: Path) -> None:
    luck = random.Random(20)
    before, tiers = 0, set()
    for turn in range(10):
        if turn % 3 == 2:
            shutil.rmtree(root / "memory")
        pid = forks.start(SAVING, root, str(root), "1000000")
        try:
            words = read_first_line(root, pid).split()
            assert words[:1] == ["restored"], words
            start, tier = int(words[1]), words[2]
            tiers.add(tier)
            # Removing the memory tier may lose steps, if the persistent tier has not got them yet.
            assert start >= before or tier == "persistent"
            before = start
            # Wait for a persistent step: the memory is removed before the next turn.
            if turn == 1:
                wait_until(lambda: has_whole_step(root / "run"), "it commits nothing")
            time.sleep(luck.uniform(0.0, 0.6))
        finally:
            os.kill(pid, signal.SIGKILL)
            assert forks.wait() == -signal.SIGKILL, (root / "err").read_text()
    assert {"local", "persistent"} <= tiers


def has_whole_step(run: Path) -> bool:
    return run.is_dir() and any(path.name.isdigit() for path in run.iterdir())


def read_first_line(root: Path, pid: int) -> str:
    """Wait until the process has printed a line or ended; return its output so far."""
    out = root / "out"
    process = Path(f"/proc/{pid}")
    wait_until(lambda: out.read_text().endswith("\n") or not process.exists(), "it says nothing")
    return out.read_text()
