"""Batches on real processes: whichever process is killed, each input gets a result or an error, and
no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from remotes import fail_on_odd, square, wait_for

import kinetic
from kinetic import errors
from kinetic._client.batch import handle as batch_handle
from kinetic._client.batch.inputs import job_id_of
from kinetic.cli.root import call

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 200.0


def script(tmp_path, body, *arguments, **more):
    """Start a script that imports kinetic from this checkout; return the process."""
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(body))
    command = [sys.executable, str(file), *map(str, arguments)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def wait_until(read, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := read()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return answer


def test_values_of_many_inputs():
    batch = square.run_async_map(range(20), max_concurrent=8)
    ended = [job.group_index for job in batch.as_completed(timeout=PATIENCE_S)]
    assert sorted(ended) == list(range(20))
    assert batch.results(timeout=PATIENCE_S) == [x * x for x in range(20)]
    attached = kinetic.attach_batch(batch.group_id)
    assert attached.results(timeout=PATIENCE_S) == [x * x for x in range(20)]
    assert attached.status_counts() == {"SUCCEEDED": 20}


def test_exceptions_of_some_inputs():
    batch = fail_on_odd.run_async_map(range(4), retries=1)
    with pytest.raises(errors.BatchError, match=r"2 of 4 inputs") as caught:
        batch.results(timeout=PATIENCE_S)
    assert caught.value.partial_results == [0, None, 2, None]
    assert [job.group_index for job in caught.value.failures] == [1, 3]
    assert isinstance(caught.value.failures[0].error(), ValueError)
    ids = {job.job_id for job in kinetic.list_jobs() if job.group_id == batch.group_id}
    assert ids == {job_id_of(batch.group_id, index) for index in range(4)}, "one job for each input"
    assert [job.outcome().attempt for job in batch.jobs] == [1, 2, 1, 2]


def test_one_failure_can_end_all(tmp_path):
    @kinetic.run(accelerator="cpu")
    def last_fails(x):
        if x == 2:
            raise ValueError("the last one")
        time.sleep(1000)

    batch = last_fails.run_async_map(
        range(9), max_concurrent=3, fail_fast=True, cancel_running_on_fail=True
    )
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in results] == [
        errors.JobCancelled,
        errors.JobCancelled,
        ValueError,
        *[errors.SubmitError] * 6,
    ]


def test_each_input_of_a_slice_has_its_own_gang_and_folder(tmp_path):
    @kinetic.run(accelerator="tpu-v6e-8", output_dir=str(tmp_path))
    def leave(x):
        import jax

        Path(os.environ["KINETIC_OUTPUT_DIR"], "found").write_text(str(x))
        return jax.process_count()

    assert leave.run_async_map([1, 2], max_concurrent=1).results(timeout=PATIENCE_S) == [2, 2]
    assert [(tmp_path / str(i) / "found").read_text() for i in range(2)] == ["1", "2"]


ONLY_SUBMITS = """
    import kinetic

    @kinetic.run(accelerator="cpu")
    def double(x):
        return 2 * x

    print(double.run_async_map(range(12), max_concurrent=2).group_id)
"""
NO_THREADS_AT_THE_END = """
    import threading

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading._register_atexit(setattr, threading.Thread, "start", refuse)
"""


@pytest.mark.parametrize("ending", ["", NO_THREADS_AT_THE_END], ids=["", "as in Python 3.12"])
def test_a_script_that_only_submits_submits_everything(tmp_path, ending):
    with script(tmp_path, ending + ONLY_SUBMITS) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    batch = kinetic.attach_batch(out.strip())
    assert batch.results(timeout=PATIENCE_S) == [2 * x for x in range(12)]


CALLS_AT_ONCE = """
    import sys, threading

    from kinetic._store.many import at_once

    if sys.argv[1] == "loaded":
        import concurrent.futures.thread
    else:
        assert "concurrent.futures.thread" not in sys.modules

    def call():
        is_over.wait()
        print(at_once(str, range(9), 4))

    is_over = threading.Event()
    threading._threading_atexits.insert(0, is_over.set)  # the last one that is called
    threading.Thread(target=call).start()
"""


@pytest.mark.parametrize("pools", ["loaded", "not loaded"])
def test_many_calls_of_a_store_outlive_the_main_thread(tmp_path, pools):
    with script(tmp_path, CALLS_AT_ONCE, pools) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (out.strip(), err) == (str([str(n) for n in range(9)]), "")


SUBMITTER = """
    import sys, os, time
    import kinetic

    @kinetic.run(accelerator="cpu")
    def wait_for(path, number):
        while not os.path.exists(path):
            time.sleep(0.02)
        return number

    inputs = [(sys.argv[1], n) for n in range(8)]
    batch = wait_for.run_async_map(inputs, max_concurrent=3, retries=1)
    print(batch.group_id, flush=True)
    batch.results()
