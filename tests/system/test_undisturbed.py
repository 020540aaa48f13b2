"""Reading a function's stacks does not disturb the function: no blocking call ends early, in Python
or in native code."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
from gangs import kill, processes, wait_until, worker_of
from on_hosts import (
    pause,
    poll_in_native_code,
    sleep_in_native_code,
    sleep_in_native_code_that_holds_the_lock,
    wait_for_a_signal,
    wait_in_many_threads,
)

import kinetic
from kinetic.errors import HostHung, NotFound


def read_stacks(handle, word):
    try:
        text = handle.stacks().get(0, "")
    except NotFound:  # The worker is not ready yet.
        return ""
    return text if word in text else ""


def end(handle):
    _, agents = processes(handle)
    kill(worker_of(agents[0]))
    handle.wait()


WAYS = [
    pause,
    sleep_in_native_code,
    sleep_in_native_code_that_holds_the_lock,
    poll_in_native_code,
    wait_for_a_signal,
]


@pytest.mark.parametrize(
    ("wait", "word"),
    [*((way, way.__name__) for way in WAYS), (wait_in_many_threads, "wait_beside_them")],
)
def test_a_function_that_waits_goes_on_waiting(wait, word, home):
    def function(marker, over):
        Path(marker).touch()
        wait()
        Path(over).touch()

    marker, over = home.parent / "marker", home.parent / "over"
    handle = kinetic.run(accelerator="cpu")(function).run_async(str(marker), str(over))
    wait_until(marker.exists, "the function has not begun")
    # A first reading may mix two moments: threads run on while their stacks are written.
    wait_until(lambda: read_stacks(handle, word), "no stacks")
    for _ in range(3):
        text = wait_until(lambda: read_stacks(handle, word), "no stacks")
        assert "kinetic/_host" not in text
        assert "no Python frame" not in text
    assert not over.exists()
    assert handle.status().value == "RUNNING"
    end(handle)


def test_a_hung_job_does_not_succeed(home):
    """kinetic detects a hang by reading stacks, for which it sends a signal. The signal must not
    end the function's blocking call."""

    def function():
        print("waits", flush=True)
        signal.pause()
        return "never"

    with pytest.raises(HostHung, match="function"):
        kinetic.run(accelerator="cpu", hang_timeout=1)(function)()


def test_fork_and_data_still_work():
    """kinetic has a thread for stack requests: forks and counts of threads must work despite it."""

    def function():
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return (
                pool.map(abs, [-1, -2]),
                threading.active_count(),
                [t.name for t in threading.enumerate()],
            )

    values, threads, names = kinetic.run(accelerator="cpu")(function)()
    assert values == [1, 2]
    assert threads == len(names)
    assert "MainThread" in names


def test_stacks_before_the_function_begins(home):
    class Slow:
        def __reduce__(self):
            return time.sleep, (1000,)

    handle = kinetic.run(accelerator="cpu")(lambda _: None).run_async(Slow())
    text = wait_until(lambda: read_stacks(handle, "unpack"), "no stacks")
    assert "hread" in text
    end(handle)
