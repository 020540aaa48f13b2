"""Jobs in which one process controls the virtual devices of all hosts, as Pathways does with real
ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_controllers import fail_once, has_slices, slices, train_a_line, world

import kinetic
from kinetic import errors
from kinetic._backends.local import simulation

ROOT = Path(kinetic.__file__).parent.parent
KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
PATIENCE_S = 200


def test_one_process_has_the_devices_of_all_hosts():
    handle = kinetic.run(accelerator="tpu-v6e-16", controller="single")(world).run_async()
    assert handle.result() == (1, 16, 16)
    assert handle.hosts == 1
    assert kinetic.attach(handle.job_id).ref.has_single_controller


def test_one_process_has_the_devices_of_all_slices():
    remote = kinetic.run(accelerator="tpu-v6e-8", slices=2, controller="single")(world)
    assert remote() == (1, 16, 16)


@pytest.mark.parametrize("controller", ["single", "multi"])
def test_devices_know_their_slice(controller):
    remote = kinetic.run(accelerator="tpu-v6e-4", slices=2, controller=controller)(slices)
    assert remote() == [[0] * 4, [1] * 4]


def test_devices_of_one_slice_are_as_jax_makes_them():
    remote = kinetic.run(accelerator="tpu-v6e-8", controller="single")(has_slices)
    assert remote() is False


def test_the_same_function_computes_the_same_with_one_process_for_each_host():
    remote = kinetic.run(accelerator="tpu-v6e-8", controller="single")(train_a_line)
    losses = remote(5)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(remote.with_options(controller="multi")(5))


def test_a_controller_that_is_killed_is_started_again(tmp_path):
    remote = kinetic.run(accelerator="tpu-v6e-8", controller="single", retries=1)(fail_once)
    assert remote(str(tmp_path / "m")) == (1, 8, 8)
    (tmp_path / "m").unlink()
    with pytest.raises(errors.HostLost, match="SIGKILL"):
        remote.with_options(retries=0)(str(tmp_path / "m"))


@pytest.mark.long
def test_programs_have_all_devices_too(tmp_path):
    (tmp_path / "train.py").write_text("import jax\nprint(jax.process_count(), len(jax.devices()))")
    options = ["run", "-a", "tpu-v6e-16", "--controller", "single"]
    for program in (["train.py"], ["--", sys.executable, "train.py"]):
        done = kn(tmp_path, *options, *program)
        assert done.stdout == "1 16\n", done.stderr
    report = kn(tmp_path, *options, "--dry-run", "-o", "json", "train.py")
    (document,) = json.loads(report.stdout)["items"]
    assert (document["hosts"], document["devices_per_host"]) == (1, 16)
    assert document["memory_estimate_bytes"] > simulation.SHARED_BYTES + simulation.JAX_HOST_BYTES


def kn(folder, *argv):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*KINETIC, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
