"""Damage in the folder of a gang: found on every mesh, by all hosts alike.

In: a state that is saved over the rows of two hosts, a flipped bit. Out: the step before it, on
both hosts, cut along other axes; and no false alarm.
"""

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
    # In which order Orbax writes the leaves into one file is luck: the bit may be of either.
    told = re.findall(r"step 2 in .*leaf \['(w|half)'\] differs from what was saved", job.logs())
    assert len(told) == 4, job.logs()
    assert len(set(told)) == 1
    alone = kinetic.run("cpu", output_dir=str(tmp_path))(restore_alone).run_async()
    assert alone.result() == (1, True)
    assert f"leaf ['{told[0]}'] differs from what was saved" in alone.logs()
