"""Damage in the folder of a gang: found on every mesh, by all hosts alike.

In: a state that is saved over the rows of two hosts, a flipped bit. Out: the step before it, on
both hosts, cut along other axes; and no false alarm.
"""

from __future__ import annotations

import pytest
from on_saving_hosts import restore_alone, save_and_damage

import kinetic

pytestmark = pytest.mark.timeout(600)


def test_damage_is_found_on_every_mesh(tmp_path):
    run = kinetic.run("cpu:2", slices=2, all_hosts=True, output_dir=str(tmp_path))
    job = run(save_and_damage).run_async()
    job.result()
    zero, one = job.results()
    for name in zero:
        step = 1 if name.endswith("damaged") else 2
        assert (name, *zero[name]) == (name, step, True)
        assert (name, *one[name]) == (name, step, name != "not verified")
    told = [line for line in job.logs().splitlines() if "leaf ['w'] is not what was saved" in line]
    assert len(told) == 4, job.logs()
    assert "step 2 in" in told[0]
    alone = kinetic.run("cpu", output_dir=str(tmp_path))(restore_alone).run_async()
    assert alone.result() == (1, True)
    assert "leaf ['w'] is not what was saved" in alone.logs()
