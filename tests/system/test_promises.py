"""kinetic's promises on real processes: values, exceptions, output, hosts that wait for each other,
deaths."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

import pytest
from gangs import PATIENCE_S
from on_hosts import Odd, end_with, host_index, psum_of_indices

import kinetic
from kinetic import errors

LONG_S = 1.5
"""A job that runs for so many seconds has connected to its gang; a shorter one may not have."""


pytestmark = pytest.mark.usefixtures("place")


def gang_of(place):
    """Return an accelerator and the index of its last host. Local gangs are larger: they start
    fast."""
    return ("tpu-v6e-16", 3) if place.name == "local" else ("tpu-v6e-8", 1)


# -- values and exceptions -------------------------------------------------------------------------


def test_the_leaders_value_comes_back():
    @kinetic.run(accelerator="tpu-v6e-8")
    def where():
        import jax

        return (
            jax.process_index(),
            jax.process_count(),
            jax.local_device_count(),
            jax.device_count(),
            psum_of_indices(),
        )

    assert where() == (0, 2, 4, 8, 28.0)


def test_a_job_too_short_for_a_coordinator_leaves_the_same_record():
    @kinetic.run(accelerator="cpu")
    def wait(seconds):
        time.sleep(seconds)
        return seconds

    short, long = wait.run_async(0.0), wait.run_async(LONG_S)
    assert (short.result(), long.result()) == (0.0, LONG_S)
    kinds = [event["kind"] for event in short.events()]
    assert kinds == [event["kind"] for event in long.events()]
    # In a pod, the attempt is recorded ("begun") before its host starts.
    assert kinds[kinds[0] == "begun" :] == ["joined", "ready", "report", "finished", "ended"]


@pytest.mark.parametrize("seconds", [0.0, LONG_S])
def test_a_short_job_that_fails_or_dies_is_blamed_as_any_other(seconds):
    @kinetic.run(accelerator="cpu")
    def end(how):
        time.sleep(seconds)
        if how == "raise":
            raise ValueError("on purpose")
        os.kill(os.getpid() if how == "worker" else os.getppid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(ValueError, match="on purpose"):
        end("raise")
    with pytest.raises(errors.HostLost, match="SIGKILL"):
        end("worker")
    with pytest.raises(errors.HostLost, match="agent process was killed by SIGKILL"):
        end("agent")


def test_a_single_host_needs_no_jax():
    @kinetic.run(accelerator="cpu")
    def add(a, b=2):
        return {"sum": a + b, "modules": "jax" in sys.modules}

    assert add(1, b=4) == {"sum": 5, "modules": False}


def test_single_host_slices_have_their_chips():
    @kinetic.run(accelerator="tpu-v5litepod-2x4")
    def devices():
        import jax

        return jax.device_count(), jax.process_count(), os.environ["KERAS_BACKEND"]

    assert devices() == (8, 1, "jax")


def test_the_original_exception_comes_back_with_its_parts():
    @kinetic.run(accelerator="cpu")
    def fail():
        try:
            {}["missing"]
        except KeyError as cause:
            error = Odd(7, hint="look")
            error.add_note("a note of mine")
            raise error from cause

    with pytest.raises(Odd, match="code 7") as caught:
        fail()
    assert (caught.value.code, caught.value.hint) == (7, "look")
    assert isinstance(caught.value.__cause__, KeyError)
    notes = "\n".join(caught.value.__notes__)
    assert "a note of mine" in notes
    assert "Remote traceback (host 0 of 1, job-" in notes
    assert "".join(traceback.format_exception(caught.value)).count("raise error from cause") == 1


def test_async_functions_are_awaited():
    @kinetic.run(accelerator="cpu")
    async def add_later(x):
        import asyncio

        await asyncio.sleep(0)
        return x * 2

    assert add_later(21) == 42


def test_the_raising_host_is_named_not_those_that_broke(place):
    accelerator, last = gang_of(place)

    @kinetic.run(accelerator=accelerator)
    def fail_on_the_last():
        if host_index() == last:
            raise ZeroDivisionError("only here")
        return psum_of_indices()

    with pytest.raises(ZeroDivisionError, match="only here") as caught:
        fail_on_the_last()
    notes = "\n".join(caught.value.__notes__)
    assert f"host {last} of {last + 1}" in notes
    assert (
        "".join(traceback.format_exception(caught.value)).count(
            'raise ZeroDivisionError("only here")'
        )
        == 1
    )


# -- deaths, hangs, timeouts, cancelled jobs -------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("os._exit", errors.HostLost, "exit code 3"),
        ("sys.exit", errors.UserCodeFailed, "sys.exit(4)"),
        ("sys.exit text", errors.UserCodeFailed, "goodbye"),
        ("segfault", errors.HostLost, "SIGSEGV"),
        ("abort", errors.HostLost, "SIGABRT"),
        ("kill", errors.HostLost, "SIGKILL"),
        ("unpicklable", errors.ResultUnavailable, "generator"),
    ],
)
def test_each_end_has_its_name(how, kind, words):
    with pytest.raises(kind) as caught:
        kinetic.run(accelerator="cpu")(end_with)(how)
    assert words in str(caught.value)
    assert caught.value.host == 0
    assert caught.value.job_id.startswith("job-")


def test_exit_zero_is_a_success_without_a_value():
    assert kinetic.run(accelerator="cpu")(end_with)("sys.exit zero") is None


def test_a_host_killed_inside_a_collective_is_named(place):
    accelerator, last = gang_of(place)

    @kinetic.run(accelerator=accelerator)
    def the_last_dies():
        import threading

        if host_index() == last:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            psum_of_indices()

    with pytest.raises(errors.HostLost, match=f"host {last}") as caught:
        the_last_dies()
    assert caught.value.hosts[0] == last


def test_a_host_that_stands_still_is_named_with_its_stack():
    def sleep_for_ever():
        time.sleep(10_000)

    @kinetic.run(accelerator="tpu-v6e-16", hang_timeout=4)
    def hang_on_one():
        if host_index() == 1:
            sleep_for_ever()
        psum_of_indices()

    with pytest.raises(errors.HostHung, match="host 1") as caught:
        hang_on_one()
    assert caught.value.hosts == (1,)
    assert "sleep_for_ever" in str(caught.value)
    # For the other hosts, the error names a line or the collective in which they wait.
    assert "hosts 0, 2-3 " in str(caught.value)
    assert len(str(caught.value).splitlines()) < 24


def test_timeout_ends_the_job_and_lets_it_clean_up(home):
    marker = home.parent / "cleaned"

    @kinetic.run(accelerator="cpu", timeout=4)
    def slow(path):
        try:
            time.sleep(60)
        finally:
            open(path, "w").close()

    with pytest.raises(errors.JobTimeout):
        slow(str(marker))
    assert marker.exists()


@pytest.mark.parametrize("code", [0, 1])
def test_cancel_reaches_the_functions_own_handler(home, code):
    """The function handles SIGTERM, saves and exits, even with code 0. The caller still gets
    JobCancelled."""
    marker = home.parent / "handled"

    @kinetic.run(accelerator="cpu")
    def patient(path):
        def handler(signum, frame):
            open(path, "w").close()
            sys.exit(code)

        signal.signal(signal.SIGTERM, handler)
        print("ready", flush=True)
        time.sleep(60)

    cancel_once_ready(patient, marker)
    assert marker.exists()


def test_cancel_unwinds_a_function_that_is_struck_where_python_drops_exceptions(home):
    """Python drops exceptions in callbacks of the garbage collector, where hosts of JAX often are
    when they are cancelled. The function must be unwound all the same."""
    marker = home.parent / "unwound"

    @kinetic.run(accelerator="cpu")
    def collecting(path):
        import gc

        def callback(phase, info):
            print("ready", flush=True)
            while True:  # The exception of `cancel` ends this loop.
                time.sleep(0.02)

        gc.callbacks.append(callback)
        try:
            gc.collect()
            gc.callbacks.remove(callback)
            time.sleep(60)
        finally:
            open(path, "w").close()

    handle = cancel_once_ready(collecting, marker)
    assert marker.exists()
    ended = "kinetic: The job was cancelled.\n"  # No line is about the dropped exception.
    assert handle.logs() in (
        f"ready\n{ended}",
        f"ready\nready\n{ended}",
    )  # The callback may run again at the end.


def test_a_function_is_struck_again_while_the_collector_is_kept_busy(home):
    """The exception of `cancel` is dropped in a callback of the garbage collector, and the
    collector runs all the time: `cancel` raises it again until the function ends."""
    marker = home.parent / "unwound"

    @kinetic.run(accelerator="cpu")
    def collecting(path):
        import gc
        import threading

        main, struck = threading.get_ident(), []

        def callback(phase, info):
            while threading.get_ident() != main:
                time.sleep(0.02)
            if not struck:
                struck.append(True)
                print("ready", flush=True)
                time.sleep(60)

        gc.callbacks.append(callback)
        try:
            gc.set_threshold(1)
            gc.collect()
            time.sleep(60)
        finally:
            gc.callbacks.remove(callback)
            open(path, "w").close()

    cancel_once_ready(collecting, marker)
    assert marker.exists()


def cancel_once_ready(remote, marker):
    """Cancel a job while its function runs, and check its error; return the job."""
    handle = remote.run_async(str(marker))
    wait_for_output(handle, b"ready")
    handle.cancel()
    with pytest.raises(errors.JobCancelled):
        handle.result()
    return handle


def wait_for_output(handle, text):
    deadline = time.monotonic() + PATIENCE_S
    while text not in handle.logs().encode():
        assert time.monotonic() < deadline, handle.logs()
        time.sleep(0.02)
