"""The MEGASCALE_ variables with which libtpu connects the slices of one attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from manifest_cases import planned

from kinetic._core.gang.messages import HostAssignment
from kinetic._host.agent import start_message
from kinetic._host.identity import Identity

INJECTED = {
    "MEGASCALE_COORDINATOR_ADDRESS": "kinetic-head-0-0",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_PORT": "8080",
    "TPU_WORKER_ID": "1",
}
HOST = Identity(
    store_uri="memory://",
    job_id="job-00c0ffee",
    host=0,
    hosts=6,
    target="",
    token="t",
    address="10.0.0.9",
    scratch="scratch",
    role="host",
    is_program=True,
    is_pod=True,
    base_env=INJECTED,
    assignment=HostAssignment(),
    assigned_index=5,
    stays=True,
    start=7,
)


def slice_variables(who, accelerator="tpu-v6e-8", slices=(1, 3)):
    plan = planned(accelerator, slices=slices)
    names = {"root": Path("host"), "output_dir": "", "tree": Path("tree"), "sys_path": ()}
    space = SimpleNamespace(**names, editable=())
    world = start_message.World("10.0.0.7:4321", who.hosts, who.host, 0, "tpu", False)
    env = start_message._environ(who, plan, space, world, debug=False)
    return {name: value for name, value in env.items() if name in INJECTED}


def test_an_attempt_on_fewer_slices_names_those_that_take_part():
    assert slice_variables(HOST.take_place(HostAssignment(2, 3, (0, 2), hosts=4))) == INJECTED | {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.7",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }


def test_one_slice_waits_for_no_others():
    env = slice_variables(HOST.take_place(HostAssignment(2, 1, (2,), hosts=2)))
    assert env == {name: INJECTED[name] for name in ("MEGASCALE_PORT", "TPU_WORKER_ID")}


def test_jobs_that_are_not_elastic_have_what_the_cluster_says():
    assert slice_variables(replace(HOST, role="", assignment=None), slices=3) == INJECTED


def test_all_slices_of_a_job_on_ray_are_told_of_by_its_driver():
    place = HostAssignment(1, 1, (0, 1, 2), hosts=6)
    host = replace(HOST, base_env={"TPU_WORKER_ID": "1"}).take_place(place)
    env = slice_variables(host, slices=3)
    assert env == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.7",
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "0",
        "TPU_WORKER_ID": "1",
    }
