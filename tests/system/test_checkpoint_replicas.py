"""Restores from the persistent tier where slices are replicas: one slice reads for all."""

from __future__ import annotations

import pytest
from on_saving_hosts import save_many_types

import kinetic

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_one_slice_reads_what_both_need(tmp_path):
    # two hosts in each slice
    run = kinetic.run("tpu-v6e-8", slices=2, all_hosts=True, output_dir=str(tmp_path))
    job = run(save_many_types).run_async()
    job.result()
    assert [wrong for wrong, _ in job.results()] == [[]] * 4
    read = [size for _, size in job.results()]
    # Host 2 reads the part that slices share for host 3, too.
    assert max(read[2:]) < 10e6 < 15e6 < min(read[:2]), read
    assert "which 3 of 4 hosts have read for all." in job.logs()
