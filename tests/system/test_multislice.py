"""Several slices of several hosts form one JAX world; devices and hosts know their slice."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from on_hosts import see_axes, see_slices

import kinetic

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = pytest.mark.timeout(600)


SLICES_OF_DEVICES = [(host, host // 2) for host in range(4) for _ in range(4)]


def test_hosts_and_devices_know_their_slice():
    train = kinetic.run("tpu-v6e-8", slices=2)(see_slices)
    positions, devices, same, total = train()
    assert positions == [[0, 2, 0], [0, 2, 1], [1, 2, 2], [1, 2, 3]]
    assert devices == SLICES_OF_DEVICES
    assert (same, total) == (True, 120.0)


def test_one_process_has_the_devices_of_both_slices():
    train = kinetic.run("tpu-v6e-8", slices=2, controller="single")(see_slices)
    positions, devices, same, total = train()
    assert positions == [[0, 2, 0]]
    assert devices == [(0, index // 8) for index in range(16)]
    assert (same, total) == (True, 120.0)


def test_axes_may_be_in_both_or_left_out():
    train = kinetic.run("tpu-v6e-8", slices=2, controller="single")(see_axes)
    shape, slices, usual, some = train()
    assert shape == {"data": 8, "tensor": 2}
    assert slices == [[0]] * 4 + [[1]] * 4, "an axis in both goes slice by slice"
    assert usual == {"data": 2, "fsdp": 8}
    assert some == [[6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("accelerator", "expected", "whole"), [("cpu:2", [0], 8), ("gpu-h100x2", [0, 1, 2, 3], 0)]
)
def test_meshes_of_jax_take_machines_of_processors_and_refuse_slices_of_chips(
    accelerator, expected, whole
):
    @kinetic.run(accelerator, slices=4)
    def meshes():
        import jax

        try:
            size = jax.make_mesh((8,), ("data",)).size
        except ValueError:  # JAX makes no such mesh over slices.
            size = 0
        ours = kinetic.make_mesh({"data": 4}, {"tensor": 2})
        rows = [{device.process_index for device in row} for row in ours.devices]
        return sorted({device.slice_index for device in jax.devices()}), size, rows

    assert meshes() == (expected, whole, [{0}, {1}, {2}, {3}])


def test_programs_know_their_slice_and_the_command_line_shows_it(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import jax, os\n"
        "told = sorted({d.slice_index for d in jax.devices()})\n"
        "print('slices', told, os.environ['KINETIC_SLICE_INDEX'], os.environ['KINETIC_NUM_SLICES'])"
    )
    command = [*KINETIC, "run", "-a", "tpu-v6e-8", "--slices", "2", "--name", "told", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=500)
    assert "slices [0, 1] 0 2\n" in done.stdout, done.stderr
    listed = subprocess.run([*KINETIC, "jobs", "list", "--json"], capture_output=True, check=True)
    (job,) = json.loads(listed.stdout)
    status = subprocess.run(
        [*KINETIC, "jobs", "status", job["job_id"]], capture_output=True, text=True, check=True
    ).stdout
    assert "2 slices of tpu-v6e-8 (4 hosts)" in status
    assert re.findall(r"(?m)^(\d) +(\d) +returned", status) == [
        ("0", "0"),
        ("0", "1"),
        ("1", "2"),
        ("1", "3"),
    ]
