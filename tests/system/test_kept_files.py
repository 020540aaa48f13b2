"""Files that functions write to their work folder are stored with the job. Every kind of call names
them when it ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import time
from pathlib import Path

import pytest

import kinetic
from kinetic._core import layout
from kinetic.cli.root import call
from kinetic.errors import UsageError


@kinetic.run(accelerator="cpu")
def train(epochs):
    with open("model.pkl", "wb") as file:
        pickle.dump({"epochs": epochs}, file)
    return epochs


@pytest.mark.parametrize("how", ["call", "async", "map"])
def test_a_file_saved_beside_the_function_is_kept_and_named_in_the_last_line(
    how, home, tmp_path, capfd
):
    if how == "call":
        assert train(3) == 3
    elif how == "async":
        assert train.run_async(3).result() == 3
    else:
        batch = train.run_async_map([3, 4])
        assert batch.results(progress=False) == [3, 4]
    last = capfd.readouterr().err.splitlines()[-1]
    name = batch.group_id if how == "map" else kinetic.list_jobs()[0].job_id
    notice = (
        "2 files of 2 work folders; in the first" if how == "map" else "1 file of the work folder"
    )
    assert last.startswith(f"kinetic: kept {notice}: model.pkl (")
    assert last.endswith(f"Fetch with `kinetic jobs outputs {name} --to DIR`.")
    assert call(["jobs", "outputs", name, "--to", str(tmp_path / "got")]) == 0
    names = sorted(str(p.relative_to(tmp_path / "got")) for p in (tmp_path / "got").rglob("*.pkl"))
    assert names == (["0/model.pkl", "1/model.pkl"] if how == "map" else ["model.pkl"])
    assert pickle.loads((tmp_path / "got" / names[0]).read_bytes()) == {"epochs": 3}


def leave(marker, fails):
    """Write a file on every host. After all have written, raise on host 1 if `fails`."""
    host, hosts = os.environ["KINETIC_HOST_INDEX"], int(os.environ["KINETIC_HOSTS"])
    Path("log").write_text(f"host {host}")
    Path(f"{marker}-{host}").touch()
    while not all(Path(f"{marker}-{each}").exists() for each in range(hosts)):
        time.sleep(0.01)
    if fails and host == "1":
        raise ValueError("no")


@pytest.mark.shares_files
@pytest.mark.parametrize("fails", [False, True])
def test_each_host_keeps_its_files_also_where_one_fails(place, fails, capfd):
    job = kinetic.run("tpu-v6e-8", joins_jax=False)(leave).run_async(str(place.marker()), fails)
    with pytest.raises(ValueError, match="no") if fails else contextlib.nullcontext():
        job.result(timeout=120)
    store = job._store
    for host in (0, 1):
        prefix = layout.HostKeys(job.job_id, 1, host).files
        contents = {key.rpartition("/")[2]: store.get(key) for key in store.list(prefix)}
        assert contents == {"log": f"host {host}".encode()}
    capfd.readouterr()
    assert call(["jobs", "outputs", "--json", job.job_id]) == 0
    assert set(json.loads(capfd.readouterr().out)) == {"log", "host-1/log"}


def leave_at_exit():
    log = open("log", "w")  # Python closes it at exit.
    log.write("at last")
    atexit.register(lambda: Path("summary").write_text("at exit"))


def test_exit_handlers_are_over_when_a_call_returns(home):
    job = kinetic.run("cpu")(leave_at_exit).run_async()
    job.result()
    prefix = layout.HostKeys(job.job_id, 1, 0).files
    contents = {key.rpartition("/")[2]: job._store.get(key) for key in job._store.list(prefix)}
    assert contents == {"log": b"at last", "summary": b"at exit"}


def test_a_file_that_only_an_exit_handler_writes_is_kept(home):
    @kinetic.run("cpu")
    def end():
        atexit.register(lambda: Path("profile").write_text("at exit"))

    job = end.run_async()
    job.result()
    key = f"{layout.HostKeys(job.job_id, 1, 0).files}/profile"
    assert job._store.get(key) == b"at exit"


@kinetic.run(accelerator="cpu")
def checkpoint():
    kinetic.Checkpointer("checkpoints")


def test_a_checkpointer_in_the_work_folder_is_refused(home):
    """The work folder is new for each job, so a second training would silently begin at step 0."""
    with pytest.raises(UsageError, match=r"'checkpoints' is in the work folder"):
        checkpoint()
