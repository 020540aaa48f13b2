"""`kinetic.log` in jobs: metrics can be read while a job runs and afterwards, also those of hosts
that died and of all attempts."""

from __future__ import annotations

import json
import math
import os
import signal

import pytest
from gangs import wait_until
from on_logging_hosts import (
    FIRST_STEPS,
    fit_a_model,
    log_and_raise,
    log_from_everywhere,
    log_lost_arrays,
    log_now_and_then,
    log_until_killed,
    log_what_jax_computes,
    log_where_it_cannot_work,
    log_while_jax_waits,
    save_steps,
    train_elastically,
    train_in_two_attempts,
)

import kinetic
from kinetic._core import layout
from kinetic.cli.root import call
from kinetic.errors import UsageTypeError

LIMIT_S = 240


def steps_of(handle, host, **which):
    metrics = handle.metrics(host=host, **which)
    return list(metrics["loss"].steps) if "loss" in metrics else []


def wait_for_step(handle, host, step):
    """Wait until the metrics of a host contain the step."""
    wait_until(lambda: step in steps_of(handle, host), f"step {step} of host {host} is not there")


def test_what_a_killed_host_has_logged_is_there_and_steps_trained_again_show_once(place):
    run = kinetic.run("tpu-v6e-8", retries=1)
    handle = run(log_until_killed).run_async(str(place.folder))
    for host in (0, 1):
        wait_for_step(handle, host, FIRST_STEPS + 10)
    os.kill(place.worker(handle, 1), signal.SIGKILL)
    assert handle.result(timeout=LIMIT_S) == 2
    for host in (0, 1):
        first = handle.metrics(host=host, attempt=1)["loss"]
        assert first.steps[-1] >= FIRST_STEPS + 10
        assert list(first.steps) == list(range(len(first)))
        loss = handle.metrics(host=host)["loss"]
        assert list(loss.steps) == list(range(FIRST_STEPS))
        assert list(loss.values) == [100 * host + 1] * 20 + [100 * host + 2] * 20
        assert list(loss.attempts) == [1] * 20 + [2] * 20
        both = handle.metrics(host=host, repeats=True)["loss"]
        assert len(both) == len(first) + 20


def test_what_a_lost_machine_has_logged_is_there(home):
    """Agent and worker die together, as on a lost machine: rows logged before are not lost."""
    handle = kinetic.run("tpu-v6e-8", retries=1)(log_until_killed).run_async(str(home))
    wait_for_step(handle, 1, 30)
    os.kill(handle.processes()["agents"][1], signal.SIGKILL)
    assert handle.result(timeout=LIMIT_S) == 2
    assert steps_of(handle, 1, attempt=1)[30] == 30
    assert steps_of(handle, 1) == list(range(FIRST_STEPS))


def test_the_last_numbers_of_a_function_that_raises_are_kept(home):
    handle = kinetic.run("cpu")(log_and_raise).run_async()
    with pytest.raises(ArithmeticError):
        handle.result(timeout=LIMIT_S)
    loss = handle.metrics()["loss"]
    assert list(loss.steps) == [0, 1]
    assert math.isnan(loss.values[1])


def test_numbers_of_jax_are_fetched_from_one_device_and_from_all(home):
    handle = kinetic.run("tpu-v6e-8")(log_what_jax_computes).run_async()
    assert handle.result(timeout=LIMIT_S) == 0
    for host in (0, 1):
        metrics = handle.metrics(host=host)
        assert list(metrics["loss"].steps) == list(range(10))
        assert list(metrics["loss"].values) == [28.0 * step for step in range(10)]
        assert set(metrics["own"].values) == {1.5}
        assert set(metrics["shape"].values) == {1.0}


def test_a_call_does_not_wait_for_the_value(home, tmp_path):
    handle = kinetic.run("tpu-v6e-8")(log_while_jax_waits).run_async(str(tmp_path / "marker"))
    assert handle.result(timeout=LIMIT_S) is False
    loss = handle.metrics()["loss"]
    assert (list(loss.steps), list(loss.values)) == ([3], [8.0])


def test_arrays_that_are_lost_cost_themselves_and_a_line(home):
    handle = kinetic.run("cpu")(log_lost_arrays).run_async()
    handle.result(timeout=LIMIT_S)
    metrics = handle.metrics()
    assert list(metrics["rate"].steps) == list(range(100))
    # kinetic's thread may have read some arrays before the function deleted them.
    for name in ("donated", "deleted"):
        count = len(metrics[name]) if name in metrics else 0
        lines = handle.logs().count(f"a value of {name!r} is lost: its array was donated")
        assert lines == (count < 100)


def test_traced_values_are_refused(home):
    handle = kinetic.run("cpu")(log_where_it_cannot_work).run_async()
    with pytest.raises(UsageTypeError, match="Return the value from that function and log it"):
        handle.result(timeout=LIMIT_S)


def test_programs_forks_and_pools_log(home):
    handle = kinetic.run("cpu")(log_from_everywhere).run_async()
    handle.result(timeout=LIMIT_S)
    metrics = handle.metrics()
    assert {name: sorted(metrics[name].steps) for name in ("program", "fork", "pool")} == {
        "program": [1],
        "fork": [2],
        "pool": [*range(3, 9)],
    }


