"""A store that is no folder, in another process, in which each call takes its time: what a gang of
four leaves there, and what is left of one that is killed.

In: functions, run with backend="programs" and KINETIC_STORE. Out: what callers see.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from gangs import PATIENCE_S, kill, wait_until

import kinetic
from kinetic import errors
from kinetic._core import layout
from kinetic._store.memory import MemoryStore
from kinetic._store.served import ServedStore, serve_store

CALL_S = 0.03


@pytest.fixture
def store(home, monkeypatch) -> ServedStore:
    home.parent.mkdir(parents=True, exist_ok=True)
    with serve_store(MemoryStore(delay_s=CALL_S), home.parent / "store") as served:
        monkeypatch.setenv("KINETIC_STORE", served.uri)
        yield served


def run(accelerator, **options):
    return kinetic.run(accelerator=accelerator, backend="programs", **options)


def add():
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    total = multihost_utils.process_allgather(np.array([jax.process_index()])).sum()
    print(f"host {jax.process_index()} added", flush=True)
    return jax.process_count(), jax.device_count(), int(total)


def test_four_hosts_work_together(store, capfd):
    handle = run("tpu-v6e-16")(add).run_async()
    assert handle.result(timeout=PATIENCE_S, stream_logs=True) == (4, 16, 6)
    assert "host 0 added" in capfd.readouterr().out
    for host in range(4):
        assert f"host {host} added" in handle.logs(host=host)
    assert handle.tail(1) == "host 0 added\n"
    told = subprocess.run(
        [sys.executable, "-m", "kinetic", "jobs", "list"], capture_output=True, text=True
    )
    assert handle.job_id in told.stdout, told
    assert "SUCCEEDED" in told.stdout
    handle.cleanup()
    assert list(store.list("refs")) == list(store.list("listed")) == list(store.list("jobs")) == []


def speak():
    for n in range(10**9):
        print(n, flush=True)
        time.sleep(0.01)


def test_what_a_killed_gang_had_printed_is_there(store):
    handle = run("cpu")(speak).run_async()
    prefix = layout.log(handle.job_id, 1, 0) + ".d"
    wait_until(lambda: len(list(store.list(prefix))) > 3, "no output is sent")
    sent = handle.logs().splitlines()
    kill(handle.processes()["agents"][0])
    with pytest.raises(errors.KineticError):
        handle.result(timeout=PATIENCE_S, stream_logs=False)
    kept = handle.logs().splitlines()
    assert kept[: len(sent)] == sent
    numbers = [line for line in kept if line.isdecimal()]
    assert numbers == [str(n) for n in range(len(numbers))]
