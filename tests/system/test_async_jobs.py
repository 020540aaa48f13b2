"""Jobs as futures on real processes: async code, callbacks, the first of many jobs to end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from remotes import add_later, outer, submits, wait_for

import kinetic
from kinetic import errors

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 200.0


def script(tmp_path, body):
    (tmp_path / "script.py").write_text(textwrap.dedent(body))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "script.py"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )


def test_an_awaited_call_prints_and_leaves_the_loop_to_others(tmp_path, capfd):
    go = tmp_path / "go"

    async def main():
        calls = asyncio.gather(wait_for.aio(go, 1), wait_for.with_options(name="second").aio(go, 2))
        await asyncio.sleep(0)
        go.touch()  # Both calls wait, so the loop must be free.
        return await calls

    assert asyncio.run(main()) == [1, 2]
    printed = capfd.readouterr().out
    assert "waiting for 1" in printed
    assert "waiting for 2" in printed


def test_an_async_function():
    assert asyncio.run(add_later.aio(1)) == 2
    assert add_later(1) == 2
    assert outer(1) == [2, 3]
    with pytest.raises(ValueError, match="-1 is negative"):
        asyncio.run(add_later.aio(-1))
    with pytest.raises(kinetic.errors.UsageError, match="missing a required argument: 'x'"):
        asyncio.run(add_later.aio())


def awaiting_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kinetic-await"]


@pytest.mark.parametrize("when", ["while it is submitted", "when it was submitted"])
def test_cancelling_an_awaited_call_leaves_its_job_running(when, tmp_path, capfd):
    go = tmp_path / "go"

    async def main():
        call = asyncio.ensure_future(wait_for.aio(go, 1))
        while not (jobs := kinetic.list_jobs()):
            await asyncio.sleep(0.02)
        if when == "when it was submitted":  # The event loop is blocked in this block.
            for thread in awaiting_threads():
                thread.join(2)  # The thread may already wait for the value.
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return jobs[0]

    job = asyncio.run(main())
    printed, words = "", f"{job.job_id} keeps running; reattach with kinetic.attach"
    deadline = time.monotonic() + PATIENCE_S
    while words not in printed and time.monotonic() < deadline:
        time.sleep(0.05)
        printed += capfd.readouterr().err
    assert words in printed
    go.touch()
    assert job.result(timeout=PATIENCE_S) == 1
    for thread in awaiting_threads():
        thread.join(PATIENCE_S)


def test_jobs_of_calls_and_of_batches_as_they_end(tmp_path):
    batch = add_later.run_async_map([1, 2, 3], max_concurrent=None)
    single = wait_for.run_async(tmp_path / "go", "last")
    values = []
    for job in kinetic.as_completed([single, *batch.jobs], timeout=PATIENCE_S):
        values.append(job.result())
        if len(values) == 3:
            (tmp_path / "go").touch()
    assert sorted(values[:3]) == [2, 3, 4]
    assert values[3:] == ["last"]


def test_a_callback_does_not_keep_the_process_alive(tmp_path):
    done = script(
        tmp_path,
        """
        import kinetic, pathlib, time

        @kinetic.run(accelerator="cpu")
        def endless():
            while not pathlib.Path(stop).exists():
                time.sleep(0.02)

        stop = str(pathlib.Path("stop").absolute())
        if __name__ == "__main__":
            job = endless.run_async()
            job.add_done_callback(print)
            print(job.job_id)
        """,
    )
    (tmp_path / "stop").touch()
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr == "kinetic: no cluster configured; simulating cpu (1 host x 1 device) here\n"
    )
    job = kinetic.attach(done.stdout.strip())
    called, over = [], threading.Event()
    job.add_done_callback(lambda handle: (called.append(handle.result()), over.set()))
    assert over.wait(PATIENCE_S)
    assert called == [None]


def test_a_job_that_submits_another_is_told_what_works():
    with pytest.raises(
        errors.UsageError,
        match=r"A job cannot submit other jobs. In a job, add_later\(...\) runs the function",
    ):
        submits()

    inner = kinetic.run(accelerator="cpu")(lambda: 1)  # pickled by value, like its plain function

    @kinetic.run(accelerator="cpu")
    def outer(submit):
        return inner.run_async() if submit else inner.options

    with pytest.raises(errors.UsageError, match=r"a job cannot submit other jobs\. Call <lambda>"):
        outer(True)
    with pytest.raises(AttributeError) as caught:
        outer(False)
    assert "in a job it is the plain function, and a job cannot submit other jobs" in "\n".join(
        caught.value.__notes__
    )
