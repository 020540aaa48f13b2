"""For how long a worker has stood still, and when nobody can know."""

from __future__ import annotations

import pytest

from kinetic._host.agent.stall import Sample, StallDetector
from kinetic._system import processes


def at(time_s, *, cpu_s=0.0, main_ns=0, log_bytes=0, row_bytes=0, saving_step=None):
    return Sample(time_s, cpu_s, main_ns, log_bytes, row_bytes, saving_step)


def looks(*samples):
    watch = StallDetector(samples[0])
    return [watch.observe(sample) for sample in samples[1:]]


def test_a_worker_that_sleeps_stands_still_for_longer_and_longer():
    assert looks(*(at(t) for t in range(5))) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "sign",
    [
        {"log_bytes": 1},
        {"row_bytes": 1},
        {"saving_step": 0},
        {"cpu_s": 0.9},
        {"main_ns": 5_000_000},
    ],
)
def test_any_sign_of_life_counts_from_anew(sign):
    assert looks(at(0), at(1), at(2, **sign), at(3, **sign)) == [1, 0, 1]


def test_a_machine_that_was_suspended_says_nothing_about_the_worker():
    assert looks(at(0), at(1), at(16), at(17), at(18)) == [1, 0, 1, 2]


def test_beats_that_come_a_little_late_do_count():
    assert looks(at(0), at(3), at(6), at(9)) == [3, 6, 9]


def test_a_main_thread_that_gets_no_processor_does_not_stand_still(tmp_path):
    """64 hosts on two processors were said to wait for one that had returned."""
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text("1000 9000000 12\n")
    assert processes.main_thread_ns(7, tmp_path) == 9_001_000
    assert processes.main_thread_ns(8, tmp_path) is None
