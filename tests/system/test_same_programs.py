"""Hosts that run different programs are named with their lines, before anybody waits for a timeout;
hosts that run the same ones are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import on_differing_hosts
import pytest
from gangs import wait_until
from on_differing_hosts import (
    agree,
    differ,
    return_own_loss,
    train_from_own_seed,
    train_in_thread,
    train_on_own_rows,
    train_on_steps,
)

import kinetic

pytestmark = [pytest.mark.timeout(600), pytest.mark.settles_within(30)]
SLICES = {2: "tpu-v6e-8", 4: "tpu-v6e-16", 16: "tpu-v6e-64"}
FAULTS = {
    "shape": "mean at on_differing_hosts.py:{run} takes f32[{2n},{n}] there, f32[{n},{n}] here",
    "dtype": "takes bf16[{n},{n}] there, f32[{n},{n}] here",
    "branch": "train_step at on_differing_hosts.py:{run} has multiply at on_differing_hosts.py:",
    "dict_order": "has cosine at on_differing_hosts.py:",
    "static_seed": "train_step at on_differing_hosts.py:{run} has constant dense<17>",
    "other_module": "has multiply at layers_of_model.py:2 there, subtract at layers_of_model.py:2",
    "last_batch": "called mean at on_differing_hosts.py:",
    "skipped_in_except": "mean at on_differing_hosts.py:{run} there, check at",
    "sharding": "takes f32[{n},{n}] split P(None, 'x') there, P('x',) here",
    "flags": "is compiled with xla_cpu_enable_fast_math=True there, nothing here",
    "donation": "takes f32[{n},{n}] (donated) there, f32[{n},{n}] here",
    "host_data": "has constant dense<1> : tensor<i32>",
    "stale_file": "<lambda> at on_differing_hosts.py:{run} has ",
    "other_order": "evaluate at on_differing_hosts.py:{run} there, mean at on_differing_hosts.py:",
    "warm_up": "warm at on_differing_hosts.py:",
}
AGREEMENTS = [
    *("each_on_its_own_devices", "leader_rounds_the_loss", "leader_reads_the_cost"),
    *("own_rows", "own_numbers", "threads_in_any_order", "dumps_apart"),
]


def find_difference(job) -> list[dict]:
    return [event for event in job.events() if event["kind"] == "programs"]


@pytest.mark.parametrize(
    ("fault", "hosts"),
    [*((fault, hosts) for hosts in (2, 4) for fault in FAULTS), ("shape", 16)],
)
def test_hosts_that_differ_are_named_with_the_line(home, fault, hosts):
    """The last host has a fault: of two hosts both are named, of more that one alone."""
    job = kinetic.run(SLICES[hosts])(differ).run_async(fault)
    (event,) = wait_until(lambda: find_difference(job), f"{fault} is not named")
    job.cancel()
    everybody, n = hosts == 2, 4 * hosts
    text = event["detail"]
    assert event["hosts"] == ([0, 1] if everybody else [hosts - 1]), text
    line = differ.__globals__["run"].__code__.co_firstlineno + 4
    wanted = FAULTS[fault].format(**{"n": n, "2n": 2 * n, "run": line})
    if everybody:
        wanted = wanted.replace(" there", " on host 1").replace(" here", " on host 0")
    assert wanted in text


@pytest.mark.parametrize("program", AGREEMENTS)
def test_hosts_that_only_seem_to_differ_are_left_alone(home, program):
    job = kinetic.run(SLICES[2])(agree).run_async(program)
    assert job.result(timeout=300) == "done"
    assert not find_difference(job)


def test_a_host_without_devices_of_a_program_waits_for_nobody(home):
    job = kinetic.run("cpu:1", slices=3)(agree).run_async("host_without_devices")
    assert job.result(timeout=300) == "done"
    assert not find_difference(job)


def test_programs_are_not_compared_where_that_is_turned_off(home):
    """The option overrides the setting, which is on by default."""
    job = kinetic.run(SLICES[2], compare_programs=False)(differ).run_async("branch")
    job.result(timeout=300)
    assert not find_difference(job)


@pytest.mark.parametrize("are_same", [True, False])
@pytest.mark.parametrize(
    ("train", "differs"),
    [
        (train_on_own_rows, "give {} different values for the argument batch['ids'] (i32[4,8])"),
        (train_in_thread, "give {} different values for the argument rows (i32[8])"),
        (train_from_own_seed, "give {} different values for the argument weights (f32[8,8])"),
        (return_own_loss, "get different values for result['loss'] (f32[]) of {}"),
    ],
)
def test_hosts_with_different_values_for_the_same_are_named(home, train, differs, are_same):
    """JAX takes a NumPy batch, replicated weights, and a replicated loss for the same on all hosts
    and does not check it: the job succeeds, each host with another loss. A rate that a host
    computes of its own time is no fault."""
    job = kinetic.run(SLICES[2])(train).run_async(are_same=are_same)
    job.result(timeout=300)
    details = [event["detail"] for event in find_difference(job)]
    assert len(details) == (not are_same)
    opening, ending = f"hosts 0 and 1 {differs}".split("{}")
    for detail in details:
        assert detail.startswith(f"{opening}train_step at on_differing_hosts.py:")
        assert f"{ending}, which" in detail


@pytest.mark.parametrize(
    ("differs_at", "comparison", "wanted"),
    [(3, True, 1), (21, True, 0), (21, "inputs", 1), (None, "inputs", 0)],
)
def test_inputs_of_further_calls_are_compared(home, differs_at, comparison, wanted):
    """Those of the first 20 calls on a simulated slice, with "inputs" those of every call."""
    job = kinetic.run(SLICES[2], compare_programs=comparison)(train_on_steps).run_async(
        steps=24, differs_at=differs_at
    )
    job.result(timeout=300)
    details = [event["detail"] for event in find_difference(job)]
    assert len(details) == wanted
    for detail in details:
        assert f" in call {differs_at} different values for the argument batch (i32[4,8])" in detail


@pytest.mark.parametrize("call", [differ, train_on_own_rows])
def test_a_difference_ends_a_strict_job(home, call):
    """Host 1 takes another branch, or gives another batch: the job fails with that as its cause."""
    arguments = {"fault": "branch"} if call is differ else {"are_same": False}
    job = kinetic.run(SLICES[2], compare_programs="strict", retries=1)(call).run_async(**arguments)
    with pytest.raises(
        kinetic.errors.JobFailed, match=r"hosts 0 and 1 .* train_step at"
    ) as failure:
        job.result(timeout=300)
    assert failure.value.hosts == (0, 1)
    assert job.status() == kinetic.job_status.JobStatus.FAILED
    assert len(find_difference(job)) == 1


def test_a_difference_ends_a_strict_script(home, tmp_path):
    """A script whose hosts give a program different batches fails, too, with exit code 1."""
    script = tmp_path / "train.py"
    source = Path(on_differing_hosts.__file__).read_text()
    script.write_text(f"{source}\ntrain_on_own_rows(are_same=False)\n")
    command = [sys.executable, "-m", "kinetic", "run", "-a", SLICES[2], str(script)]
    env = os.environ | {"KINETIC_COMPARE_PROGRAMS": "strict"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "hosts 0 and 1 give train_step at train.py:" in done.stderr
