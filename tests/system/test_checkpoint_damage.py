"""A flipped bit in a gang's checkpoint is detected by all hosts. They restore the previous step,
also on meshes other than the saved one. Undamaged steps are restored without a warning."""

from __future__ import annotations

import re

import pytest
from on_saving_hosts import restore_alone, save_and_damage

import kinetic

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_damage_is_found_on_every_mesh(tmp_path):
    run = kinetic.run("cpu:2", slices=2, all_hosts=True, output_dir=str(tmp_path))
    job = run(save_and_damage).run_async()
    job.result()
    zero, one = job.results()
    for name in zero:
        step = 1 if name.endswith("damaged") else 2
        assert (name, *zero[name]) == (name, step, True)
        assert (name, *one[name]) == (name, step, name != "not verified")
    # Orbax writes both leaves into one file in any order, so the flipped bit may be in either.
    leaves = re.findall(r"step 2 in .*leaf \['(w|half)'\] differs from what was saved", job.logs())
    assert len(leaves) == 4, job.logs()
    assert len(set(leaves)) == 1
    alone = kinetic.run("cpu", output_dir=str(tmp_path))(restore_alone).run_async()
    assert alone.result() == (1, True)
    assert f"leaf ['{leaves[0]}'] differs from what was saved" in alone.logs()
