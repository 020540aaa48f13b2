"""The whole product with its records in a bucket: jobs on four hosts, batches, data, and every
command that reads them. Doubles stand for the bucket and for the cluster."""

from __future__ import annotations

import contextlib
import io
import time

import pytest
from doubles.gcs import Double, serving
from gangs import PATIENCE_S, kill, wait_until
from on_logging_hosts import FIRST_STEPS, log_until_killed
from places import find_titled

import kinetic
from kinetic import errors
from kinetic._core import layout
from kinetic.cli.root import call

pytest.importorskip("cryptography")
pytest.importorskip("google.cloud.storage")
pytestmark = pytest.mark.double

CALL_S = 0.03
"""Seconds that each call of the bucket takes, as with a real bucket."""


@pytest.fixture
def bucket(on_cluster, monkeypatch) -> Double:
    with serving("bucket") as double:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", double.uri)
        monkeypatch.setenv("KINETIC_STORE", "gs://bucket/jobs")
        monkeypatch.delenv("KINETIC_POD_STORE")
        on_cluster.set_image({}, {"STORAGE_EMULATOR_HOST": double.uri})
        yield double


def command(*words) -> str:
    """Run a `kinetic` command in this process, because only this process knows the double's
    hosts."""
    printed = io.BytesIO()
    out = io.TextIOWrapper(printed, encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = call(words)
    assert code == 0, printed.getvalue().decode()
    return printed.getvalue().decode()


def train(steps):
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    total = multihost_utils.process_allgather(np.array([jax.process_index()])).sum()
    for step in range(steps):
        print(f"host {jax.process_index()} step {step}", flush=True)
    return jax.process_count(), jax.device_count(), int(total)


@pytest.mark.long
def test_a_job_on_four_hosts(bucket, capfd):
    bucket.before = lambda *_: time.sleep(CALL_S)
    handle = kinetic.run("tpu-v6e-16")(train).run_async(3)
    assert handle.result(timeout=PATIENCE_S, stream_logs=True) == (4, 16, 6)
    assert handle.tail(1) == "host 0 step 2\n"
    lines = [f"host 0 step {step}" for step in range(3)]
    assert [line for line in capfd.readouterr().out.splitlines() if "step" in line] == lines
    for host in range(4):
        assert f"host {host} step 2" in handle.logs(host=host)
    assert "SUCCEEDED" in command("jobs", "list")
    assert "SUCCEEDED" in command("jobs", "status", handle.job_id)
    assert "host 3 step 2" in command("jobs", "logs", handle.job_id, "--host", "3")
    assert command("jobs", "result", handle.job_id).strip() == "(4, 16, 6)"
    command("jobs", "cleanup", handle.job_id)
    assert handle.job_id not in command("jobs", "list", "--all")
    assert not [n for n in bucket.buckets.names("bucket") if handle.job_id in n]


def speak():
    for n in range(10**9):
        print(n, flush=True)
        time.sleep(0.01)


def test_what_a_killed_host_had_logged_is_there(bucket, tmp_path):
    bucket.before = lambda *_: time.sleep(CALL_S)
    handle = kinetic.run("tpu-v6e-8", retries=1)(log_until_killed).run_async(str(tmp_path))
    wait_until(lambda: len(handle.metrics(host=1).get("loss", ())) > 100, "nothing is sent")
    sent = handle.metrics(host=1)["loss"]
    kill(find_titled("worker", handle, 1))
    assert handle.result(timeout=PATIENCE_S, stream_logs=False) == 2
    first = handle.metrics(host=1, attempt=1)["loss"]
    assert list(first.steps) == list(range(len(first)))
    assert len(first) >= len(sent)
    for host in (0, 1):
        loss = handle.metrics(host=host)["loss"]
        assert list(loss.steps) == list(range(FIRST_STEPS))
        assert list(loss.attempts) == [1] * 20 + [2] * 20
    prefix = f"{layout.HostKeys(handle.job_id, 1, 0).metrics}.d/"
    assert any(prefix in name for name in bucket.buckets.names("bucket"))


def test_what_a_killed_host_had_printed_is_there(bucket):
    bucket.before = lambda *_: time.sleep(CALL_S)
    handle = kinetic.run("cpu")(speak).run_async()
    prefix = f"jobs/{layout.HostKeys(handle.job_id, 1, 0).log}.d/"
    wait_until(
        lambda: sum(name.startswith(prefix) for name in bucket.buckets.names("bucket")) > 3,
        "no output is sent",
    )
    sent = handle.logs().splitlines()
    kill(find_titled("agent", handle, 0))
    with pytest.raises(errors.KineticError):
        handle.result(timeout=PATIENCE_S, stream_logs=False)
    lines = handle.logs().splitlines()
    assert lines[: len(sent)] == sent
    numbers = [line for line in lines if line.isdecimal()]
    assert numbers == [str(n) for n in range(len(numbers))]


def test_a_second_run_sends_nothing(bucket):
    assert kinetic.run("cpu")(train)(1) == (1, 1, 0)
    before = set(bucket.buckets.names("bucket"))
    bucket.forget_requests()
    assert kinetic.run("cpu")(train)(1) == (1, 1, 0)
    new = set(bucket.buckets.names("bucket")) - before
    records = ("jobs/jobs/", "jobs/refs/", "jobs/listed/")
    assert [name for name in new if not name.startswith(records)] == []


def fail():
    raise ZeroDivisionError("on purpose")


def test_an_exception_has_its_own_type(bucket):
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        kinetic.run("tpu-v6e-16")(fail)()


def square(x):
    return x * x


@pytest.mark.long
def test_a_batch_of_ten(bucket):
    results = kinetic.run("cpu")(square).run_async_map(range(10), max_concurrent=4).results()
    assert list(results) == [n * n for n in range(10)]
    wait_until(lambda: prune_all(bucket), "the records of jobs that ended a second ago stay")


def prune_all(bucket) -> bool:
    command("jobs", "prune", "--older-than", "1s", "--yes")
    records = ("jobs/jobs/", "jobs/refs/", "jobs/listed/")
    return not [name for name in bucket.buckets.names("bucket") if name.startswith(records)]


def count(folder):
    import os

    return sorted(os.listdir(folder)), open(f"{folder}/a").read()


def test_data_goes_by_the_bucket(bucket, tmp_path):
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / "data" / name).write_text(name)
    counts = kinetic.run("tpu-v6e-16")(count)(kinetic.Data(str(tmp_path / "data")))
    assert counts == (["a", "b", "c"], "a")


