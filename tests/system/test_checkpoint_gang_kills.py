"""Four hosts on two slices save as fast as they can, in both tiers; in each attempt one of them is
killed at a random moment of a save or restore. Each restored state is complete, and of the same
step on all hosts; no partial save is left."""

from __future__ import annotations

import json
import os

import pytest
from on_saving_hosts import save_and_be_killed

import kinetic
from kinetic._system import memory_folder

pytestmark = [pytest.mark.timeout(900), pytest.mark.settles_within(60)]
KILLS = int(os.environ.get("KINETIC_TEST_KILLS", "1"))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"slices": 2, "retries": KILLS},
        {"slices": (1, 2), "on_slice_loss": "shrink", "max_failures": KILLS},
    ],
    ids=["retries", "elastic"],
)
def test_what_a_gang_restores_is_whole_and_of_one_step(tmp_path, options):
    seed = int(os.environ.get("KINETIC_TEST_SEED", "1"))
    remote = kinetic.run("tpu-v6e-8", **options)(save_and_be_killed)
    job = remote.run_async(str(tmp_path), KILLS, seed)
    last = job.result(timeout=600)
    before, tiers = 0, []
    attempts = {int(path.name.split("-")[0]) for path in tmp_path.glob("[0-9]*-[0-9]")}
    for attempt in sorted(attempts):  # Attempts killed during their restore left no note.
        hosts = [json.loads(p.read_text()) for p in tmp_path.glob(f"{attempt}-[0-9]")]
        assert all(each == hosts[0] for each in hosts), (attempt, hosts)
        start, values, tier = hosts[0]
        assert values == [start - 1.0], "all of one step"
        assert start >= before, "nothing that was restored once is lost"
        done = [
            int(path.read_text() or -1)
            for path in tmp_path.glob("done-*")
            if int(path.name.split("-")[1]) < attempt
        ]
        assert start > max(done, default=-1), "nothing that was committed is lost"
        before = start
        tiers.append(tier)
    assert last == before + 3
    assert "local" in tiers
    job.cleanup()
    assert not memory_folder.of_job(job.job_id).exists()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert not [name for name in names if "tmp" in name], names
    assert len([name for name in names if name.isdigit()]) <= 2
