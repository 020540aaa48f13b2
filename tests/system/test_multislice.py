"""Several slices of several hosts: one world, in which devices and hosts know their slice.

In: jobs with slices=. Out: the order of devices, meshes, collectives, what the command line shows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import kinetic

KINETIC = [sys.executable, "-c", "from kinetic.cli.main import main; main()"]
pytestmark = pytest.mark.timeout(600)


def world():
    """Which slice each host and each device is on, and a sum over a mesh of both."""
    import jax
    import numpy as np
    from jax.experimental import mesh_utils, multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    here = kinetic.slice_index(), kinetic.num_slices(), jax.process_index()
    devices = [(d.process_index, d.slice_index) for d in jax.devices()]
    mesh = kinetic.make_mesh(dcn={"data": 2}, ici={"fsdp": 4, "tensor": -1})
    hybrid = mesh_utils.create_hybrid_device_mesh((1, 4, 2), (2, 1, 1))
    spread = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "tensor")))
    numbers = jax.make_array_from_callback((16,), spread, lambda part: np.arange(16.0)[part])
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers)
    everywhere = multihost_utils.process_allgather(np.array(here)).reshape(-1, 3).tolist()
    return everywhere, devices, bool((hybrid == mesh.devices).all()), float(total)


SLICES_OF_DEVICES = [(host, host // 2) for host in range(4) for _ in range(4)]


def test_hosts_and_devices_know_their_slice():
    train = kinetic.run("tpu-v6e-8", slices=2)(world)
    here, devices, same, total = train()
    assert here == [[0, 2, 0], [0, 2, 1], [1, 2, 2], [1, 2, 3]]
    assert devices == SLICES_OF_DEVICES
    assert (same, total) == (True, 120.0)


def test_one_process_has_the_devices_of_both_slices():
    train = kinetic.run("tpu-v6e-8", slices=2, controller="single")(world)
    here, devices, same, total = train()
    assert here == [[0, 2, 0]]
    assert devices == [(0, index // 8) for index in range(16)]
    assert (same, total) == (True, 120.0)


def axes():
    """Slices of the devices along the axes of meshes that name things in other ways."""
    import jax
    import numpy as np

    both = kinetic.make_mesh({"data": 2}, {"data": 4, "tensor": -1})
    told = [sorted({d.slice_index for d in row}) for row in both.devices]
    some = kinetic.make_mesh({"replica": -1}, {"x": 2}, devices=jax.devices()[6:10])
    return (
        dict(both.shape),
        told,
        dict(kinetic.make_mesh().shape),
        np.vectorize(lambda d: d.id)(some.devices).tolist(),
    )


def test_axes_may_be_in_both_or_left_out():
    train = kinetic.run("tpu-v6e-8", slices=2, controller="single")(axes)
    shape, told, usual, some = train()
    assert shape == {"data": 8, "tensor": 2}
    assert told == [[0]] * 4 + [[1]] * 4, "an axis in both goes slice by slice"
    assert usual == {"data": 2, "fsdp": 8}
    assert some == [[6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("accelerator", "told", "whole"), [("cpu:2", [0], 8), ("gpu-h100x2", [0, 1, 2, 3], 0)]
)
def test_meshes_of_jax_take_machines_of_processors_and_refuse_slices_of_chips(
    accelerator, told, whole
):
    @kinetic.run(accelerator, slices=4)
    def meshes():
        import jax

        try:
            size = jax.make_mesh((8,), ("data",)).size
        except ValueError:  # that there are several slices
            size = 0
        ours = kinetic.make_mesh({"data": 4}, {"tensor": 2})
        rows = [{device.process_index for device in row} for row in ours.devices]
        return sorted({device.slice_index for device in jax.devices()}), size, rows

    assert meshes() == (told, whole, [{0}, {1}, {2}, {3}])


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
    shown = subprocess.run(
        [*KINETIC, "jobs", "status", job["job_id"]], capture_output=True, text=True, check=True
    ).stdout
    assert "2 slices of tpu-v6e-8 (4 hosts)" in shown
    assert re.findall(r"(?m)^(\d) +(\d) +returned", shown) == [
        ("0", "0"),
        ("0", "1"),
        ("1", "2"),
        ("1", "3"),
    ]