def test_data_of_a_bucket(bucket):
    for name in ("a", "b/c"):
        bucket.buckets.insert("bucket", f"images/{name}", name.encode(), {}, {})
    with pytest.warns(UserWarning, match="single object"):
        single = kinetic.Data("gs://bucket/images/b/c")
    call = kinetic.run("tpu-v6e-16", output_dir="gs://bucket/out")(read_folder_and_file)
    assert call(kinetic.Data("gs://bucket/images/"), single) == (
        ["a", "b"],
        "b/c",
        "gs://bucket/out",
    )
    with pytest.raises(errors.UsageError, match="nothing below gs://bucket/none/"):
        call(kinetic.Data("gs://bucket/none/"), single)


def read_folder_and_file(folder, file):
    import os
    from pathlib import Path

    return sorted(os.listdir(folder)), Path(file).read_text(), os.environ["KINETIC_OUTPUT_DIR"]


def test_a_bucket_that_fails_for_a_while_ends_no_job(bucket):
    bucket.fail(status=503, times=4)
    bucket.fail("chunk", "insert", "media", lost=True)
    assert kinetic.run("cpu")(square)(3) == 9


def test_a_bucket_that_is_not_there_is_said_before_anything_is_sent(bucket, monkeypatch):
    monkeypatch.setenv("KINETIC_STORE", "gs://none")
    with pytest.raises(errors.StoreError, match="no bucket 'none'"):
        kinetic.run("cpu")(square)(3)
