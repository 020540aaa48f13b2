"""Checks of a Ray cluster by `kinetic doctor`, and its rows in `kinetic accelerators --live`."""

from __future__ import annotations

import json

import pytest

from kinetic._backends.base import PoolRow
from kinetic._backends.ray.checks import RayFacts, collect_resources, judge
from kinetic._core.findings import Level
from kinetic._ray.jobs_api import RayNode
from kinetic.cli.root import call

V6E = {"ray.io/tpu-pod-type": "v6e-16", "ray.io/tpu-topology": "4x4"}
HEAD = RayNode("1", "10.0.0.1", True, True, {"CPU": 8.0}, {})
HOSTS = tuple(
    RayNode(f"{n}", f"10.0.0.{n}", True, False, {"CPU": 1.0, "TPU": 4.0}, V6E) for n in range(2, 6)
)
DEAD = RayNode("9", "10.0.0.9", False, False, {"TPU": 4.0}, V6E)
GPU = RayNode("7", "10.0.0.7", True, False, {"GPU": 2.0}, {"ray.io/accelerator-type": "A100"})
GOOD = RayFacts("http://head:8265", "", "2.60.0", (HEAD, *HOSTS), "3.11.7", True)
STORE = "ray+http://head:8265"


def judge_facts(facts, store=STORE):
    return {finding.check: finding for finding in judge(facts, store, "3.11")}


def test_a_good_cluster_has_no_problem():
    findings = judge_facts(GOOD)
    assert {finding.level for finding in findings.values()} == {Level.OK}
    assert findings["ray resources"].detail == "5 nodes with 12 CPU, 16 TPU."
    assert "its server runs" in findings["store"].detail
    assert "store" not in judge_facts(GOOD, "gs://bucket")


@pytest.mark.parametrize(
    ("facts", "check", "words"),
    [
        (RayFacts("http://head:8265", "Nothing answers."), "ray", "Nothing answers"),
        (RayFacts("http://head:8265", "", "2.60.0", ()), "ray resources", "None of the cluster's"),
        (RayFacts("http://head:8265", "", "2.60.0", (HEAD,), "3.12.1"), "ray", "this machine 3.11"),
        (RayFacts("http://head:8265", "", "2.9.0", (HEAD,)), "ray", "jobs need Ray 2.49"),
    ],
)
def test_each_problem_is_said(facts, check, words):
    finding = judge_facts(facts)[check]
    assert finding.level is Level.PROBLEM
    assert words in finding.detail


def test_a_store_without_its_store_server_is_no_problem():
    findings = judge_facts(RayFacts("http://head:8265", "", "2.60.0", (HEAD,)))
    assert "starts with the first job" in findings["store"].detail


def test_resources_are_named_as_jobs_ask_for_them():
    assert collect_resources((HEAD, *HOSTS, DEAD, GPU)) == (
        PoolRow("cpu", "CPU", 1, 1, 8.0, 1),
        PoolRow("", "GPU A100", 1, 1, 2.0, 1),
        PoolRow("tpu-v6e-16", "TPU v6e-16", 4, 4, 4.0, 1, topology="4x4"),
    )


def run_json(capsys, *argv):
    call([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.starts_processes
def test_doctor_and_accelerators_ask_the_cluster(common_ray, monkeypatch, capsys):
    monkeypatch.setenv("KINETIC_BACKEND", "ray")
    monkeypatch.setenv("RAY_ADDRESS", common_ray.address)
    listed = run_json(capsys, "accelerators", "--live")
    assert {"tpu-v6e-16", "cpu"} <= {row["name"] for row in listed}
    assert call(["accelerators", "--live", "v6e"]) == 0
    assert "tpu-v6e-16" in capsys.readouterr().out
    examined = run_json(capsys, "doctor")
    findings = {row["check"]: row for row in examined["findings"]}
    assert "16 TPU" in findings["ray resources"]["detail"]
    assert common_ray.address in findings["ray"]["detail"]
    assert common_ray.token not in json.dumps(examined)


@pytest.mark.starts_processes
def test_doctor_says_that_nothing_answers(monkeypatch, capsys):
    monkeypatch.setenv("KINETIC_BACKEND", "ray")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    examined = run_json(capsys, "doctor")
    assert examined["ok"] is False
    (finding,) = [row for row in examined["findings"] if row["check"] == "ray"]
    assert "Nothing answers at http://127.0.0.1:9" in finding["detail"]
