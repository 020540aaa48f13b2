"""Seconds for which a worker made no progress, and cases in which kinetic cannot measure them."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kinetic._host.agent.stall import Sample, StallDetector, measure_starvation
from kinetic._system import processes


def at(time_s, *, main_ns=(0, 0), cpu_s=0.0, log_bytes=0, **more):
    return Sample(time_s, cpu_s, main_ns, log_bytes, **more)


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
        {"main_ns": (5_000_000, 0)},
        {"main_ns": (0, 300_000_000)},
        {"starved_s": 1.2},
    ],
)
def test_any_sign_of_life_counts_from_anew(sign):
    assert looks(at(0), at(1), at(2, **sign), at(3, **sign)) == [1, 0, 1]


def test_a_machine_that_was_suspended_says_nothing_about_the_worker():
    assert looks(at(0), at(1), at(16), at(17), at(18)) == [1, 0, 1, 2]


def test_beats_that_come_a_little_late_do_count():
    assert looks(at(0), at(3), at(6), at(9)) == [3, 6, 9]


def test_the_time_of_a_main_thread_is_read(tmp_path):
    folder = tmp_path / "7" / "task" / "7"
    folder.mkdir(parents=True)
    (folder / "schedstat").write_text("1000 9000000 12\n")
    assert processes.main_thread_ns(7, tmp_path) == (1000, 9_000_000)
    assert processes.main_thread_ns(8, tmp_path) is None


def test_a_main_thread_that_gets_no_processor_does_not_stand_still():
    starved = [at(t, main_ns=(0, int(0.9e9 * t))) for t in range(30)]
    assert max(looks(*starved)) <= 1


def test_a_main_thread_that_wakes_up_behind_others_does_not_hide_a_hang():
    """Measured in `jax.block_until_ready` beside ten busy processes for each processor."""
    waiting = [at(t, main_ns=(int(0.25e6 * t), int(9e6 * t))) for t in range(60)]
    assert looks(*waiting)[-1] == 59


def test_a_worker_whose_threads_compile_and_get_no_processor_does_not_stand_still():
    """XLA compiles in threads while the main thread sleeps. On a busy machine these threads get
    little processor time, but they are ready to run, so the worker makes progress."""
    compiling = [at(t, cpu_s=0.03 * t, starved_s=0.9 * t) for t in range(30)]
    assert max(looks(*compiling)) <= 1


def test_idle_threads_that_wake_up_behind_others_do_not_hide_a_hang():
    hung = [at(t, cpu_s=0.01 * t, starved_s=0.2 * t) for t in range(30)]
    assert looks(*hung)[-1] == 29


@pytest.mark.starts_processes
def test_the_time_that_threads_wait_for_a_processor_is_counted():
    """Two processes compute on one processor, so each waits for it half of the time."""
    child = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"
    pair = [subprocess.Popen([sys.executable, "-c", child]) for _ in range(2)]
    try:
        wait_for = time.monotonic() + 100
        while any(processes.starved_s(process.pid) < 0.1 for process in pair):
            assert time.monotonic() < wait_for
            time.sleep(0.01)
    finally:
        for process in pair:
            process.kill()
            process.wait()
    assert processes.starved_s(pair[0].pid) == 0.0, "the process has ended"


@pytest.mark.parametrize(
    ("elapsed_s", "waited_s", "starved_s"),
    [(5.0, 0.0, 0.0), (5.0, 1.0, 0.0), (5.0, 4.6, 4.6), (5.0, 40.0, 5.0)],
)
def test_exit_handlers_have_more_time_where_they_get_no_processor(elapsed_s, waited_s, starved_s):
    before, now = at(10.0, starved_s=3.0), at(10.0 + elapsed_s, starved_s=3.0 + waited_s)
    assert measure_starvation(before, now) == pytest.approx(starved_s)