def test_an_elastic_job_goes_on_with_its_curve(home, tmp_path):
    run = kinetic.run("tpu-v6e-4", slices=(1, 2))
    handle = run(train_elastically).run_async(str(tmp_path))
    wait_for_step(handle, 1, 20)
    handle.kill_hosts(slice=1)
    slices = handle.result(timeout=LIMIT_S)
    loss = handle.metrics()["loss"]
    assert list(loss.steps) == list(range(36))
    assert list(loss.values) == [1.0] * 5 + [2.0] * 31
    assert handle.metrics()["slices"].values[-1] == slices
    repeats = handle.metrics(repeats=True)["loss"]
    assert len(repeats) > 36
    assert 20 in steps_of(handle, 1, attempt=1)


def test_a_checkpointer_alone_tells_the_time_of_steps(home, tmp_path):
    handle = kinetic.run("cpu")(save_steps).run_async(str(tmp_path / "checkpoints"))
    handle.result(timeout=LIMIT_S)
    metrics = handle.metrics()
    assert metrics["step_time_s"].steps[-1] == 29
    assert min(metrics["step_time_s"].values) >= 0.05
    assert list(metrics["steps_per_s"].values) == [
        1 / value for value in metrics["step_time_s"].values
    ]


def test_the_time_of_a_training_that_failed_once_is_divided(place, capsys):
    """A training restores step 20 after a failure at step 25: `jobs status` shows how the time was
    spent, with the lost steps, and the uses of both attempts sum to the time of the job."""
    run = kinetic.run("cpu:2", retries=1)
    handle = run(train_in_two_attempts).run_async(str(place.folder / "checkpoints"))
    assert handle.result(timeout=LIMIT_S) == 21
    assert call(["jobs", "status", "--json", handle.job_id]) == 0
    job = json.loads(capsys.readouterr().out)
    uses = job["goodput"]["spent_s"]
    first, second = (attempt["spent_s"] for attempt in job["goodput"]["attempts"])
    whole_s = job["ended_at"] - job["created_at"]
    assert sum(uses.values()) == pytest.approx(whole_s, abs=0.1)
    assert all(first[use] > 0 for use in ("steps", "compiling", "saving", "lost"))
    assert all(second[use] > 0 for use in ("steps", "compiling", "restoring"))
    assert first["lost"] > 5 * 0.05
    assert (first["restoring"], second["lost"]) == (0, 0)
    assert second["steps"] >= 18 * 0.05
    assert set(handle.metrics()) & {"loss", "step_time_s"} == {"loss", "step_time_s"}
    assert not [name for name in handle.metrics() if "span" in name]
    assert call(["jobs", "status", handle.job_id]) == 0
    assert " % steps, " in capsys.readouterr().out


@pytest.mark.long
def test_keras_logs_batches_and_epochs(home):
    handle = kinetic.run("cpu")(fit_a_model).run_async()
    history, metrics = handle.result(timeout=LIMIT_S), handle.metrics()
    assert {"loss", "mae", "val_loss", "val_mae"} <= metrics.keys()
    assert list(metrics["loss"].steps) == [*range(8), 11]
    assert list(metrics["val_loss"].steps) == [3, 7, 11]
    assert list(metrics["mae"].steps) == [*range(8), 11]
    ends = {"loss": (3, 7, 8), "mae": (3, 7, 8), "val_loss": (0, 1, 2), "val_mae": (0, 1, 2)}
    for name, places in ends.items():
        assert [metrics[name].values[place] for place in places] == history[name]


def test_a_job_that_logs_nothing_leaves_nothing(home):
    handle = kinetic.run("cpu")(lambda: 1).run_async()
    handle.result(timeout=LIMIT_S)
    assert not (home / layout.HostKeys(handle.job_id, 1, 0).metrics).exists()
    assert len(handle.metrics()) == 0


def test_figures_of_hosts_come_by_themselves(home):
    handle = kinetic.run("tpu-v6e-8", retries=1)(log_until_killed).run_async(str(home))

    def has_figures(host):
        metrics = handle.metrics(host=host)
        return {"host/memory_bytes", "host/cpu_cores"} <= metrics.keys()

    for host in (0, 1):
        wait_until(lambda host=host: has_figures(host), f"host {host} tells nothing of itself")
        assert handle.metrics(host=host)["host/memory_bytes"].values[0] > 1 << 20
    handle.cancel()


def test_commands_show_what_was_logged(home, tmp_path, capsys):
    handle = kinetic.run("tpu-v6e-8", retries=1)(log_until_killed).run_async(str(home))
    for host in (0, 1):
        wait_for_step(handle, host, 20)  # Attempt 2 begins at step 20.
    handle.kill_hosts(host=1)
    assert call(["jobs", "metrics", "--follow", "--json", "-n", "loss", handle.job_id]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows[-20:]] == list(range(20, FIRST_STEPS))
    assert {row["attempt"] for row in rows} == {1, 2}
    handle.result(timeout=LIMIT_S)
    assert call(["jobs", "metrics", handle.job_id, "--name", "loss", "--all-hosts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["METRIC", "HOST", "VALUES", "STEP", "LAST", "LEAST", "GREATEST"]
    assert lines[1].split() == ["loss", "0", "40", "39", "2", "1", "2"]
    assert lines[2].split() == ["loss", "1", "40", "39", "102", "101", "102"]


def test_what_is_logged_is_progress(home):
    run = kinetic.run(accelerator="cpu", hang_timeout=4)
    assert run(log_now_and_then)(10) == "trained"
