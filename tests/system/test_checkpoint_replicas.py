"""Restores of arrays that each slice holds as a whole: one slice reads, and sends to the others."""

from __future__ import annotations

import pytest
from on_saving_hosts import save_many_types

import kinetic

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_one_slice_reads_what_both_need(tmp_path):
    # Four hosts: two in each slice.
    run = kinetic.run("tpu-v6e-8", slices=2, all_hosts=True, output_dir=str(tmp_path))
    job = run(save_many_types).run_async()
    job.result()
    assert [wrong for wrong, _ in job.results()] == [[]] * 4
    read = [size for _, size in job.results()]
    # Slice 0 (hosts 0 and 1) reads most. In slice 1, host 2 reads one part, also for host 3.
    assert max(read[2:]) < 10e6 < 15e6 < min(read[:2]), read
    assert "which 3 of 4 hosts have read for all." in job.logs()