"""


FORKS = """
    import os
    import kinetic

    @kinetic.run(accelerator="cpu")
    def double(x):
        return 2 * x

    batch = double.run_async_map(range(3), max_concurrent=1)
    if (child := os.fork()) == 0:
        print(batch.results(timeout=200, progress=False), flush=True)
        os._exit(0)
    batch.results(progress=False)
    os.waitpid(child, 0)
"""


def test_a_fork_of_the_process_that_submits_gets_the_values(tmp_path):
    with script(tmp_path, FORKS) as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert out.splitlines()[-1] == "[0, 2, 4]"


def test_the_submitting_process_is_killed(tmp_path):
    gate = tmp_path / "gate"
    with script(tmp_path, SUBMITTER, gate) as process:
        group_id = process.stdout.readline().strip()
        batch = kinetic.attach_batch(group_id)
        wait_until(lambda: batch.status_counts().get("RUNNING") == 3, "three jobs run")
        process.send_signal(signal.SIGKILL)
    gate.touch()
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert results[:3] == [0, 1, 2]
    assert [type(e) for e in results[3:]] == [errors.SubmitError] * 5
    assert "ended first" in str(results[-1])
    assert kinetic.attach_batch(group_id).results(timeout=PATIENCE_S, return_exceptions=True)[
        :3
    ] == [0, 1, 2]


@pytest.mark.parametrize(
    "cancel", [lambda batch: batch.cancel(), lambda batch: call(["jobs", "cancel", batch.group_id])]
)
def test_another_process_attaches_and_cancels(cancel, tmp_path):
    with script(tmp_path, SUBMITTER, tmp_path / "never") as process:
        batch = kinetic.attach_batch(process.stdout.readline().strip())
        wait_until(lambda: batch.status_counts().get("RUNNING") == 3, "three jobs run")
        cancel(batch)
        results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert [type(e) for e in results] == [errors.JobCancelled] * 3 + [errors.SubmitError] * 5
    assert process.returncode == 1
    assert "BatchError: 8 of 8 inputs" in err


def test_a_batch_is_cancelled_whose_submitter_is_stopped(tmp_path, monkeypatch, caplog):
    """A batch whose submitter is stopped (Ctrl-Z) is cancelled: its jobs end, and the submitter
    submits no more after it was continued."""
    with script(tmp_path, SUBMITTER, tmp_path / "never") as process:
        batch = kinetic.attach_batch(process.stdout.readline().strip())
        wait_until(lambda: batch.status_counts().get("RUNNING") == 3, "three jobs run")
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(batch_handle, "_STOPPING_S", 3.0)
        try:
            batch.cancel()
        finally:
            process.send_signal(signal.SIGCONT)
        process.communicate(timeout=PATIENCE_S)
    (notice,) = [text for text in caplog.messages if "was cancelled" in text]
    assert "may be suspended" in notice
    assert f"process {process.pid} on" in notice
    results = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert [type(e) for e in results] == [errors.JobCancelled] * 3 + [errors.SubmitError] * 5


def test_a_shell_waits_for_a_batch(capsys):
    good, bad = square.run_async_map([1, 2]), fail_on_odd.run_async_map([0, 1])
    assert call(["jobs", "wait", good.group_id]) == 0
    assert call(["jobs", "wait", "--json", bad.group_id[:-1]]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer.pop("jobs") == {"succeeded": 1, "failed": 1}
    assert answer == {"group_id": bad.group_id, "total": 2, "not_submitted": 0}
    assert call(["jobs", "wait", bad.group_id]) == 1
    assert f"{bad.group_id}: 1 of 2 inputs succeeded." in capsys.readouterr().err


def test_ctrl_c_ends_the_waiting_and_a_second_one_the_submitting(tmp_path):
    gate = tmp_path / "gate"
    with script(tmp_path, SUBMITTER, gate, start_new_session=True) as process:
        group_id = process.stdout.readline().strip()
        batch = kinetic.attach_batch(group_id)
        wait_until(lambda: batch.status_counts().get("RUNNING") == 3, "three jobs run")
        process.send_signal(signal.SIGINT)
        err = ""
        while "KeyboardInterrupt" not in err:
            err += process.stderr.readline()
        assert re.search(
            rf"0 of 8 inputs of {group_id} have ended.*this process still submits the rest.*"
            rf'attach_batch\("{group_id}"\)\.cancel\(\)',
            err,
        )
        assert process.poll() is None, "it goes on submitting"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
    gate.touch()
    values = batch.results(timeout=PATIENCE_S, return_exceptions=True)
    assert values[:3] == [0, 1, 2]
    assert [type(e) for e in values[3:]] == [errors.SubmitError] * 5


def test_a_lost_host_costs_its_input_an_attempt(tmp_path):
    gate = tmp_path / "gate"
    batch = wait_for.run_async_map([(str(gate), n) for n in range(2)], retries=1, max_concurrent=2)
    job = wait_until(lambda: batch.jobs[1], "there is a second job")
    agents = wait_until(lambda: job.processes().get("agents"), "it runs")
    os.kill(agents[0], signal.SIGKILL)
    gate.touch()
    assert batch.results(timeout=PATIENCE_S) == [0, 1]
