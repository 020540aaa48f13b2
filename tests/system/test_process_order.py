"""JAX numbers the hosts of a slice by their position in the hardware: JAX's process 0 need not run
on kinetic's host 0."""

from __future__ import annotations

import pytest
from on_saving_hosts import train
from test_checkpointer import alone

import kinetic

ORDER = "KINETIC_PROCESS_ORDER"


def first():
    """On JAX's process 0, return its host, and the hosts in JAX's order; on others None."""
    import os

    import jax
    from jax.experimental import multihost_utils

    host, index = int(os.environ["KINETIC_HOST_INDEX"]), jax.process_index()
    print(f"process {index}", flush=True)
    hosts = multihost_utils.process_allgather(jax.numpy.array([host])).ravel().tolist()
    return (host, hosts) if index == 0 else None


def count_hosts():
    """Return the index of this host, without starting JAX."""
    import os

    return int(os.environ["KINETIC_HOST_INDEX"])


@pytest.mark.parametrize("all_hosts", [False, True])
def test_a_call_returns_what_process_0_returned(all_hosts):
    gang = kinetic.run(accelerator="cpu:1", slices=3, all_hosts=all_hosts, env={ORDER: "2,0,1"})
    job = gang(first).run_async()
    assert job.result() == (1, [1, 2, 0])
    assert job.logs(host=1) == "process 0\n"
    assert job.logs() == (
        "kinetic: jax.process_index() is 0 on host 1, and 2 on host 0. The call returns the value "
        f"of host 1; its output: kinetic jobs logs {job.job_id} --host 1\nprocess 2\n"
    )
    if all_hosts:
        assert job.results() == [None, (1, [1, 2, 0]), None]


def test_without_jax_a_call_returns_what_host_0_returned():
    gang = kinetic.run(accelerator="cpu:1", slices=2, env={ORDER: "1,0"})
    assert gang(count_hosts)() == 0


@pytest.mark.parametrize("local_every", [1, None])
def test_a_training_goes_on_in_another_order(tmp_path, local_every):
    for order, until in (("0,1", 6), ("1,0", 11)):
        env = {ORDER: order, "KINETIC_LOCAL_DIR": str(tmp_path / "memory")}
        gang = kinetic.run(accelerator="tpu-v6e-8", all_hosts=True, env=env)(train)
        job = gang.run_async(until, folder=str(tmp_path / "folder"), local_every=local_every)
        values = job.result(), *job.results()
    assert " is restored from " in job.logs(), "host 0 is process 1 then"
    for [(_, step, (saved, tier, _))], total, n, _ in values:
        assert (total, n) == alone(11)
        assert (step, saved, tier) == ((6, 5, "local") if local_every else (5, 4, "persistent"))
